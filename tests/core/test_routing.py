"""The choice of an engine, and what is known of each: every invariant that the module names."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter

import pytest

from tests.core.parts import interrupt_everywhere, load
from tszmq.core.policy import LeastLoaded
from tszmq.core.routing import RoutingState
from tszmq.errors import EngineDead, InvalidRank
from tszmq.types import EngineLoad

pytestmark = pytest.mark.timeout(30)


def routing_of(engines: int) -> RoutingState:
    state = RoutingState()
    for index in range(engines):
        state.add_engine(index)
    return state


def fill(state: RoutingState, index: int, count: int, prompt_tokens: int = 1) -> list[str]:
    ids = [f"{index}-{number}-{prompt_tokens}" for number in range(count)]
    for each in ids:
        assert state.reserve(each, prompt_tokens, pinned=index) == index
    return ids


def next_choices(state: RoutingState, count: int) -> list[int]:
    return [state.reserve(f"next-{number}", 1) for number in range(count)]


# --- the empty engine ------------------------------------------------------------------------


def test_an_engine_that_empties_shows_no_requests_and_keeps_its_cache_usage():
    state = routing_of(1)
    fill(state, 0, 2)
    state.commit(0, load(5, 3, 0.75), finished=[("0-0-1", 0)])
    assert state.load(0) == load(5, 3, 0.75)
    assert state.release(0, "0-1-1")
    assert state.load(0) == EngineLoad(0, 0, 0.75, 0)


def test_the_report_is_stored_before_the_ids_it_finishes_are_released():
    """The last report says running=1, because it is sampled before the finish commits."""
    state = routing_of(1)
    fill(state, 0, 1)
    state.commit(0, load(1, 0, 0.5), finished=[("0-0-1", 4)])
    assert state.load(0) == EngineLoad(0, 0, 0.5, 0)


def test_a_report_that_comes_late_does_not_fill_an_idle_engine():
    state = routing_of(2)
    state.commit(0, load(9, 4, 0.6))
    assert state.load(0) == EngineLoad(0, 0, 0.6, 0)
    assert sorted(next_choices(state, 2)) == [0, 1]


def test_waiting_alone_is_cleared_too():
    state = routing_of(1)
    state.commit(0, EngineLoad(0, 7, 0.9, 7))
    assert state.load(0) == EngineLoad(0, 0, 0.9, 0)


def test_a_report_of_an_engine_with_requests_stands():
    state = routing_of(1)
    fill(state, 0, 1)
    state.commit(0, load(9, 4, 0.6))
    assert state.load(0) == load(9, 4, 0.6)
    state.commit(0, load(2, 0, 0.1))
    assert state.load(0) == load(2, 0, 0.1)
    state.commit(0, None)
    assert state.load(0) == load(2, 0, 0.1)


def test_no_report_is_no_load_of_zero():
    """An engine of an old era: its own in-flight decides, and it gets its fair share."""
    state = routing_of(2)
    assert state.load(0) is None
    fill(state, 0, 2)
    state.commit(0, None, started=["0-0-1"], generated=1, finished=[("0-0-1", 1)])
    assert state.load(0) is None
    assert next_choices(state, 1) == [1]
    for index in (0, 1):
        for each in state.inflight_ids(index):
            state.commit(index, None, finished=[(each, 0)])
    assert state.load(0) is None
    assert Counter(next_choices(state, 10)) == {0: 5, 1: 5}


# --- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_place_is_given_back_once_whichever_way_is_first(order):
    """Its finish, an abort, its deadline and its engine's death race; one of them has it."""
    state = routing_of(1)
    fill(state, 0, 1, prompt_tokens=10)
    [request] = state.inflight_ids(0)
    state.commit(0, load(2), started=[request], generated=4)

    def finish():
        before = state.inflight(0)
        state.commit(0, load(2), finished=[(request, 4)] * 2)
        return before - state.inflight(0) == 1

    def release():
        return state.release(0, request, 4)

    def die():
        return state.drop_engine(0) == [request]

    ways = [finish, release, release, die]
    assert [ways[number]() for number in order] == [True, False, False, False]
    assert state.view(0) == (0, 0, 0)


