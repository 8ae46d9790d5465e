"""How evenly requests are spread, and what that does to waiting: policies side by side.

Embedded engines that each run 4 requests at once; requests are short (4 tokens) or long (48),
and come one by one at random times or in bursts, at about 70 % of what the engines can do.
``unequal``: every second engine is three times slower. Each policy gets the same requests at
the same times. ``makespan`` (until the last has ended) and ``p99 wait`` (to the first token)
are ratios to round-robin of the same round; ``spread`` is the requests of each engine, in the
last round: the fewer a slow one gets, the better.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness import Bench, interleave, paired, quantile, start
from tszmq import Client, SamplingParams
from tszmq.core.policy import LeastLoaded, Policy, RandomOfTwo, RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "random of two": partial(RandomOfTwo, 3),
}
SLOTS = 4
STEP_MS = 4.0
SLOWER = 3.0
_SHORT, _LONG, _LONG_SHARE = 4, 48, 0.25
_UTILIZATION = 0.7


@attrs.frozen
class Scene:
    """Engines and arrivals.

    Attributes:
        ranks: Engines.
        unequal: Every second one is slower.
        bursts: Requests come in bursts.
    """

    ranks: int
    unequal: bool
    bursts: bool

    def __str__(self) -> str:
        return f"{self.ranks} {'unequal' if self.unequal else 'equal'}" + (
            ", bursts" if self.bursts else ""
        )

    def requests(self, count: int) -> list[tuple[float, int]]:
        """(arrival time, tokens) of each request; the same at each call."""
        seeded = random.Random(11)
        mean = _SHORT + (_LONG - _SHORT) * _LONG_SHARE
        slow = self.ranks // 2 if self.unequal else 0
        speed = (self.ranks - slow) + slow / SLOWER
        rate = _UTILIZATION * speed * SLOTS / (mean * STEP_MS / 1000)
        burst = SLOTS * self.ranks // 2 if self.bursts else 1
        at = 0.0
        requests = []
        for number in range(count):
            if number % burst == 0:
                at += seeded.expovariate(rate / burst)
            requests.append((at, _LONG if seeded.random() < _LONG_SHARE else _SHORT))
        return requests


@attrs.frozen
class Outcome:
    """One run: seconds, and requests of each engine."""

    makespan: float
    p99: float
    counts: tuple[int, ...]


def run(policy: Callable[[], Policy], scene: Scene, count: int) -> Outcome:
    """One policy on one scene."""
    requests = scene.requests(count)
    with Client.embedded(
        scene.ranks, policy=policy(), step_ms=STEP_MS, max_num_seqs=SLOTS
    ) as client:
        if scene.unequal and client.fleet is not None:
            for number in range(1, scene.ranks, 2):
                client.fleet.send(number, f"step-ms {STEP_MS * SLOWER}")
        for index in range(scene.ranks):
            client.generate([1], SamplingParams(max_tokens=1), data_parallel_rank=index)
        started = time.monotonic()

        def arrivals() -> Iterator[list[int]]:
            for number, (at, _) in enumerate(requests):
                time.sleep(max(0.0, started + at - time.monotonic()))
                yield [number, 1, 2]

        params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for _, tokens in requests]
        results = client.generate_many(arrivals(), params, max_inflight=count)
        makespan = time.monotonic() - started
    assert [done.completion_tokens for done in results] == [tokens for _, tokens in requests]
    counts = Counter(done.engine_index for done in results)
    waits = [done.first_token for done in results if done.first_token is not None]
    return Outcome(
        makespan, quantile(waits, 0.99), tuple(counts[index] for index in range(scene.ranks))
    )


def measure(bench: Bench, scene: Scene) -> dict[str, list[Outcome]]:
    """Every policy on one scene."""
    count = (16 if bench.quick else 75) * scene.ranks
    cases = {name: partial(run, policy, scene, count) for name, policy in POLICIES.items()}
    return interleave(cases, bench.rounds(3, 1))


def main() -> None:
    """Every scene."""
    bench = start(__file__, __doc__)
    scenes = [
        Scene(count, unequal, bursts)
        for count in (2, 4, 8)
        for unequal in (False, True)
        for bursts in (False, True)
    ]
    if bench.quick:
        scenes = [Scene(2, True, True)]
    table = bench.table(
        "Policies: ratios to round-robin, median of rounds (quartiles)",
        *("engines", "policy", "makespan s", "p99 wait ms", "makespan", "p99 wait", "spread"),
    )
    for scene in scenes:
        samples = measure(bench, scene)
        base = samples["round-robin"]
        for name, outcomes in samples.items():
            p99 = [outcome.p99 for outcome in outcomes]
            makespan = [outcome.makespan for outcome in outcomes]
            wait = paired(p99, [outcome.p99 for outcome in base])
            table.add(
                str(scene),
                name,
                quantile(makespan, 0.5),
                quantile(p99, 0.5) * 1e3,
                paired(makespan, [outcome.makespan for outcome in base]),
                wait,
                " ".join(map(str, outcomes[-1].counts)),
            )
            if name == "least-loaded" and scene.unequal:
                bench.judge(f"{scene}: least-loaded's p99 wait", wait.median, most=1.0)
    bench.show(table)
    bench.finish()


if __name__ == "__main__":
    main()
