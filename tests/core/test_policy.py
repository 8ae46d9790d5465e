"""Policies, and that the seam carries ones that are nothing like the default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from tests.core.parts import Place, load
from tszmq.core.policy import (
    EngineView,
    LeastLoaded,
    Policy,
    RandomOfTwo,
    RequestView,
    RoundRobin,
    lowest_from,
)
from tszmq.core.request import ABORTED
from tszmq.core.routing import RoutingState
from tszmq.types import EngineLoad

pytestmark = pytest.mark.timeout(20)


def routing_of(engines: int, policy: Policy) -> RoutingState:
    state = RoutingState(policy)
    for index in range(engines):
        state.add_engine(index)
    return state


@attrs.frozen
class View:
    """An engine as a policy sees it."""

    num_inflight: int = 0
    pending_prompt_tokens: int = 0
    resident_tokens: int = 0
    load: EngineLoad | None = None


@pytest.mark.parametrize(
    ("scores", "start", "position"),
    [
        ([1.0], 0, 0),
        ([1, 1, 1], 0, 0),
        ([1, 1, 1], 2, 2),
        ([1, 2, 1], 1, 2),
        ([1, 2, 2], 1, 0),
        ([3, 2, 1], 0, 2),
        ([0.5, 0.25, 0.25, 0.5], 2, 2),
        ([0.5, 0.25, 0.25, 0.5], 3, 1),
    ],
)
def test_lowest_from(scores, start, position):
    assert lowest_from(scores, start) == position


def test_least_loaded_looks_at_no_request():
    policy = LeastLoaded()
    assert not policy.uses_request
    engine = View(3, 1000, 1000, load(2, 2, 0.75))
    assert policy.score(engine) == policy.score(engine, RequestView(7)) == 3 + 2 * 6 * 0.25


def test_round_robin_ignores_every_load():
    state = routing_of(3, RoundRobin())
    for number in range(9):
        state.reserve(f"pin-{number}", 1, pinned=0)
    state.commit(0, load(50, 40, 1.0))
    assert [state.reserve(f"{number}", 1) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    state.suspend_engine(1)
    chosen = [state.reserve(f"more-{number}", 1) for number in range(4)]
    assert Counter(chosen) == {0: 2, 2: 2}
    assert chosen[0] != chosen[1]


def test_random_of_two_takes_the_better_of_a_pair():
    """With two engines it is always the better; with more the worst is never taken."""
    state = routing_of(2, RandomOfTwo(seed=1))
    state.reserve("busy", 1, pinned=0)
    for number in range(50):
        assert state.reserve(f"{number}", 1) == 1
        state.release(1, f"{number}")
    state = routing_of(4, RandomOfTwo(seed=1))
    for number in range(3):
        state.reserve(f"busy-{number}", 1, pinned=2)
    chosen = []
    for number in range(600):
        chosen.append(state.reserve(f"{number}", 1))
        state.release(chosen[-1], f"{number}")
    assert set(chosen) == {0, 1, 3}
    assert min(Counter(chosen).values()) > 130


def test_random_of_two_with_one_engine():
    state = routing_of(1, RandomOfTwo())
    assert state.reserve("only", 1) == 0


def test_random_of_two_is_repeatable_by_its_seed():
    def draws(seed):
        policy = RandomOfTwo(seed)
        return [policy.pick([0] * 9, 0) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


class LeastPrefill:
    """Weighs what is still to be prefilled: needs the request, and scores afresh each time."""

    uses_request = True

    def __init__(self) -> None:
        self.seen: list[RequestView | None] = []

    def score(self, engine: EngineView, request: RequestView | None) -> float:
        self.seen.append(request)
        assert request is not None
        long = request.prompt_tokens >= 100
        return engine.pending_prompt_tokens if long else engine.num_inflight

    def pick(self, scores: Sequence[float], start: int) -> int:
        return lowest_from(scores, start)


def test_a_policy_that_depends_on_the_request():
    """Long prompts go where little prefill is pending, short ones where few requests are."""
    policy = LeastPrefill()
    state = routing_of(2, policy)
    for number in range(3):
        state.reserve(f"short-{number}", 10, pinned=0)
    state.reserve("long", 1000, pinned=1)
    assert policy.seen == []  # nothing is scored without a request
    assert state.reserve("a long one", 500) == 0  # 30 pending beats 1000
    assert policy.seen == [RequestView(500)] * 2
    assert state.reserve("a short one", 5) == 1  # 1 in flight beats 4
    state.commit(1, None, started=["long", "a short one"], generated=2)
    assert state.reserve("another long one", 500) == 1  # 0 pending beats 530
    assert None not in policy.seen


def test_the_seam_reaches_from_the_flights():
    """What a policy sees follows admission, first token and end."""
    policy = LeastPrefill()
    place = Place(2, policy=policy)
    first = place.admit(prompt_tokens=300)
    second = place.admit(prompt_tokens=200)
    assert {first.engine_index, second.engine_index} == {0, 1}
    place.apply((first, [1]), engine=first.engine_index)
    third = place.admit(prompt_tokens=100)
    assert third.engine_index == first.engine_index  # its prefill is done
    place.apply((third, [1], "stop"), engine=third.engine_index)
    assert place.flights.routing.view(first.engine_index) == (1, 0, 301)


class LeastResident:
    """Weighs the KV cache that our requests occupy; its scores are kept by the state."""

    uses_request = False

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        return engine.resident_tokens

    def pick(self, scores: Sequence[float], start: int) -> int:
        return lowest_from(scores, start)


def test_a_kept_score_follows_every_token():
    """Batches that start and end nothing change an engine, too."""
    place = Place(2, policy=LeastResident())
    a, b = place.admit(0, 10), place.admit(1, 12)
    place.flights.apply(place.step((a, 1), counts=[1], engine=0), 2.0)
    place.flights.apply(place.step((b, 1), counts=[1], engine=1), 2.0)
    assert place.flights.routing.choose(1) == 0
    for count in range(2, 6):
        place.flights.apply(place.step((a, 1), counts=[count], engine=0), 2.0)
    assert place.flights.routing.view(0) == (1, 0, 15)
    assert [place.flights.routing.choose(1) for _ in range(3)] == [1, 1, 1]


class Broken(LeastLoaded):
    """A policy of a caller's, with a bug."""

    armed = False

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        if self.armed:
            raise RuntimeError("a bug of the caller's")
        return super().score(engine)


