"""What it costs to take one output message: decode, validate, route, store, retire.

Bytes of ``BatchTokenIDOutSlim`` go through the client's own decoder into ``Flights.apply``,
every row of a request in flight, load stored; the state is made new for each sample, outside
the timing, and the garbage collector runs as Python starts it. All figures but ``us`` are
ratios to ``ormsgpack.unpackb`` of the same bytes, which checks nothing and hands nothing on:

    tszmq     the client
    msgspec   msgspec's decoder with the columns' types: checked, not routed
    attrs     unpackb, an attrs object a row, appended to its request's list by id: not checked

Loads: ``steady`` (the same rows in each message), ``finish`` (some rows end in each message
and others take their place: 1, or 1 in 64), ``change`` (no id is in two messages in a row),
``ranks`` (as steady, from four engines in turn), ``text`` (as steady, with token ids of all
widths, as text has them: a tenth below 128, a tenth above 65535; elsewhere they are below 32000).
Less than 1 means that the client is done before a bare decode would be.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
import ormsgpack

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._baselines import Columns
from benchmarks._harness import Bench, Ratio, Table, interleave, paired, short, start
from tszmq.core.flights import Flights
from tszmq.core.ids import WireIds
from tszmq.core.request import ABORTED, Request
from tszmq.types import EngineInfo
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

NONCE = "0123456789abcdef"
PROMPT = 100
INFO = EngineInfo(0, True, 1 << 20, 4000, 64, "bfloat16", "benchmark")
RANKS = 4

_chance = random.Random(5)
TEXT = [
    _chance.choice([_chance.randrange(128), _chance.randrange(65536, 151936)])
    if _chance.random() < 0.2
    else _chance.randrange(128, 65536)
    for _ in range(9973)
]
"""Token ids as text has them."""

# What the project asks of itself: (load, rows, logprobs) to at most so many times unpackb. One
# row: 2.5 us where unpackb takes 0.52.
LIMITS = {
    ("steady", 1, False): 4.8,
    ("steady", 64, False): 1.4,
    ("steady", 256, False): 1.25,
    ("steady", 256, True): 2.5,
    ("text", 256, False): 1.25,
    ("ranks", 256, False): 1.4,
    ("finish", 256, False): 2.5,
    ("change", 256, False): 3.0,
}


class NoGate:
    """Nobody waits."""

    def wake(self) -> None:
        """Nothing to do."""


@attrs.frozen
class Load:
    """Messages of one kind, and the requests that they are about.

    Attributes:
        rows, tokens, logprobs, kind: As in the table.
        messages: In the order in which they are to be applied.
        rids: Every request and its engine, in the order of admission.
    """

    rows: int
    tokens: int
    logprobs: bool
    kind: str
    messages: list[bytes]
    rids: dict[str, int]


def make_load(rows: int, tokens: int, logprobs: bool, kind: str, count: int) -> Load:
    """``count`` messages."""
    ids = WireIds(NONCE)
    ids.new()  # the engine's registration takes the first
    sets = [
        [ids.new() for _ in range(rows)] for _ in range({"change": 2, "ranks": RANKS}.get(kind, 1))
    ]
    everyone = {
        rid: engine if kind == "ranks" else 0 for engine, rids in enumerate(sets) for rid in rids
    }
    done = dict.fromkeys(everyone, 0)
    messages = []
    for step in range(count):
        turn = step % len(sets)
        rids = sets[turn]
        ending = max(1, rows // 64) if kind == "finish" else 0
        for rid in rids:
            done[rid] += tokens
        engine = everyone[rids[0]]
        ids_of_step = _tokens(kind, rows, tokens, step)
        messages.append(_message(rids, done, ids_of_step, logprobs, ending, step, engine))
        if ending:
            fresh = dict.fromkeys([ids.new() for _ in range(ending)], 0)
            everyone |= fresh
            done |= fresh
            sets[turn] = [*rids[ending:], *fresh]
    return Load(rows, tokens, logprobs, kind, messages, everyone)


def _tokens(kind: str, rows: int, tokens: int, step: int) -> list[list[int]]:
    vocabulary = TEXT if kind == "text" else range(32000)
    return [
        [
            vocabulary[(row * 7919 + (step * tokens + at) * 10473) % len(vocabulary)]
            for at in range(tokens)
        ]
        for row in range(rows)
    ]


def _message(
    rids: list[str],
    done: dict[str, int],
    ids: list[list[int]],
    logprobs: bool,
    ending: int,
    step: int,
    engine: int,
) -> bytes:
    rows = len(rids)
    empty: list[list[int]] = [[]] * rows
    values = [[-0.01 * (token % 1000) - 0.005 for token in row] for row in ids]
    columns: list[Any] = [
        "BatchTokenIDOutSlim",
        rids,
        ids,
        ["length"] * ending + [""] * (rows - ending),
        [PROMPT] * rows,
        [done[rid] for rid in rids],
        [0] * rows,
        values if logprobs else empty,
        ids if logprobs else empty,
        engine,
        rows,
        0,
        1000 + step // 16,
        4000,
    ]
    return ormsgpack.packb(columns)


def new_flights(load: Load) -> Flights:
    """A client's state with every request of the load in flight."""
    flights = Flights(WireIds(NONCE))
    for engine in sorted(set(load.rids.values())):
        flights.register(attrs.evolve(INFO, engine_index=engine), 0.0)
    gate = NoGate()
    for rid, engine in load.rids.items():
        request = Request(rid, PROMPT, gate, 0.0, logprobs=load.logprobs)
        flights.admit(request, engine, 0.0, gate)
    return flights


