"""A frontend of bare sockets: no code of the client's, not even its codec."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import ormsgpack
import zmq

from tests.mock_engine import PATIENCE, eventually
from tszmq.sim import Fleet

DEAD = b"ENGINE_CORE_DEAD"
DEADLINE = 2 * PATIENCE


def pack(value) -> bytes:
    return ormsgpack.packb(value, option=ormsgpack.OPT_NON_STR_KEYS)


def unpack(data: bytes):
    return ormsgpack.unpackb(
        data, ext_hook=lambda tag, raw: (tag, raw), option=ormsgpack.OPT_NON_STR_KEYS
    )


class RawFrontend:
    """Binds what a frontend binds, over ipc in ``directory``."""

    def __init__(self, directory: Path, high_water: int = 0) -> None:
        self.context = zmq.Context()
        self.address = f"ipc://{directory}/h"
        self.inputs, self.outputs = f"ipc://{directory}/i", f"ipc://{directory}/o"
        self.handshake = self._bind(zmq.ROUTER, self.address)
        self.input = self._bind(zmq.ROUTER, self.inputs)
        self.output = self._bind(zmq.PULL, self.outputs, high_water)
        self.statuses: list[dict] = []

    def _bind(self, kind: int, address: str, high_water: int = 0):
        sock = self.context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, high_water)
        if kind == zmq.ROUTER:  # else an engine that comes back may be ignored for good
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sock.bind(address)
        return sock

    def close(self) -> None:
        self.context.destroy(linger=0)

    def hear(self, sock, seconds: float = DEADLINE) -> list[bytes]:
        assert sock.poll(seconds * 1000), "the engine said nothing"
        return sock.recv_multipart()

    def greet(self) -> None:
        """Take one message of the handshake; a HELLO is answered."""
        identity, payload = self.hear(self.handshake)
        status = unpack(payload)
        self.statuses.append(status)
        if status["status"] == "HELLO":
            addresses = {"inputs": [self.inputs], "outputs": [self.outputs]}
            init = {"addresses": addresses, "parallel_config": {}}
            self.handshake.send_multipart([identity, pack(init)])

    def accept_all(self, count: int) -> dict[bytes, dict]:
        """The whole start-up of ``count`` engines: registrations by identity."""
        for _ in range(2 * count):
            self.greet()
        return {
            identity: unpack(registration)
            for identity, registration in (self.hear(self.input) for _ in range(count))
        }

    def accept(self) -> tuple[bytes, dict]:
        """The whole start-up of one engine: its identity and registration."""
        ((identity, registration),) = self.accept_all(1).items()
        return identity, registration

    def send(self, identity: bytes, *frames: bytes) -> None:
        self.input.send_multipart([identity, *frames])

    def quiet(self, seconds: float = 0.3) -> bool:
        """Nothing comes for this long. Proves less than an answer to a later message."""
        return not self.output.poll(seconds * 1000)


def add(rid, ids, n=4, *, stream=True, logprobs=False, params=None, **more) -> bytes:
    """A TokenSpeed request; ``params`` are sampling parameters by position."""
    sampling = [n, None, None, 1.0, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 0]
    sampling += [None, None, None, None, False, True, True, False, None, None, None, None, None]
    for place, value in (params or {}).items():
        while len(sampling) <= place:
            sampling.append({24: None, 25: 1}[len(sampling)])
        sampling[place] = value
    fields = ["TokenizedGenerateReqInput", rid, None, None, list(ids), sampling]
    fields += [logprobs, -1, 0, None, stream]
    for place, value in more.items():
        fields[int(place[1:])] = value
    return pack(fields)


class Deadline:
    """Counts down through several waits."""

    def __init__(self, what: str, seconds: float = DEADLINE) -> None:
        self.what = what
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        left = self.end - time.monotonic()
        assert left > 0, f"not in time: {self.what}"
        return left


def wait_until(condition, what: str, seconds: float = DEADLINE) -> None:
    eventually(condition, seconds, f"not in time: {what}")


class Engine:
    """One child, registered."""

    def __init__(self, frontend: RawFrontend, fleet: Fleet) -> None:
        self.frontend, self.fleet = frontend, fleet
        self.identity, self.registration = frontend.accept()
        assert json.loads(fleet.read_line(0)) == {"ready": 0}

    def add(self, *args, **more) -> None:
        self.frontend.send(self.identity, b"\0", add(*args, **more))

    def abort(self, *rids: str) -> None:
        self.frontend.send(self.identity, b"\1", pack(list(rids)))

    def batch(self) -> list:
        return unpack(self.frontend.hear(self.frontend.output)[0])

    def until(self, *rids: str) -> tuple[dict[str, list], dict[str, str], list[list]]:
        """Batches until these ids have ended: tokens and reasons by id, and the batches."""
        tokens: dict[str, list] = {}
        reasons: dict[str, str] = {}
        batches = []
        while not set(rids) <= set(reasons):
            batch = self.batch()
            batches.append(batch)
            for rid, new, reason in zip(*batch[1:4], strict=True):
                tokens.setdefault(rid, []).extend(new)
                assert rid not in reasons, "a row after the end"
                if reason:
                    reasons[rid] = reason
        return tokens, reasons, batches

    def stats(self) -> dict:
        self.fleet.send(0, "stats")
        return json.loads(self.fleet.read_line(0))

    def exit_code(self) -> int | None:
        wait_until(lambda: self.fleet.exit_codes[0] is not None, "the engine ends")
        return self.fleet.exit_codes[0]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie of somebody else's has ended too.
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def children_of(pid: int) -> set[int]:
    """Processes that this one started and has not waited for."""
    found = set()
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # of a thread that ended meanwhile
            found |= {int(child) for child in listing.read_text().split()}
    return found
