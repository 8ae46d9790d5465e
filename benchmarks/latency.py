"""What the client adds to a token's way: engine stamps, consumer compares.

The engine sends a step at a steady pace, each token being the time at which its batch was
encoded. ``floor`` is one thread that blocks in recv and unpacks; ``queue`` is a thread that does
so and puts each token into the ``SimpleQueue`` that its reader waits at: one hand-over, without
checks or routing; ``stream`` is the client, a thread a stream. ``p50`` and ``p99`` are ratios to
the floor of the same case: one stream or 256, with nothing else in the process or beside one
CPU-bound Python thread, at CPython's default switch interval (5 ms) or 0.5 ms. Each run is a
process of its own.

Beside a CPU-bound thread every hand-over of the interpreter waits for the switch interval. With
256 streams the wait is for one's turn among the 256 threads that one message wakes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ormsgpack

from benchmarks._frontend import BareFrontend, bare_rids, engine
from benchmarks._harness import (
    Bench,
    in_child,
    interleave,
    paired,
    quantile,
    short_directory,
    start,
)
from benchmarks._sender import age_of
from tszmq import Client, SamplingParams

PROMPT = [1, 2, 3]
_WARM_UP = 5  # steps at each stream's start that do not count


def floor(directory: Path, rows: int, steps: int, step_ms: float) -> list[float]:
    """Ages of the tokens, microseconds, when a bare loop has them."""
    frontend = BareFrontend(directory)
    options = {"total": rows, "running": rows, "step_ms": step_ms}
    ages: list[float] = []
    with engine(frontend.handshake, "stamps", **options) as sender:
        frontend.connect()
        sender.go_when_ready()
        for rid in bare_rids(rows):
            frontend.add(rid, PROMPT, steps)
        for _ in range(steps):
            tokens = ormsgpack.unpackb(frontend.output.recv())[2]
            ages += [age_of(row[0]) for row in tokens]
    frontend.close()
    return ages[_WARM_UP * rows :]


def queue(directory: Path, rows: int, steps: int, step_ms: float) -> list[float]:
    """The same, when the threads that wait at a queue each have them."""
    frontend = BareFrontend(directory)
    options = {"total": rows, "running": rows, "step_ms": step_ms}
    queues: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(rows)]
    ages: list[float] = []

    def read(own: SimpleQueue[int]) -> None:
        mine = [age_of(own.get()) for _ in range(steps)]
        ages.extend(mine[_WARM_UP:])

    def receive() -> None:
        of = dict(zip(bare_rids(rows), queues, strict=True))
        for _ in range(steps):
            _, rids, tokens, *_ = ormsgpack.unpackb(frontend.output.recv())
            for rid, row in zip(rids, tokens, strict=True):
                of[rid].put(row[0])

    with engine(frontend.handshake, "stamps", **options) as sender:
        frontend.connect()
        sender.go_when_ready()
        for rid in bare_rids(rows):
            frontend.add(rid, PROMPT, steps)
        _run_all([receive, *(partial(read, each) for each in queues)])
    frontend.close()
    return ages


def _run_all(actions: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stream(directory: Path, rows: int, steps: int, step_ms: float) -> list[float]:
    """The same, when the threads that iterate streams have them."""
    ages: list[float] = []

    def read() -> None:
        mine = []
        with client.stream(PROMPT, SamplingParams(max_tokens=steps)) as chunks:
            for chunk in chunks:
                mine += [age_of(token) for token in chunk.token_ids]
        ages.extend(mine[_WARM_UP:])

    bound = Client.bind(f"ipc://{directory}/h", connect_timeout=30)
    options = {"total": rows, "running": rows, "step_ms": step_ms}
    with (
        engine(bound.endpoints.handshake, "stamps", **options) as sender,
        bound.connect() as client,
    ):
        sender.go_when_ready()
        _run_all([read] * rows)
    return ages


WAYS = {"floor": floor, "queue": queue, "stream": stream}


def burn() -> None:
    """A CPU-bound Python thread."""
    count = 0
    while True:
        count += 1


def run(way: str, rows: int, burner: bool, interval_ms: float, steps: int) -> dict[str, float]:
    """One run in this process."""
    sys.setswitchinterval(interval_ms / 1000)
    if burner:
        threading.Thread(target=burn, daemon=True).start()
    with short_directory() as directory:
        ages = WAYS[way](directory, rows, steps, 5.0 if rows == 1 else 20.0)
    return {"p50": quantile(ages, 0.5), "p99": quantile(ages, 0.99)}


def main() -> None:
    """Every case."""
    bench = start(__file__, __doc__, ("--one", {"nargs": 5}))
    if bench.args.one:
        way, rows, burner, interval, steps = bench.args.one
        print(json.dumps(run(way, int(rows), burner == "True", float(interval), int(steps))))
        return
    cases = [(1, False, 5.0), (256, False, 5.0), (1, True, 0.5)]
    if not bench.quick:
        cases += [(1, False, 0.5), (256, False, 0.5)]
        cases += [(1, True, 5.0), (256, True, 5.0), (256, True, 0.5)]
    _compare(bench, sorted(cases))
    bench.finish()


def _compare(bench: Bench, cases: list[tuple[int, bool, float]]) -> None:
    def one(way: str, case: tuple[int, bool, float]) -> dict[str, float]:
        rows = case[0]
        steps = (40 if rows == 1 else 15) if bench.quick else (250 if rows == 1 else 60)
        result: dict[str, float] = in_child(__file__, "--one", way, *map(str, case), str(steps))
        return result

    runs = {f"{way} {case}": partial(one, way, case) for case in cases for way in WAYS}
    samples = interleave(runs, bench.rounds(5, 1))
    table = bench.table(
        "Age of a token at its consumer: median of rounds, ratios to the floor (quartiles)",
        *("streams", "CPU-bound thread", "interval ms", "floor p50 us", "queue p50", "queue p99"),
        *("p50", "p99"),
    )
    for case in cases:
        ages = {way: samples[f"{way} {case}"] for way in WAYS}
        table.add(
            case[0],
            "yes" if case[1] else "no",
            case[2],
            quantile([sample["p50"] for sample in ages["floor"]], 0.5),
            *(
                paired([s[key] for s in ages[way]], [s[key] for s in ages["floor"]])
                for way in ("queue", "stream")
                for key in ("p50", "p99")
            ),
        )
    bench.show(table)


if __name__ == "__main__":
    main()
