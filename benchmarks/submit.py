"""What a caller pays to send one request with a prompt of 1,000 tokens.

An engine that reads and never answers; the client's ``stream()`` returns when the request is
placed and posted to the thread that sends. The first table splits the call, one at a time
with a pause before each. The second has 32 threads that submit and abort as fast as they can.
The baseline is a lock and ``send_multipart`` of the same bytes on a ROUTER, which is all that
a client without validation, routing and aborts would do: the caller's own thread does what
the client leaves to its control thread. Ratios are to that, p50 to p50 and p99 to p99.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._frontend import BareFrontend, engine
from benchmarks._harness import Bench, paired, quantile, short_directory, start
from tszmq import Client, SamplingParams
from tszmq.core.request import ABORTED, Request
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Add
from tszmq.net.submit import Prepared, admit, withdraw
from tszmq.types import token_id_list
from tszmq.wire.base import AddRequest

T = TypeVar("T")

PROMPT = [(at * 7919) % 32000 for at in range(1000)]
PARAMS = SamplingParams(max_tokens=64)
THREADS = 32
_PAUSE = 0.001


class Bricks:
    """The parts of a ``stream()`` call, each timed on its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session = client._session
        self._ids = self._session.ids
        with self._session.shared.state as flights:
            self._info = flights.limits(None)
        self.seconds: dict[str, list[float]] = {}

    def call(self) -> None:
        """One request, part by part; then the same through the public call."""
        session, protocol = self._session, self._session.shared.protocol
        tokens = self._time("token_id_list", lambda: token_id_list(PROMPT))
        self._time("check", lambda: protocol.check(tokens, PARAMS, None, self._info))
        add = AddRequest(self._ids.new(), tokens, PARAMS, True, None, self._info, time.time())
        frames = self._time("encode", lambda: protocol.encode_add(add))
        gate = Gate()
        request = Request(add.request_id, len(tokens), gate, time.monotonic(), streaming=True)
        self._time("admit", lambda: admit(session, Prepared(request, None, add, frames), gate))
        self._time("post", lambda: session.shared.mailbox.post(Add(request, frames)))
        withdraw(session, request, ABORTED)

    def whole(self) -> None:
        """One ``stream()`` call."""
        self._time("stream()", lambda: self._client.stream(PROMPT, PARAMS)).close()

    def _time(self, name: str, step: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = step()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result


class Locked:
    """The baseline."""

    def __init__(self, frontend: BareFrontend, frames: list[bytes], abort: list[bytes]) -> None:
        self._frontend = frontend
        self._frames = frames
        self._abort = abort
        self._lock = threading.Lock()

    def add(self) -> None:
        """Send the request."""
        with self._lock:
            self._frontend.input.send_multipart([self._frontend.identity, *self._frames])

    def abort(self) -> None:
        """Send its abort."""
        with self._lock:
            self._frontend.input.send_multipart([self._frontend.identity, *self._abort])


def alone(bench: Bench, client: Client, locked: Locked) -> None:
    """One call at a time, taking turns with the baseline."""
    bricks = Bricks(client)
    base: list[float] = []
    for _ in range(100 if bench.quick else 2000):
        for step in (bricks.call, bricks.whole):
            time.sleep(_PAUSE)
            step()
        time.sleep(_PAUSE)
        started = time.perf_counter()
        locked.add()
        base.append(time.perf_counter() - started)
        locked.abort()
    table = bench.table(
        "One call at a time: ratios to lock + send_multipart",
        *("part", "p50 us", "p99 us", "p50", "p99"),
    )
    for name, seconds in [("lock + send_multipart", base), *bricks.seconds.items()]:
        p50, p99 = quantile(seconds, 0.5), quantile(seconds, 0.99)
        table.add(name, p50 * 1e6, p99 * 1e6, p50 / quantile(base, 0.5), p99 / quantile(base, 0.99))
    bench.show(table)


def together(bench: Bench, client: Client, locked: Locked) -> None:
    """32 threads at once."""

    def submit() -> Callable[[], None]:
        return client.stream(PROMPT, PARAMS).close

    def send() -> Callable[[], None]:
        locked.add()
        return locked.abort

    ways = {"lock + send_multipart": send, "stream()": submit}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    tails: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(bench.rounds(7)):
        for name, way in ways.items():
            rate, p99 = _hammer(way, 0.2 if bench.quick else 1.0)
            rates[name].append(rate)
            tails[name].append(p99)
    table = bench.table(
        f"{THREADS} threads, submit and abort: ratios, median of rounds (quartiles)",
        *("way", "calls/s", "p99 us", "rate", "p99"),
    )
    base = "lock + send_multipart"
    for name in ways:
        table.add(
            name,
            quantile(rates[name], 0.5),
            quantile(tails[name], 0.5) * 1e6,
            paired(rates[name], rates[base]),
            paired(tails[name], tails[base]),
        )
    bench.show(table)


def _hammer(way: Callable[[], Callable[[], None]], seconds: float) -> tuple[float, float]:
    """(calls a second, 99th percentile of a call's seconds)."""
    taken: list[float] = []
    end = time.monotonic() + seconds

    def run() -> None:
        while time.monotonic() < end:
            started = time.perf_counter()
            undo = way()
            taken.append(time.perf_counter() - started)
            undo()

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(taken) / (time.monotonic() - started)
    time.sleep(0.1)  # what was posted leaves before the next case
    return rate, quantile(taken, 0.99)


def main() -> None:
    """Both tables."""
    bench = start(__file__, __doc__)
    with ExitStack() as stack:
        frontend = BareFrontend(stack.enter_context(short_directory()))
        stack.enter_context(engine(frontend.handshake, "silent"))
        frontend.connect()
        bound = Client.bind(f"ipc://{stack.enter_context(short_directory())}/h", connect_timeout=30)
        stack.enter_context(engine(bound.endpoints.handshake, "silent"))
        client = stack.enter_context(bound.connect())
        protocol = client._session.shared.protocol
        rid = client._session.ids.new()
        add = AddRequest(rid, PROMPT, PARAMS, True, None, client.engines[0], time.time())
        locked = Locked(frontend, protocol.encode_add(add), protocol.encode_abort([rid]))
        alone(bench, client, locked)
        together(bench, client, locked)
        frontend.close()
    bench.finish()


if __name__ == "__main__":
    main()
