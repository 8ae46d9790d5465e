"""What a guard costs: ``with guard as value:`` against a bare ``threading.Lock``.

Each column is a build of ``tszmq.ownership``, in a process of its own (the choice is made at
import): the checker off, as users run it, and on (``TSZMQ_DEBUG=1``), as the tests do. Rows:
the guard, ``threading.RLock``, and a guard written in Python, which is what the plain build
would cost without its trick. Uncontended, one thread; ratios are to ``threading.Lock``.
``32 threads`` is the guard around a short critical section, to a lock around the same.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness import Bench, in_child, interleave, paired, start
from tszmq.ownership import CHECKED, Level, mutex

Guard = AbstractContextManager[object]


class PythonGuard:
    """The obvious guard."""

    def __init__(self, value: object) -> None:
        self._value = value
        self._lock = threading.Lock()

    def __enter__(self) -> object:
        self._lock.acquire()
        return self._value

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def alone(guard: Guard, count: int) -> float:
    """CPU seconds of ``count`` blocks."""
    started = time.process_time()
    for _ in range(count):
        with guard:
            pass
    return time.process_time() - started


def contended(guard: Guard, count: int) -> float:
    """Seconds of ``count`` blocks by 32 threads in all."""
    counter = [0]

    def run() -> None:
        for _ in range(count // 32):
            with guard:
                counter[0] += 1

    threads = [threading.Thread(target=run) for _ in range(32)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def measure(rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of each case in this build."""
    guards: dict[str, Guard] = {
        "Lock": threading.Lock(),
        "guard": mutex(Level.STATE, object()),
        "RLock": threading.RLock(),
        "Python guard": PythonGuard(object()),
    }
    cases: dict[str, Callable[[], float]] = {
        name: partial(alone, guard, count) for name, guard in guards.items()
    }
    cases["32 threads, Lock"] = partial(contended, guards["Lock"], count)
    cases["32 threads"] = partial(contended, guards["guard"], count)
    return interleave(cases, rounds)


def main() -> None:
    """Both builds."""
    bench = start(__file__, __doc__, ("--one", {"nargs": 2, "metavar": ("ROUNDS", "COUNT")}))
    if bench.args.one:
        rounds, count = map(int, bench.args.one)
        print(json.dumps({"checked": CHECKED, "samples": measure(rounds, count)}))
        return
    _compare(bench)
    bench.finish()


def _compare(bench: Bench) -> None:
    rounds, count = bench.rounds(15, 3), 20_000 if bench.quick else 200_000
    builds = {
        name: in_child(__file__, "--one", str(rounds), str(count), env={"TSZMQ_DEBUG": setting})
        for name, setting in (("checker off", "0"), ("checker on", "1"))
    }
    assert [build["checked"] for build in builds.values()] == [False, True]
    table = bench.table(
        "A guarded block: ratios to threading.Lock, median of rounds (quartiles)",
        *("what", "ns, checker off", *builds),
    )
    for name in ("Lock", "guard", "RLock", "Python guard", "32 threads, Lock", "32 threads"):
        base = "32 threads, Lock" if name.startswith("32") else "Lock"
        ratios = [paired(b["samples"][name], b["samples"][base]) for b in builds.values()]
        off = builds["checker off"]["samples"]
        table.add(name, sorted(off[name])[rounds // 2] / count * 1e9, *ratios)
        if name == "guard":
            bench.judge("the guard, checker off", ratios[0].median, most=1.5)
    bench.show(table)


if __name__ == "__main__":
    main()
