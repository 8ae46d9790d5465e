"""Frontends for benchmarks: starting ``_sender.py``, and the bare one that baselines build on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import ormsgpack
import zmq

SENDER = str(Path(__file__).with_name("_sender.py"))


@attrs.define(eq=False)
class Engine:
    """A running ``_sender.py``, and what this process used since it was told to go.

    Attributes:
        process: The child.
        started: When it was told to send (monotonic), once it was.
        cpu: CPU seconds of this process at that time.
    """

    process: subprocess.Popen[bytes]
    started: float = 0.0
    cpu: float = 0.0
    _starter: threading.Thread | None = None

    def go_when_ready(self) -> None:
        """Let it send as soon as it has all requests, while the callers already wait."""
        self._starter = threading.Thread(target=self._go, daemon=True)
        self._starter.start()

    def _go(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None
        assert self.process.stdin is not None
        if pipe.readline() != b"ready\n":
            raise RuntimeError("the sender ended before it was ready")
        time.sleep(0.02)  # whoever sent the last request now waits
        self.cpu = time.process_time()
        self.started = time.monotonic()
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def used(self) -> tuple[float, float]:
        """(seconds, CPU seconds of this process) since it was told to go."""
        now, cpu = time.monotonic(), time.process_time()
        assert self._starter is not None
        self._starter.join()
        return now - self.started, cpu - self.cpu


@contextmanager
def engine(handshake: str, mode: str, **options: object) -> Iterator[Engine]:
    """Start the sender; kill it at the end."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, SENDER, handshake, mode, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Engine(process)
    finally:
        process.kill()
        process.communicate()


class BareFrontend:
    """Binds, registers one engine, sends requests; its owner reads ``output`` as it likes.

    Args:
        directory: Where the Unix sockets go.
    """

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.handshake = f"ipc://{directory}/h"
        self._greeter = self._bind(zmq.ROUTER, self.handshake)
        self.input = self._bind(zmq.ROUTER, f"ipc://{directory}/i")
        self.output = self._bind(zmq.PULL, f"ipc://{directory}/o")
        self._addresses = {
            "inputs": [f"ipc://{directory}/i"],
            "outputs": [f"ipc://{directory}/o"],
        }
        self.identity = b""

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        bound = self.context.socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        bound.set_hwm(0)
        bound.bind(address)
        return bound

    def connect(self) -> None:
        """Serve the start-up of one engine."""
        self.identity, _ = self._greeter.recv_multipart()
        init = {"addresses": self._addresses, "parallel_config": {}}
        self._greeter.send_multipart([self.identity, ormsgpack.packb(init)])
        self._greeter.recv_multipart()
        self.input.recv_multipart()

    def add(self, rid: str, prompt: list[int], max_tokens: int) -> None:
        """Send one request."""
        self.input.send_multipart([self.identity, *bare_add(rid, prompt, max_tokens)])

    def close(self) -> None:
        """Close everything."""
        self.context.destroy(0)


def bare_add(rid: str, prompt: list[int], max_tokens: int) -> list[bytes]:
    """The frames of a request, as the client would encode it."""
    sampling: list[Any] = [max_tokens, None, None, 1.0, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 0]
    sampling += [None, None, None, None, False, True, True, False, None, None, None, None, None]
    request = ["TokenizedGenerateReqInput", rid, None, None, prompt, sampling]
    return [b"\x00", ormsgpack.packb([*request, False, -1, 0, None, False])]


def bare_rids(count: int) -> list[str]:
    """Ids as long as the client's."""
    return [f"{0xABCDEF0123456789:016x}{number:012x}" for number in range(1, count + 1)]
