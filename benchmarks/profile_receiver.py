"""Where the receiver thread's time goes, at 256 rows a message.

Each line is a stage with all that comes before it, so that a line less the one above is what
that stage costs; all are ratios to bare ``unpackb`` of the same bytes, which is the first.
``beyond`` is the difference in microseconds. Loads as in ``decode.py``; in ``streams`` every
row is read along, and shown to its reader after each message (the receiver does that once for
up to 32). Nobody sleeps at the gates that ``wake`` wakes: it is the bookkeeping alone, not what
the kernel takes. Below, what single steps cost that the receiver takes for each message or
finish.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ormsgpack
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness import Bench, interleave, paired, start
from benchmarks.decode import INFO, PROMPT, Load, make_load
from tszmq.codec import unpack_pieces
from tszmq.core.flights import Flights
from tszmq.core.ids import WireIds
from tszmq.core.request import ABORTED, Request
from tszmq.net.gate import Gate
from tszmq.net.shared import wake_all
from tszmq.ownership import Level, Mutex, mutex
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

ROWS = 256


def state_of(load: Load, streaming: bool) -> Mutex[Flights]:
    """The client's state with every request in flight, each with a gate of its own."""
    flights = Flights(WireIds(next(iter(load.rids))[:16]))
    flights.register(INFO, 0.0)
    for rid in load.rids:
        gate = Gate()
        request = Request(rid, PROMPT, gate, 0.0, streaming=streaming)
        flights.admit(request, None, 0.0, gate)
    return mutex(Level.STATE, flights)


def bare(load: Load, _: bool) -> float:
    """unpackb."""
    unpackb = ormsgpack.unpackb
    return _timed(lambda: [unpackb(message) and None for message in load.messages])


def whole(load: Load, _: bool) -> float:
    """unpackb of bytes that must be exactly one object."""
    return _timed(lambda: [unpack_pieces((message,)) and None for message in load.messages])


def decoded(load: Load, _: bool) -> float:
    """The decoder: validation, the cut, the remembered ids."""
    decode = TokenSpeedDecoder().decode
    return _timed(lambda: [decode([message]) and None for message in load.messages])


def applied(load: Load, streaming: bool, *, wake: bool = False) -> float:
    """With the lock and ``Flights.apply``."""
    decode, state = TokenSpeedDecoder().decode, state_of(load, streaming)
    with state as flights:
        last = flights.requests[list(load.rids)[-1]]

    def run() -> None:
        for message in load.messages:
            batch = decode([message])
            with state as flights:
                done = flights.apply(batch, time.monotonic())
            if wake:
                with state as flights:
                    shown = flights.reveal() if streaming else []
                wake_all([*done.wakes, *shown])
        with state as flights:
            flights.withdraw(last, ABORTED, time.monotonic())

    return _timed(run)


STAGES: dict[str, Callable[[Load, bool], float]] = {
    "unpackb": bare,
    "whole object": whole,
    "decoder": decoded,
    "lock, apply": applied,
    "wake": partial(applied, wake=True),
}


def _timed(run: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    run()
    return time.process_time() - started


def _repeat(step: Callable[[], object], count: int) -> float:
    def run() -> None:
        for _ in range(count):
            step()

    return _timed(run)


def stages(bench: Bench) -> None:
    """The first table."""
    table = bench.table(
        f"{ROWS} rows, stage by stage: ratios to unpackb, median of rounds (quartiles)",
        *("load", "stage", "us", "to unpackb", "beyond us"),
    )
    for kind, streaming in (
        ("steady", False),
        ("finish", False),
        ("change", False),
        ("steady", True),
    ):
        load = make_load(ROWS, 1, False, kind, 30 if bench.quick else 300)
        cases = {name: partial(stage, load, streaming) for name, stage in STAGES.items()}
        samples = interleave(cases, bench.rounds(15))
        before = 0.0
        for name, seconds in samples.items():
            micros = sorted(seconds)[len(seconds) // 2] / len(load.messages) * 1e6
            ratio = paired(seconds, samples["unpackb"])
            kind_name = "streams" if streaming else kind
            table.add(kind_name, name, micros, ratio, micros - before)
            before = micros
    bench.show(table)


def steps(bench: Bench) -> None:
    """The second table: what the receiver does once a message, a wake or a finish."""
    count = 300 if bench.quick else 3000
    message = make_load(ROWS, 1, False, "steady", 1).messages[0]
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for ours in (pull, push):
        ours.set_hwm(0)
    pull.bind("inproc://profile")
    push.connect("inproc://profile")

    def receiving(take: Callable[[], object]) -> float:
        for _ in range(count):
            push.send(message)
        return _repeat(take, count)

    state = mutex(Level.STATE, object())

    def locked() -> None:
        with state:
            pass

    request = Request("x", PROMPT, Gate(), 0.0)
    request.tokens = array("I", range(300))
    cases: dict[str, Callable[[], float]] = {
        "recv(), bytes": partial(receiving, pull.recv),
        "recv(copy=False).bytes": partial(receiving, lambda: pull.recv(copy=False).bytes),
        "recv_multipart()": partial(receiving, pull.recv_multipart),
        "poll(0)": lambda: _repeat(partial(pull.poll, 0), count),
        "the guard": lambda: _repeat(locked, count),
        "wake, nobody sleeps": lambda: _repeat(request.gate.wake, count),
        "a Completion of 300 tokens": lambda: _repeat(
            partial(request.completion, "stop", 0.0), count
        ),
    }
    samples = interleave(cases, bench.rounds(15))
    table = bench.table(
        f"Single steps: ratios to recv() of {len(message)} bytes", "step", "us", "ratio"
    )
    for name, seconds in samples.items():
        micros = sorted(seconds)[len(seconds) // 2] / count * 1e6
        table.add(name, micros, paired(seconds, samples["recv(), bytes"]))
    bench.show(table)
    context.destroy(0)


def main() -> None:
    """Both tables."""
    bench = start(__file__, __doc__)
    stages(bench)
    steps(bench)
    bench.finish()


if __name__ == "__main__":
    main()
