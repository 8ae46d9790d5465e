"""How an engine is chosen: a pure score of an engine, lowest wins.

A policy sees an engine through ``EngineView`` and a request through ``RequestView``; it runs
under the lock of the state that owns them, so it computes and does nothing else. What it raises
is raised to whoever submits a request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import attrs

from tszmq.types import EngineLoad

__all__ = [
    "EngineView",
    "LeastLoaded",
    "Policy",
    "RandomOfTwo",
    "RequestView",
    "RoundRobin",
    "lowest_from",
]


class EngineView(Protocol):
    """What a policy may know of an engine. Every number is this client's own but ``load``."""

    @property
    def num_inflight(self) -> int:
        """Our unfinished requests there."""

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens of those whose first token has not come: prefill still to be done."""

    @property
    def resident_tokens(self) -> int:
        """Prompt and output tokens of those that are generating: KV cache they occupy."""

    @property
    def load(self) -> EngineLoad | None:
        """The engine's last report, or None when it made none."""


@attrs.frozen
class RequestView:
    """What a policy may know of the request to be placed."""

    prompt_tokens: int


class Policy(Protocol):
    """The seam: a score, and how one of the scored engines is picked."""

    @property
    def uses_request(self) -> bool:
        """False lets the state keep each engine's score until that engine changes."""

    def score(self, engine: EngineView, request: RequestView | None) -> float:
        """How unwelcome one more request is; ``request`` is None when ``uses_request`` is not."""

    def pick(self, scores: Sequence[float], start: int) -> int:
        """The position of the engine to take; ``start`` rotates with every choice."""


def lowest_from(scores: Sequence[float], start: int) -> int:
    """The position of the lowest score, the first at or after ``start`` among equals."""
    low = min(scores)
    try:
        return scores.index(low, start)
    except ValueError:
        return scores.index(low)


class LeastLoaded:
    """The default: own in-flight or the engine's own count, whichever is more, and KV pressure.

    ``max(own in-flight, requests reported) + num_waiting * 6 * max(0, kv_cache_usage - 0.5)``:
    vLLM's ``DPLBAsyncMPClient`` (0.33), with the report's distinct requests in place of the
    sum of its queues, because TokenSpeed counts waiting requests among the running ones.
    """

    uses_request = False

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        """The formula above."""
        load = engine.load
        if load is None:
            return engine.num_inflight
        busy = max(engine.num_inflight, load.num_requests)
        if load.num_waiting and load.kv_cache_usage > 0.5:
            return busy + load.num_waiting * 6 * (load.kv_cache_usage - 0.5)
        return busy

    def pick(self, scores: Sequence[float], start: int) -> int:
        """The least loaded, equals in rotation."""
        return lowest_from(scores, start)


class RoundRobin:
    """Every engine in turn, whatever its load."""

    uses_request = False

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        """All equal, so that the rotation decides."""
        return 0.0

    def pick(self, scores: Sequence[float], start: int) -> int:
        """The next in turn."""
        return lowest_from(scores, start)


class RandomOfTwo:
    """The better of two engines drawn at random: little herding between many clients."""

    uses_request = False

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._score = LeastLoaded().score

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        """As ``LeastLoaded``."""
        return self._score(engine, request)

    def pick(self, scores: Sequence[float], start: int) -> int:
        """Draws two positions (one engine: that one) and takes the lower score."""
        if len(scores) == 1:
            return 0
        first, second = self._random.sample(range(len(scores)), 2)
        return first if scores[first] <= scores[second] else second