def test_racing_releases_from_four_threads_count_once():
    state = routing_of(2)
    lock = threading.Lock()
    for _ in range(50):
        index = state.reserve("racing", 7)
        start = threading.Barrier(4)
        outcomes: list[bool] = []

        def release(start=start, index=index, outcomes=outcomes):
            start.wait(10)
            with lock:
                outcomes.append(state.release(index, "racing"))

        threads = [threading.Thread(target=release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(outcomes) == [False, False, False, True]
        assert state.inflight(0) == state.inflight(1) == 0


def test_no_report_lowers_the_own_count():
    state = routing_of(2)
    fill(state, 0, 5)
    state.commit(0, load(0, 0, 0.0))
    assert state.inflight(0) == 5
    assert next_choices(state, 5) == [1, 1, 1, 1, 1]


def test_release_of_an_unknown_id_or_engine_changes_nothing():
    state = routing_of(1)
    fill(state, 0, 1)
    state.commit(0, load(3))
    assert not state.release(0, "nobody")
    assert not state.release(7, "0-0-1")
    assert state.inflight_ids(0) == ["0-0-1"]
    assert state.load(0) == load(3)


def test_a_commit_of_an_unknown_engine_changes_nothing():
    state = routing_of(1)
    fill(state, 0, 1)
    state.commit(5, load(9, 9, 0.9), started=["0-0-1"], generated=8, finished=[("0-0-1", 8)])
    assert state.indices() == [0]
    assert state.inflight_ids(0) == ["0-0-1"]
    assert state.view(0) == (1, 1, 0)
    assert state.load(5) is None
    assert state.inflight(5) == 0
    assert state.inflight_ids(5) == []
    assert state.unstarted(5) == {}


def test_a_commit_releases_only_on_its_own_engine():
    state = routing_of(2)
    fill(state, 0, 1)
    state.commit(1, None, started=["0-0-1"], finished=[("0-0-1", 0)])
    assert state.inflight_ids(0) == ["0-0-1"]
    assert state.view(0) == (1, 1, 0)


# --- pins ------------------------------------------------------------------------------------


def test_a_pin_is_obeyed_however_busy_the_engine_is():
    state = routing_of(2)
    fill(state, 1, 20)
    state.commit(1, load(50, 40, 1.0))
    assert state.reserve("pinned", 1, pinned=1) == 1
    assert state.inflight(1) == 21


def test_pins_do_not_disturb_the_rotation():
    state = routing_of(3)
    chosen = []
    for number in range(6):
        state.release(2, f"pin-{number - 1}")
        state.reserve(f"pin-{number}", 1, pinned=2)
        state.release(2, f"pin-{number}")
        chosen.append(state.reserve(f"free-{number}", 1))
        state.release(chosen[-1], f"free-{number}")
    assert chosen == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("pin", [-1, 2, 1 << 40])
def test_a_pin_on_nobody_names_who_there_is_and_takes_nothing(pin):
    state = RoutingState()
    state.add_engine(3)
    state.add_engine(5)
    with pytest.raises(InvalidRank, match=rf"data_parallel_rank={pin} .*the engines are: 3, 5"):
        state.reserve("r", 1, pinned=pin)
    assert state.inflight(3) == state.inflight(5) == 0
    assert next_choices(state, 2) == [3, 5]


def test_a_pin_on_a_dead_engine_takes_nothing():
    state = routing_of(2)
    for end in (state.suspend_engine, state.drop_engine):
        end(1)
        with pytest.raises(EngineDead, match="data_parallel_rank=1") as caught:
            state.reserve("r", 1, pinned=1)
        assert caught.value.engine_index == 1
        assert state.inflight(1) == 0


# --- engines come and go -----------------------------------------------------------------------


def test_a_suspended_engine_keeps_what_it_holds_and_gets_nothing_new():
    state = routing_of(2)
    ids = fill(state, 0, 2)
    state.commit(0, load(2, 1, 0.3))
    state.suspend_engine(0)
    assert not state.is_alive(0)
    assert state.alive_indices() == [1]
    assert state.inflight_ids(0) == ids
    assert state.load(0) == load(2, 1, 0.3)
    assert next_choices(state, 4) == [1] * 4
    state.commit(0, None, finished=[(ids[0], 0)])
    assert state.release(0, ids[1])
    assert state.load(0) == EngineLoad(0, 0, 0.3, 0)


def test_a_dropped_engine_gives_up_its_ids_once_and_forgets_its_report():
    state = routing_of(2)
    ids = fill(state, 0, 3)
    state.commit(0, load(3, 0, 0.9), started=[ids[0]], generated=1)
    assert state.drop_engine(0) == ids
    assert state.drop_engine(0) == []
    assert state.load(0) is None
    assert state.view(0) == (0, 0, 0)
    assert state.indices() == [0, 1]
    assert state.alive_indices() == [1]
    assert not state.release(0, ids[0])
    assert state.drop_engine(9) == []


def test_without_a_living_engine_nothing_is_reserved():
    state = RoutingState()
    with pytest.raises(EngineDead, match="every engine is dead") as caught:
        state.reserve("r", 1)
    assert caught.value.engine_index is None
    state.add_engine(0)
    state.suspend_engine(0)
    with pytest.raises(EngineDead):
        state.reserve("r", 1)
    assert state.inflight(0) == 0


def test_a_new_incarnation_starts_from_nothing():
    state = routing_of(2)
    old = fill(state, 0, 3)
    state.commit(0, load(3, 0, 0.9))
    state.drop_engine(0)
    state.add_engine(0)
    assert state.is_alive(0)
    assert state.load(0) is None
    assert state.inflight(0) == 0
    # What its predecessor's requests do now is not its affair.
    assert not state.release(0, old[0])
    state.commit(0, None, started=old, generated=5, finished=[(each, 1) for each in old])
    assert state.view(0)[:2] == (0, 0)
    assert sorted(next_choices(state, 2)) == [0, 1]


def test_suspending_nobody_changes_nothing():
    state = routing_of(1)
    state.suspend_engine(4)
    assert state.indices() == [0]
    assert not state.is_alive(4)


# --- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", range(1, 9))
def test_equals_split_evenly_while_they_fill(engines):
    state = routing_of(engines)
    chosen = next_choices(state, engines * 5)
    assert Counter(chosen) == dict.fromkeys(range(engines), 5)


@pytest.mark.parametrize("engines", range(1, 9))
def test_equals_split_evenly_one_request_after_the_other(engines):
    state = routing_of(engines)
    chosen = []
    for number in range(engines * 5):
        chosen.append(state.reserve(f"{number}", 1))
        state.commit(chosen[-1], load(1, 0, 0.2), finished=[(f"{number}", 0)])
    assert Counter(chosen) == dict.fromkeys(range(engines), 5)


def test_the_idle_share_what_a_busy_one_does_not_get():
    """The rotation passes over a busy engine; its neighbour must not get its turns as well."""
    state = routing_of(4)
    fill(state, 1, 3)
    chosen = []
    for number in range(30):
        chosen.append(state.reserve(f"{number}", 1))
        state.release(chosen[-1], f"{number}")
    assert Counter(chosen) == {0: 10, 2: 10, 3: 10}


def test_the_rotation_goes_on_when_an_engine_leaves_or_comes():
    state = routing_of(3)
    assert next_choices(state, 2) == [0, 1]
    state.drop_engine(2)
    for index in (0, 1):
        for each in state.inflight_ids(index):
            state.release(index, each)
    assert Counter(next_choices(state, 6)) == {0: 3, 1: 3}
    state.add_engine(2)
    assert state.reserve("last", 1) == 2


def test_the_scan_wraps_round():
    """The lowest may lie before where the scan starts."""
    state = routing_of(3)
    next_choices(state, 2)
    fill(state, 1, 5)
    fill(state, 2, 5)
    assert state.reserve("wrapped", 1) == 0


@pytest.mark.parametrize(
    ("own", "figures", "score"),
    [
        (0, None, 0),
        (4, None, 4),
        (4, load(2, 0, 0.0), 4),  # the own count is the floor
        (4, load(9, 0, 0.0), 9),  # other clients' requests count
        (4, load(9, 3, 0.0), 9),  # waiting is part of running: counted once
        (4, EngineLoad(9, 3, 0.0, 12), 12),  # where the wire counts them apart
        (4, load(9, 3, 0.5), 9),  # no pressure up to a half
        (4, load(9, 3, 0.75), 9 + 3 * 6 * 0.25),
        (4, load(9, 3, 1.0), 9 + 3 * 6 * 0.5),
        (4, load(9, 0, 1.0), 9),  # a full cache that nobody waits for
        (12, load(9, 2, 0.625), 12 + 2 * 6 * 0.125),
    ],
)
def test_the_formula(own, figures, score):
    state = routing_of(1)
    fill(state, 0, own)
    if figures is not None:
        state.commit(0, figures)
    engine = state._engines[0]
    assert LeastLoaded().score(engine) == score
    assert state._rescored() == [score]


def test_cache_pressure_sends_requests_elsewhere():
    """One more request in flight, but nobody waits for cache there."""
    state = routing_of(2)
    fill(state, 0, 3)
    fill(state, 1, 4)
    state.commit(0, load(3, 1, 0.5))
    assert next_choices(state, 1) == [0]
    state.commit(0, load(3, 1, 0.9))
    assert next_choices(state, 1) == [1]


# --- sums ------------------------------------------------------------------------------------


def test_sums_follow_a_request_through_its_life():
    state = routing_of(1)
    state.reserve("a", 100)
    state.reserve("b", 40)
    assert state.view(0) == (2, 140, 0)
    assert state.unstarted(0) == {"a": 100, "b": 40}
    state.commit(0, None, started=["a"], generated=2)
    assert state.view(0) == (2, 40, 102)
    assert state.unstarted(0) == {"b": 40}
    state.commit(0, None, started=["a", "b"], generated=4)  # a had started: no second count
    assert state.view(0) == (2, 0, 146)
    state.commit(0, None, generated=1, finished=[("a", 6)])
    assert state.view(0) == (1, 0, 41)
    assert state.release(0, "b", 1)
    assert state.view(0) == (0, 0, 0)


def test_a_request_that_never_started_leaves_no_sum():
    state = routing_of(1)
    fill(state, 0, 2, prompt_tokens=30)
    assert state.release(0, "0-0-30")
    assert state.view(0) == (1, 30, 0)
    state.commit(0, None, finished=[("0-1-30", 0)])
    assert state.view(0) == (0, 0, 0)


def test_ten_thousand_requests_that_end_in_every_way_leave_nothing():
    """Finish, abort, abort after the finish, the same finish twice, an engine's death."""
    chance = random.Random(7)
    state = routing_of(4)
    ends = ("finish", "abort", "finish then abort", "finish twice", "die")
    for number in range(10_000):
        wire_id = f"{number}"
        index = state.reserve(wire_id, chance.randrange(50), chance.choice([None, None, 1, 3]))
        started = chance.random() < 0.8
        if started:
            state.commit(index, load(3, 1, 0.7), started=[wire_id], generated=2)
        tokens = 2 if started else 0
        end = chance.choice(ends) if chance.random() < 0.9 else "die"
        if end.startswith("finish"):
            times = 2 if end == "finish twice" else 1
            state.commit(index, load(2, 1, 0.7), finished=[(wire_id, tokens)] * times)
        if "abort" in end:
            state.release(index, wire_id, tokens)
        if end == "die":
            state.drop_engine(index)
            state.add_engine(index)
    assert [state.view(index) for index in range(4)] == [(0, 0, 0)] * 4
    assert Counter(next_choices(state, 40)) == dict.fromkeys(range(4), 10)


# --- signals ---------------------------------------------------------------------------------


def consistent(state: RoutingState) -> None:
    for index in state.indices():
        ids, unstarted = state.inflight_ids(index), state.unstarted(index)
        pending = sum(unstarted.values())
        assert state.view(index)[:2] == (len(ids), pending)
        assert set(unstarted) <= set(ids)
        figures = state.load(index)
        assert ids or figures is None or figures == figures.idle()
    living = [state._engines[index] for index in state.alive_indices()]
    assert state._rescored() == [LeastLoaded().score(engine) for engine in living]


def test_a_reservation_that_a_signal_cut_off_can_be_released():
    def prepare():
        state = routing_of(3)
        fill(state, 0, 1)

        def verify():
            state.release(1, "new")
            assert state.inflight(1) == 0
            consistent(state)

        return lambda: state.place(1, "new", 9), verify

    assert interrupt_everywhere(prepare) >= 3


@pytest.mark.parametrize("last", [False, True])
def test_a_release_that_a_signal_cut_off_can_be_repeated(last):
    def prepare():
        state = routing_of(2)
        fill(state, 0, 1 if last else 2)
        state.commit(0, load(2, 1, 0.75), started=["0-0-1"], generated=3)

        def verify():
            state.release(0, "0-0-1", 3)
            assert state.inflight(0) == (0 if last else 1)
            consistent(state)

        return lambda: state.release(0, "0-0-1", 3), verify

    assert interrupt_everywhere(prepare) >= 4


class Falsy(LeastLoaded):
    """Such as one that is empty at first."""

    def __len__(self) -> int:
        return 0

    def pick(self, scores, start):
        return 0


def test_a_policy_that_is_false_is_used():
    state = RoutingState(Falsy())
    state.add_engine(0)
    state.add_engine(1)
    assert [state.reserve(f"r{n}", 1) for n in range(3)] == [0, 0, 0]
