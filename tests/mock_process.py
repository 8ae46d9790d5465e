"""The mock engines as a child process, for tests that kill or stop one.

``ProcessMock`` starts it and passes calls on: one JSON line each way over its standard input
and output. The child ends when its input does, so that it never outlives the test run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import attrs

from tests.mock_engine import PATIENCE, AutoEngine, MockEngine, eventually


class ProcessMock:
    """A ``MockEngine`` (or, with ``auto``, an ``AutoEngine``) in a process of its own.

    Unknown methods are those of the engine in the child: ``mock.recv_add()`` returns
    something with the fields of ``Add``; ``mock.tokens(rid, ids)`` and the like return None.
    """

    def __init__(
        self, handshake_address: str, index: int = 0, *, auto: bool = False, **options: Any
    ) -> None:
        self.index = index
        self._calls = 0
        self._left_over = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mock_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.call("start", handshake_address, index, auto, options)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine in the child, and return what it returned."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, args, kwargs]).encode() + b"\n")
        self._process.stdin.flush()
        kind, value = json.loads(self._line(PATIENCE * 3))
        assert kind == "ok", f"{method}: {value}"
        return SimpleNamespace(**value) if isinstance(value, dict) else value

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._left_over:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, left))
            assert readable, f"the child did not answer within {seconds} s"
            data = os.read(self._process.stdout.fileno(), 65536)
            assert data, "the child ended"
            self._left_over += data
        line, self._left_over = self._left_over.split(b"\n", 1)
        return line

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: self._state() == "T")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def _state(self) -> str:
        with open(f"/proc/{self.pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0]

    def close(self) -> None:
        """End the child, whatever state it is in."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def check(self) -> None:
        """Nothing to see from here: the child may be dead."""


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {
            field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, dict, type(None))) else repr(value)


def _main() -> None:
    engine: Any = None
    for line in sys.stdin.buffer:
        method, args, kwargs = json.loads(line)
        try:
            if method == "start":
                address, index, auto, options = args
                engine = (AutoEngine if auto else MockEngine)(address, index, **options)
                answer = None
            elif method == "send_raw":
                answer = engine.send_raw([bytes.fromhex(frame) for frame in args[0]])
            else:
                answer = getattr(engine, method)(*args, **kwargs)
            # A handle on the engine itself (hello, connect) means no more than success.
            reply = ["ok", None if answer is engine else _plain(answer)]
        except Exception as error:
            reply = ["error", f"{type(error).__name__}: {error}"]
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