def test_a_policy_that_cannot_judge_an_engine_leaves_nothing_half_done():
    """Places that are taken are given back; whoever submits hears of it, until it can again."""
    policy = Broken()
    place = Place(2, policy=policy)
    placed = [place.request() for _ in range(3)]
    for request in placed[:2]:
        assert place.flights.admit(request, None, 1.0, request.gate)
    policy.armed = True
    pinned = placed[2]
    assert place.flights.admit(pinned, 1, 1.0, pinned.gate)  # nothing has to be scored for it
    refused = place.request()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a bug of the caller's"):
            place.flights.admit(refused, None, 1.0, refused.gate)
        place.check()
    for request in placed:
        assert place.flights.withdraw(request, ABORTED, 2.0)
    place.check()
    assert [place.flights.routing.inflight(index) for index in (0, 1)] == [0, 0]
    policy.armed = False
    later = [place.request() for _ in range(4)]
    for request in later:
        assert place.flights.admit(request, None, 3.0, request.gate)
    assert [place.flights.routing.inflight(index) for index in (0, 1)] == [2, 2]


def test_a_policy_that_fails_for_a_request_takes_no_place():
    """Where the request matters it is asked before anything is taken: the caller hears of it."""
    policy = Broken()
    policy.uses_request = True
    place = Place(1, policy=policy)
    policy.armed = True
    request = place.request()
    with pytest.raises(RuntimeError):
        place.flights.admit(request, None, 1.0, request.gate)
    place.check()
    assert place.flights.routing.inflight(0) == 0


class Whatever(LeastLoaded):
    """Picks, or scores, as it is told to, once."""

    def __init__(self, pick: Any = None, score: Any = 0.0) -> None:
        self.wrong_pick, self.wrong_score = pick, score

    def score(self, engine: EngineView, request: RequestView | None = None) -> float:
        score, self.wrong_score = self.wrong_score, 0.0
        return score

    def pick(self, scores: Sequence[float], start: int) -> int:
        wrong, self.wrong_pick = self.wrong_pick, None
        return super().pick(scores, start) if wrong is None else wrong


@pytest.mark.parametrize(
    "policy",
    [
        *(Whatever(pick=pick) for pick in (0.0, 7, "0", [])),
        *(Whatever(score=score) for score in (None, "0", [])),
    ],
    ids=lambda policy: f"{policy.wrong_pick!r} {policy.wrong_score!r}",
)
def test_one_wrong_answer_of_a_policy_is_not_remembered(policy):
    state = routing_of(2, policy)
    with pytest.raises((TypeError, IndexError)):
        state.reserve("first", 1)
    assert [state.reserve(f"next {number}", 1) for number in range(4)] == [0, 1, 0, 1]
