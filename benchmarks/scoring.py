"""What choosing an engine costs: reserve and release, by ranks and by requests in flight.

``tszmq`` is ``RoutingState`` (scores are kept, and renewed where something changed), ``naive``
the same formula computed over attrs objects at each choice. Ratios are to 4 ranks with 64
requests in flight: those of ``tszmq`` should hardly grow with ranks or requests, those of
``naive`` grow with the ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness import interleave, paired, start
from tszmq.core.routing import RoutingState
from tszmq.types import EngineLoad

LOAD = EngineLoad(num_running=20, num_waiting=3, kv_cache_usage=0.7, num_requests=20)


@attrs.define
class Rank:
    """An engine of the naive way."""

    index: int
    load: EngineLoad
    inflight: set[str] = attrs.field(factory=set)


class Naive:
    """A loop over all ranks at each choice."""

    def __init__(self, ranks: int) -> None:
        self._ranks = [Rank(index, LOAD) for index in range(ranks)]
        self._turn = 0

    def reserve(self, request_id: str, _: int) -> int:
        """Choose and take a place."""
        ranks = self._ranks
        self._turn = (self._turn + 1) % len(ranks)
        best, low = ranks[0], float("inf")
        for at in range(len(ranks)):
            rank = ranks[(self._turn + at) % len(ranks)]
            load = rank.load
            score = max(len(rank.inflight), load.num_requests) + load.num_waiting * 6 * max(
                0.0, load.kv_cache_usage - 0.5
            )
            if score < low:
                best, low = rank, score
        best.inflight.add(request_id)
        return best.index

    def release(self, index: int, request_id: str) -> None:
        """Give the place back."""
        self._ranks[index].inflight.discard(request_id)


def routing(ranks: int) -> RoutingState:
    """The client's, every rank with a report."""
    state = RoutingState()
    for index in range(ranks):
        state.add_engine(index)
        state.commit(index, LOAD)
    return state


def nanoseconds(state: RoutingState | Naive, count: int) -> float:
    """CPU time of one reserve with its release."""
    ids = [f"{number:028x}" for number in range(count)]
    reserve: Callable[[str, int], int] = state.reserve
    release: Callable[[int, str], object] = state.release
    started = time.process_time_ns()
    for request_id in ids:
        release(reserve(request_id, 100), request_id)
    return (time.process_time_ns() - started) / count


def main() -> None:
    """Every number of ranks, few and many in flight."""
    bench = start(__file__, __doc__)
    kinds: dict[str, Callable[[int], RoutingState | Naive]] = {"tszmq": routing, "naive": Naive}
    states = {}
    many = 10_000 if bench.quick else 100_000
    for name, kind in kinds.items():
        for ranks in (1, 4, 8, 16, 64):
            for inflight in (64, many):
                state = kind(ranks)
                for number in range(inflight):
                    state.reserve(f"in flight {number}", 100)
                states[name, ranks, inflight] = state
    count = 300 if bench.quick else 3000
    cases = {
        " ".join(map(str, key)): partial(nanoseconds, state, count) for key, state in states.items()
    }
    samples = interleave(cases, bench.rounds(15))
    base = samples["tszmq 4 64"]
    table = bench.table(
        "Reserve and release: ratios to tszmq, 4 ranks, 64 in flight; median (quartiles)",
        *("way", "ranks", "in flight", "ns", "ratio"),
    )
    for key in states:
        taken = samples[" ".join(map(str, key))]
        table.add(*key, sorted(taken)[len(taken) // 2], paired(taken, base))
    bench.show(table)
    for inflight in (64, many):
        most = paired(samples[f"tszmq 64 {inflight}"], base).median
        bench.judge(f"64 ranks, {inflight:,} in flight", most, most=3.0)
    bench.finish()


if __name__ == "__main__":
    main()