# --- the cases: each prepares, then is timed --------------------------------------------------


def bare(load: Load) -> Callable[[], None]:
    """Decode, nothing else."""

    def run() -> None:
        unpackb = ormsgpack.unpackb
        for message in load.messages:
            unpackb(message)

    return run


def client(load: Load) -> Callable[[], None]:
    """What the receiver thread does with a message, but for its lock and its socket."""
    flights, decoder = new_flights(load), TokenSpeedDecoder()

    # The last of each engine: withdrawn, it puts an end to work that is put off.
    last = list({engine: flights.requests[rid] for rid, engine in load.rids.items()}.values())

    def run() -> None:
        for message in load.messages:
            flights.apply(decoder.decode([message]), time.monotonic())
        for request in last:
            flights.withdraw(request, ABORTED, time.monotonic())

    return run


def typed(load: Load) -> Callable[[], None]:
    """msgspec's decoder of the same types."""

    def run() -> None:
        decode = msgspec.msgpack.Decoder(Columns).decode
        for message in load.messages:
            decode(message)

    return run


@attrs.define
class Row:
    """One row, the way one would first write it."""

    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: list[float]


def attrs_rows(load: Load) -> Callable[[], None]:
    """An object a row, appended to its request's list."""
    sinks: dict[str, list[Row]] = {rid: [] for rid in load.rids}

    def run() -> None:
        for message in load.messages:
            _, rids, tokens, reasons, prompt, done, cached, logprobs, *_ = ormsgpack.unpackb(
                message
            )
            for rid, *values in zip(
                rids, tokens, reasons, prompt, done, cached, logprobs, strict=True
            ):
                sinks[rid].append(Row(*values))
                if values[1]:
                    del sinks[rid]

    return run


CASES: dict[str, Callable[[Load], Callable[[], None]]] = {
    "bare": bare,
    "tszmq": client,
    "msgspec": typed,
    "attrs": attrs_rows,
}


def microseconds(case: Callable[[Load], Callable[[], None]], load: Load) -> float:
    """CPU time of one message."""
    run = case(load)
    gc.collect()
    started = time.process_time()
    run()
    return (time.process_time() - started) * 1e6 / len(load.messages)


def verify(load: Load) -> None:
    """The client stores exactly the tokens that were sent, and retires exactly who ended."""
    flights, decoder = new_flights(load), TokenSpeedDecoder()
    requests = dict(flights.requests)
    expected: dict[str, list[int]] = {rid: [] for rid in load.rids}
    ended: set[str] = set()
    for message in load.messages:
        flights.apply(decoder.decode([message]), 0.0)
        _, rids, tokens, reasons, *_ = ormsgpack.unpackb(message)
        for rid, row, reason in zip(rids, tokens, reasons, strict=True):
            expected[rid] += row
            if reason:
                ended.add(rid)
    assert set(flights.requests) == set(load.rids) - ended
    for request in list(flights.requests.values()):
        flights.withdraw(request, ABORTED, 0.0)
    assert all(requests[rid].tokens.tolist() == expected[rid] for rid in load.rids)


def measure(bench: Bench, table: Table, load: Load) -> dict[str, Ratio]:
    """One line of the table."""
    verify(load)
    cases = {name: partial(microseconds, case, load) for name, case in CASES.items()}
    samples = interleave(cases, bench.rounds(15))
    ratios = {name: paired(samples[name], samples["bare"]) for name in CASES if name != "bare"}
    table.add(
        load.kind,
        load.rows,
        load.tokens,
        "yes" if load.logprobs else "no",
        min(samples["bare"]),
        ratios["tszmq"],
        ratios["msgspec"],
        ratios["attrs"],
    )
    print(*map(short, table.rows[-1][:5]), *map(str, table.rows[-1][5:]), file=sys.stderr)
    return ratios


def main() -> None:
    """Measure every load."""
    bench = start(__file__, __doc__)
    table = bench.table(
        "One message, ratios to bare unpackb: median of rounds (quartiles)",
        *("load", "rows", "tokens", "logprobs", "bare us", "tszmq", "msgspec", "attrs"),
    )
    sizes = (1, 64, 256) if bench.quick else (1, 8, 64, 256, 1024)
    combinations = [
        ("steady", rows, k, lp) for lp in (False, True) for k in (1, 4) for rows in sizes
    ]
    kinds = ("finish", "change", "ranks", "text")
    combinations += [(kind, rows, 1, False) for kind in kinds for rows in sizes]
    for kind, rows, tokens, logprobs in combinations:
        count = max(8, (1000 if bench.quick else 20000) // (rows + 8))
        if kind == "ranks":
            count *= RANKS
        ratios = measure(bench, table, make_load(rows, tokens, logprobs, kind, count))
        limit = LIMITS.get((kind, rows, logprobs)) if tokens == 1 else None
        if limit is not None:
            name = f"{kind}, rows: {rows}{', logprobs' if logprobs else ''}"
            bench.judge(name, ratios["tszmq"].median, most=limit)
    bench.show(table)
    bench.finish()


if __name__ == "__main__":
    main()
