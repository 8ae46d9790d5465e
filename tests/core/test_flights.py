"""Requests, load and places together: batches, ends, the bound on unfinished requests."""

from __future__ import annotations

import gc
import math
import weakref
from array import array
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.core.parts import Place, Waiter, engine_info, group, interrupt_everywhere, load
from tszmq.core.places import Places
from tszmq.core.request import ABORTED, End, Request
from tszmq.errors import (
    ClientClosed,
    DecodeError,
    EngineDead,
    EnginePaused,
    InvalidRank,
    RequestRejected,
    TokensLost,
)
from tszmq.types import EngineLoad
from tszmq.wire.base import RowDetail

pytestmark = pytest.mark.timeout(60)

BAD_TOKENS = [-1, 1 << 32, 1.5, None, "7", [7]]


# --- admission and placing -------------------------------------------------------------------


def test_admission_lists_the_request_and_takes_its_place():
    place = Place(2)
    first, second = place.admit(), place.admit()
    assert {first.engine_index, second.engine_index} == {0, 1}
    assert place.flights.requests == {first.wire_id: first, second.wire_id: second}
    assert first.admitted == 1.0
    place.check()


@pytest.mark.parametrize("error", [InvalidRank, EngineDead, ClientClosed])
def test_a_refused_request_leaves_nothing(error):
    place = Place(2)
    place.flights.suspend(1, "it is gone")
    if error is ClientClosed:
        place.flights.close(lambda: ClientClosed("closed"))
    request = place.request()
    with pytest.raises(error):
        place.flights.admit(request, {InvalidRank: 9, EngineDead: 1}.get(error), 1.0, request.gate)
    assert request.engine_index == -1
    assert not place.flights.withdraw(request, ABORTED, 2.0)
    place.check()
    assert not place.flights.requests


def test_withdrawal_counts_once():
    place = Place()
    request = place.admit()
    assert place.flights.withdraw(request, ABORTED, 3.0)
    assert not place.flights.withdraw(request, End(finish_reason="stop"), 4.0)
    assert request.end is ABORTED
    assert request.ended == 3.0
    assert request.result().finish_reason == "abort"
    assert place.flights.routing.inflight(0) == 0
    place.check()


def test_busy_since_is_when_it_last_went_from_nothing_to_something():
    place = Place()
    first = place.request()
    for request, now in ((first, 5.0), (place.request(), 6.0)):
        place.flights.admit(request, None, now, request.gate)
    assert place.flights.engines[0].busy_since == 5.0
    for request in list(place.flights.requests.values()):
        place.flights.withdraw(request, ABORTED, 7.0)
    third = place.request()
    place.flights.admit(third, None, 8.0, third.gate)
    assert place.flights.engines[0].busy_since == 8.0


# --- signals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"group": group()}])
def test_an_admission_that_a_signal_cut_off_is_undone_by_withdrawing(options):
    """What ``generate`` does on Ctrl-C; a place that stays taken would crash the engine's end."""

    def prepare():
        place = Place(2, max_inflight=3)
        place.admit()
        request = place.request(**options)
        ticket = Waiter()

        def verify():
            place.flights.withdraw(request, ABORTED, 3.0)
            place.flights.give_up(ticket)
            assert request.wire_id not in place.flights.requests
            place.check()
            for index in (0, 1):
                end = End(error=lambda _: EngineDead("dead"))
                place.flights.drop(index, place.epochs[index], end, 4.0)
            assert not place.flights.requests

        return lambda: place.flights.admit(request, None, 2.0, ticket), verify

    assert interrupt_everywhere(prepare) >= 5


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_tokens_that_wait_to_be_dealt_out_survive_a_signal(with_logprobs):
    """A withdrawal deals them out in the caller's thread: once, to everyone, whatever happens."""

    def prepare():
        place = Place()
        requests = [place.admit(logprobs=with_logprobs) for _ in range(3)]
        for count in range(1, 6):
            rows = [(request, 10 * i + count) for i, request in enumerate(requests)]
            logprobs = [[-float(count)]] * 3 if with_logprobs else None
            step = place.step(*rows, counts=[count] * 3, logprobs=logprobs)
            place.flights.apply(step, 2.0)
        assert len(requests[0].tokens) == 1  # or this tests nothing

        def verify():
            for i, request in enumerate(requests):
                place.flights.withdraw(request, ABORTED, 3.0)
                assert request.result().token_ids == [10 * i + n for n in range(1, 6)]
                expected = [-1.0, -2.0, -3.0, -4.0, -5.0] if with_logprobs else None
                assert request.result().logprobs == expected
            place.check()

        return lambda: place.flights.withdraw(requests[1], ABORTED, 3.0), verify

    assert interrupt_everywhere(prepare) >= 6


def test_batches_between_a_withdrawal_that_a_signal_cut_off_and_its_repetition():
    """Their tokens of the request that is half gone are counted for nobody."""

    def prepare():
        place = Place()
        requests = [place.admit() for _ in range(3)]
        for count in (1, 2):
            rows = [(request, count) for request in requests]
            place.flights.apply(place.step(*rows, counts=[count] * 3), 2.0)

        def verify():
            place.flights.apply(place.step(*[(r, 3) for r in requests], counts=[3] * 3), 2.0)
            place.flights.withdraw(requests[1], ABORTED, 3.0)
            assert requests[1].end is ABORTED
            place.check()

        return lambda: place.flights.withdraw(requests[1], ABORTED, 3.0), verify

    assert interrupt_everywhere(prepare) >= 6


@pytest.mark.parametrize("tokens", [[], [1, 2]])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_withdrawal_that_a_signal_cut_off_can_be_repeated(tokens, streaming):
    """And a request that is no longer listed has ended: whoever waits for it would hang."""

    def prepare():
        place = Place()
        request = place.admit(streaming=streaming)
        place.apply((request, tokens), load=load(3, 2, 0.5))

        def verify():
            assert request.wire_id in place.flights.requests or request.end is not None
            place.flights.withdraw(request, ABORTED, 3.0)
            assert request.end is ABORTED
            assert request.visible == (len(tokens) if streaming else 0)
            place.check()

        return lambda: place.flights.withdraw(request, ABORTED, 3.0), verify

    assert interrupt_everywhere(prepare) >= 4


def test_a_grant_that_a_signal_cut_off_loses_no_turn():
    """Whoever is first is either still waiting, or marked as granted and to be given up."""

    def prepare():
        place = Place(max_inflight=1)
        running = place.admit()
        waiters = [Waiter(), Waiter()]
        for waiter in waiters:
            assert not place.flights.admit(place.request(), None, 1.0, waiter)
        place.flights.withdraw(running, ABORTED, 2.0)

        def verify():
            for waiter in waiters:
                place.flights.give_up(waiter)
            place.admit()

        return place.flights.grant, verify

    assert interrupt_everywhere(prepare) >= 2


@pytest.mark.parametrize("free", [1, 2, 3])
def test_several_grants_that_a_signal_cut_off_wake_everyone_whose_turn_it_is(free):
    """Whoever settles next names those that were marked and not woken, in no more than the
    places there are; the others wait on, in their order."""

    def prepare():
        place, running, waiters = crowded(free)
        for request in running:
            place.flights.withdraw(request, ABORTED, 2.0)

        def verify():
            woken = {*place.flights.grant(), *place.flights.places.granted()}
            assert woken == set(waiters[:free])
            everyone_is_served(place, waiters)

        return place.flights.grant, verify

    assert interrupt_everywhere(prepare) >= 2 * free


@pytest.mark.parametrize("leaving", [0, 1, 2, 3])
def test_giving_up_that_a_signal_cut_off_can_be_repeated(leaving):
    """Two have their turn and two wait: whoever leaves, nobody else loses his, and the turn of
    one who had it goes to the first who waits."""

    def prepare():
        place, running, waiters = crowded(2)
        for request in running:
            place.flights.withdraw(request, ABORTED, 2.0)
        assert place.flights.grant() == waiters[:2]
        gone, left = waiters[leaving], [*waiters[:leaving], *waiters[leaving + 1 :]]

        def verify():
            assert set(left) <= set(place.flights.places.everyone())
            woken = {*place.flights.give_up(gone), *place.flights.places.granted()}
            assert woken == set(left[:2])
            assert gone not in place.flights.places.everyone()
            everyone_is_served(place, left)

        return lambda: place.flights.give_up(gone), verify

    assert interrupt_everywhere(prepare) >= 2


def crowded(bound):
    """A full place of that bound, what runs in it, and four who wait."""
    place = Place(max_inflight=bound)
    running = [place.admit() for _ in range(bound)]
    waiters = [Waiter() for _ in range(4)]
    for waiter in waiters:
        assert not place.flights.admit(place.request(), None, 1.0, waiter)
    return place, running, waiters


def everyone_is_served(place, waiters):
    """One after the other, with nothing running at first; then every place is free again."""
    for waiter in waiters:
        assert waiter in place.flights.places.granted()
        request = place.request()
        assert place.flights.admit(request, None, 3.0, waiter)
        place.flights.withdraw(request, ABORTED, 4.0)
        place.flights.grant()
    assert place.flights.places.everyone() == []
    for _ in range(place.bound):
        place.admit()
    place.check()


# --- batches ---------------------------------------------------------------------------------


def test_tokens_load_and_ends_are_one_step():
    place = Place()
    first, second = place.admit(), place.admit()
    applied = place.apply((first, [1, 2]), (second, [3], "stop"), load=load(2, 0, 0.5))
    assert first.tokens == array("I", [1, 2])
    assert second.result().token_ids == [3]
    assert second.result().finish_reason == "stop"
    assert applied.wakes == [second.gate]
    assert applied.owed == []
    assert applied.source == 0
    assert place.flights.routing.load(0) == load(2, 0, 0.5)
    assert place.flights.engines[0].last_output == 2.0
    place.check()
    applied = place.apply((first, [4], "length"), load=load(1, 0, 0.5))
    assert first.result().token_ids == [1, 2, 4]
    assert place.flights.routing.load(0) == EngineLoad(0, 0, 0.5, 0)
    place.check()


def test_the_time_of_the_first_token_is_kept():
    place = Place()
    request = place.admit()
    place.apply((request, []), now=2.0)
    assert request.first is None
    place.apply((request, [1]), now=3.0)
    place.apply((request, [2]), now=4.0)
    place.apply((request, [3], "stop"), now=5.0)
    result = request.result()
    assert (result.first_token, result.finished) == (2.0, 4.0)


@pytest.mark.parametrize("bad", BAD_TOKENS, ids=repr)
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("position", ["first", "last", "alone"])
def test_a_bad_token_in_any_row_leaves_no_trace(bad, row, position):
    """Row 2 is row 0's request again: what it got twice is taken back twice."""
    place = Place()
    a, b, c = place.admit(streaming=True), place.admit(), place.admit()
    for _ in range(2):  # the second of these uses the remembered rows
        place.apply((a, [1]), (b, []), (a, [2, 3]), (c, [4]), load=load(1, 0, 0.25))
    rows: list[list[Any]] = [[5, 6], [], [7], [8, 9]]
    rows[row] = {"first": [bad, 7], "last": [7, bad], "alone": [bad]}[position]
    requests = [a, b, a, c]
    before = snapshot(place)
    with pytest.raises(DecodeError, match="token id"):
        place.apply(
            *[(request, ids, "stop") for request, ids in zip(requests, rows, strict=True)],
            load=load(9, 9, 0.75),
            completion_tokens=[99] * 4,
            now=50.0,
        )
    assert snapshot(place) == before
    place.check()
    place.apply((a, [10]), (b, []), (a, []), (c, [11]))
    assert a.tokens.tolist() == [1, 2, 3, 1, 2, 3, 10]
    assert c.tokens.tolist() == [4, 4, 11]


@pytest.mark.parametrize("column", [None, 7, "12", (1, 2), {1: 2}])
def test_a_row_that_is_no_list_is_refused_the_same_way(column):
    place = Place()
    a, b = place.admit(), place.admit()
    with pytest.raises(DecodeError):
        place.apply((a, [1, 2]), (b, column))
    assert a.tokens.tolist() == b.tokens.tolist() == []
    place.check()


def snapshot(place: Place) -> Any:
    flights = place.flights
    return (
        {
            wire_id: (
                request.tokens.tolist(),
                request.visible,
                request.end,
                request.first,
                repr(request.logprobs),  # nan is not equal to itself
            )
            for wire_id, request in flights.requests.items()
        },
        [flights.routing.view(index) for index in flights.routing.indices()],
        [flights.routing.load(index) for index in flights.routing.indices()],
        [record.last_output for record in flights.engines.values()],
    )


def test_a_row_beyond_the_first_that_is_unknown_is_dropped_with_all_its_columns():
    place = Place()
    a, b = (place.admit(logprobs=True, streaming=True) for _ in range(2))
    place.apply(
        (a, [1, 2]),
        ("gone", [5, 6, 7], "stop"),
        (b, [3]),
        completion_tokens=[2, 3, 1],
        cached_tokens=[1, 9, 2],
        logprobs=[[-0.5, -0.25], [-9.0] * 3, [-0.75]],
        details={1: RowDetail(stop_reason=9), 2: RowDetail(stop_reason=7)},
    )
    assert (a.tokens.tolist(), b.tokens.tolist()) == ([1, 2], [3])
    assert (a.logprobs, b.logprobs) == (array("d", [-0.5, -0.25]), array("d", [-0.75]))
    assert (a.cached_tokens, b.cached_tokens) == (1, 2)
    assert a.detail is None
    assert b.detail is not None
    assert b.detail.stop_reason == 7
    assert a.end is None
    assert b.end is None
    place.check()


def test_late_rows_are_noise():
    """After an abort an engine may send two more batches and the finish, twice."""
    place = Place()
    request, other = place.admit(streaming=True), place.admit()
    place.apply((request, [1]), (other, [1]))
    place.flights.withdraw(request, ABORTED, 3.0)
    for reason in ("", "", "abort", "abort"):
        applied = place.apply((request, [2], reason), (other, [2]), now=4.0)
        assert request.gate not in applied.wakes
    assert request.result().token_ids == [1]
    assert request.visible == 1
    assert other.tokens.tolist() == [1, 2, 2, 2, 2]
    place.check()


def test_a_batch_of_late_rows_alone_still_brings_a_load():
    place = Place()
    request, other = place.admit(), place.admit()
    place.flights.withdraw(request, ABORTED, 3.0)
    applied = place.apply((request, [2], "stop"), load=load(4, 1, 0.75), now=5.0)
    assert (applied.wakes, applied.owed, applied.source) == ([], [], 0)
    assert place.flights.routing.load(0) == load(4, 1, 0.75)
    assert place.flights.engines[0].last_output == 5.0
    assert other.tokens.tolist() == []


# --- whose load is believed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "ids", "believed"),
    [
        (0, [], True),  # an empty batch of a living engine
        (None, [], False),  # an old sender names no engine
        (1, [], False),  # it is dying
        (2, [], False),  # it is dead
        (9, [], False),  # there is none such
        (0, ["late"], True),
        (0, ["late", "stranger"], False),  # an engine that also works for somebody else
        (0, ["older"], False),  # its predecessor
    ],
)
def test_the_load_of_a_batch_without_a_row_of_ours(index, ids, believed):
    place = Place(3)
    place.flights.suspend(1, "dying")
    place.flights.drop(2, place.epochs[2], ABORTED, 1.0)
    older = place.ids.new()
    place.flights.drop(0, place.epochs[0], ABORTED, 1.0)
    place.flights.register(engine_info(0), 1.5)
    holder = place.admit(pinned=0)
    wire_ids = {"late": place.ids.new(), "stranger": "cmpl-1", "older": older}
    applied = place.apply(
        *[(wire_ids[name], [1]) for name in ids], engine=index, load=load(5, 0, 0.5), now=9.0
    )
    assert applied.source == (0 if believed else None)
    assert place.flights.routing.load(0) == (load(5, 0, 0.5) if believed else None)
    assert place.flights.engines[0].last_output == (9.0 if believed else 1.5)
    assert holder.end is None
    for dead in (1, 2):
        assert place.flights.routing.load(dead) is None


@pytest.mark.parametrize("claimed", [1, 9, None])
def test_the_rows_tell_whose_batch_it_is(claimed):
    """A wrong index in it: tokens arrive, its load is nobody's."""
    place = Place(2)
    request = place.admit(pinned=0)
    applied = place.apply((request, [1]), engine=claimed, load=load(5, 5, 0.75), now=9.0)
    assert request.tokens.tolist() == [1]
    assert applied.source == 0
    assert place.flights.routing.load(0) is None
    assert place.flights.routing.load(1) is None
    assert place.flights.engines[0].last_output == 9.0
    assert place.flights.engines[1].last_output == 0.0


def test_rows_of_two_engines_in_one_batch_count_where_they_were_placed():
    """Its sender is broken, the figures of both engines stay right."""
    place = Place(2)
    a, b, c = place.admit(0, 10), place.admit(1, 20), place.admit(1, 40)
    place.apply((a, [1]), (b, [2, 3]), (c, [4]), engine=0, load=load(3))
    place.check()
    assert place.flights.routing.view(0) == (1, 0, 11)
    assert place.flights.routing.view(1) == (2, 0, 63)
    place.apply((b, [5], "stop"), (a, [6], "stop"), engine=1)
    place.check()
    assert a.result().token_ids == [1, 6]
    assert place.flights.routing.view(1) == (1, 0, 41)


# --- how requests end --------------------------------------------------------------------------


def test_an_abort_without_tokens_is_a_refusal():
    place = Place()
    request = place.admit()
    applied = place.apply((request, [], "abort"))
    assert applied.owed == []
    with pytest.raises(RequestRejected, match="3 prompt tokens") as one:
        request.result()
    with pytest.raises(RequestRejected) as other:
        request.result()
    assert one.value is not other.value
    place.check()


def test_an_abort_with_tokens_is_a_result():
    place = Place()
    early, now = place.admit(), place.admit()
    place.apply((early, [1]), (now, []))
    place.apply((early, [], "abort"), (now, [2], "abort"))
    for request, ids in ((early, [1]), (now, [2])):
        assert request.result().token_ids == ids
        assert request.result().finish_reason == "abort"


@pytest.mark.parametrize(
    ("code", "kind"), [("engine_paused", EnginePaused), ("too_long", RequestRejected)]
)
def test_a_refusal_repeats_what_the_engine_said(code, kind):
    place = Place()
    request = place.admit()
    detail = RowDetail(error_code=code, error_message="because", retryable=True)
    place.apply((request, [], "error"), details={0: detail})
    with pytest.raises(RequestRejected, match="engine 0: because") as caught:
        request.result()
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.retryable) == (code, True)


@pytest.mark.parametrize("detail", [None, RowDetail(error_code="c", error_message="because")])
def test_an_error_after_tokens_hands_them_over(detail):
    place = Place()
    request = place.admit()
    place.apply((request, [1, 2]))
    place.apply((request, [3], "error"), details=detail and {0: detail})
    with pytest.raises(RequestRejected, match="because" if detail else "after 3 tokens") as caught:
        request.result()
    assert caught.value.partial.token_ids == [1, 2, 3]


def test_an_engine_that_cannot_answer_is_not_called_connected():
    """Until it can again. It is not dead, and may die of something else."""
    place = Place(2)
    assert place.flights.mute(0)
    assert not place.flights.mute(0)
    assert [info.alive for info in place.flights.infos()] == [True, True]
    health = place.flights.health(1.0)
    assert [health[0].connected, health[1].connected] == [False, True]
    assert "output connection" in health[0].first_error
    place.flights.unmute(0)
    assert place.flights.health(1.0)[0].first_error is None
    assert place.flights.engines[0].first_error is None
    assert place.flights.health(1.0)[0].connected


@pytest.mark.parametrize("reason", ["", "stop"])
def test_a_count_above_what_came_ends_the_request(reason):
    """In the row that finishes it too: a result that lacks tokens must not look whole."""
    place = Place()
    request, other = place.admit(), place.admit()
    place.apply((request, [1, 2]), (other, [1]), completion_tokens=[2, 1])
    applied = place.apply((request, [5], reason), (other, [2]), completion_tokens=[4, 2])
    assert applied.wakes == [request.gate]
    # An engine that has not finished it has to be told.
    assert applied.owed == ([] if reason else [request])
    with pytest.raises(TokensLost, match=r"counts 4 tokens.* 2 came before") as caught:
        request.result()
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == [1, 2]  # not what came after the gap
    assert caught.value.partial.finish_reason is None
    assert other.end is None
    place.check()


def test_a_count_below_what_came_is_the_engines_affair():
    place = Place()
    request = place.admit()
    place.apply((request, [1, 2]), completion_tokens=[1])
    assert request.end is None
    place.apply((request, [3], "stop"), completion_tokens=[0])
    assert request.result().token_ids == [1, 2, 3]


def test_the_same_id_twice_in_a_batch_ends_once():
    place = Place()
    request = place.admit(group=group())
    other = place.admit()
    assert request.group is not None
    place.apply((request, [1], "stop"), (request, [2], "length"), (other, [3]), load=load(2))
    assert request.result().token_ids == [1, 2]
    assert list(request.group.finished) == [request]
    assert place.flights.routing.inflight(0) == 1
    place.check()


def test_the_drop_of_an_engine_ends_each_request_with_its_own_error():
    place = Place(2)
    mine = [place.admit(pinned=0) for _ in range(3)]
    other = place.admit(pinned=1)
    place.apply((mine[0], [7]), load=load(3, 0, 0.5))
    end = End(error=lambda partial: EngineDead(f"{partial.completion_tokens} came", 0))
    assert place.flights.drop(0, place.epochs[0] + 1, end, 3.0) is None  # another incarnation
    assert place.flights.drop(7, 1, end, 3.0) is None
    assert place.flights.drop(0, place.epochs[0], end, 3.0) == mine
    assert place.flights.drop(0, place.epochs[0], end, 3.0) is None
    errors = []
    for request in mine:
        with pytest.raises(EngineDead) as caught:
            request.result()
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert str(errors[0]) == "1 came"
    assert other.end is None
    assert place.flights.routing.load(0) is None
    place.check()
    assert place.admit().engine_index == 1


def test_a_dead_engine_holds_nothing_that_it_held():
    """It may never come back."""
    place = Place(2)
    stream = place.admit(0, streaming=True)
    gone = weakref.ref(place.admit(0))
    request = gone()
    assert request is not None
    place.flights.apply(place.batch((stream, [1]), (request, [1])), 2.0)
    del request
    place.flights.drop(0, place.epochs[0], End(error=lambda _: EngineDead("dead")), 3.0)
    assert place.flights.reveal() == [stream.gate]
    gc.collect()
    assert gone() is None


def test_an_old_drop_does_not_hurt_the_next_incarnation():
    place = Place()
    place.flights.drop(0, place.epochs[0], ABORTED, 1.0)
    epoch = place.flights.register(engine_info(0), 2.0)
    request = place.admit()
    assert place.flights.drop(0, place.epochs[0], ABORTED, 3.0) is None
    assert request.end is None
    assert place.flights.drop(0, epoch, ABORTED, 3.0) == [request]


def test_suspension_keeps_the_first_reason_and_what_is_held():
    place = Place(2)
    request = place.admit(pinned=0)
    assert place.flights.suspend(0, "first")
    assert not place.flights.suspend(0, "second")
    assert not place.flights.suspend(5, "nobody")
    assert request.end is None
    health = place.flights.health(10.0)
    assert (health[0].connected, health[0].inflight, health[0].first_error) == (False, 1, "first")
    assert (health[1].connected, health[1].last_output) == (True, 10.0)
    place.apply((request, [1], "stop"), load=load(1))
    assert request.result().token_ids == [1]


def test_after_close_nothing_is_admitted_and_the_rest_is_named():
    place = Place()
    request = place.admit()
    assert place.flights.close(lambda: ClientClosed("one")) == [request]
    assert place.flights.close(lambda: ClientClosed("two")) == [request]
    for _ in range(2):
        with pytest.raises(ClientClosed, match="one"):
            place.flights.admit(place.request(), None, 1.0, Waiter())


# --- what readers see --------------------------------------------------------------------------


def test_logprobs_stay_beside_the_tokens():
    """Also those of requests that did not ask are sent now and then."""
    place = Place()
    asked, not_asked = place.admit(logprobs=True, streaming=True), place.admit(streaming=True)
    place.apply((asked, [1, 2]), (not_asked, [3]), logprobs=[[-0.5, -1.5], [-9.0]])
    place.apply((asked, []), (not_asked, [4]), logprobs=[[], []])
    place.apply((not_asked, [5]), (asked, [6], "stop"), logprobs=[[], [math.inf]])
    assert asked.result().logprobs == [-0.5, -1.5, math.inf]
    assert not_asked.logprobs is None
    assert asked.visible == 3
    assert not_asked.visible == 3


@pytest.mark.parametrize("missing", [None, [[], []]])
def test_a_logprob_that_did_not_come_is_nan_and_holds_nothing_up(missing):
    place = Place()
    asked, other = place.admit(logprobs=True, streaming=True), place.admit()
    place.apply((asked, [1]), (other, [1]), logprobs=[[-0.5], []])
    place.apply((asked, [2, 3]), (other, [1]), logprobs=missing)
    assert asked.visible == 3
    place.apply((asked, [4]), (other, [1]), logprobs=[[-4.5], []])
    values = list(asked.logprobs or ())
    assert values[0] == -0.5
    assert all(map(math.isnan, values[1:3]))
    assert values[3] == -4.5


@pytest.mark.parametrize(
    ("came", "limit", "kept"),
    [
        # The sampled one is the third of all.
        (((7, -0.5), (3, -0.1), (4, -0.2), (7, -0.5)), 2, {7: -0.5, 3: -0.1, 4: -0.2}),
        (((7, -0.5), (3, -0.1), (4, -0.2), (7, -0.5)), 3, {7: -0.5, 3: -0.1, 4: -0.2}),
        (((3, -0.1), (3, -0.1), (4, -0.2), (5, -0.9)), 2, {3: -0.1, 4: -0.2}),
        (((3, -0.1), (3, -0.1), (4, -0.2)), 5, {3: -0.1, 4: -0.2}),
        # It is as likely as the last that was asked for, and is not among them.
        (((9, -0.1), (3, -0.1), (9, -0.1)), 1, {9: -0.1, 3: -0.1}),
    ],
)
def test_top_logprobs_are_cut_to_what_was_asked_for(came, limit, kept):
    """Engines fill a batch up to its widest request; the sampled token is always there."""
    place = Place()
    request = place.admit(top_limit=limit, logprobs=True)
    place.apply((request, [came[0][0]], "stop"), details={0: RowDetail(top_logprobs=[came])})
    assert request.result().top_logprobs == [kept]


def test_top_logprobs_are_collected_and_prompt_logprobs_survive():
    place = Place()
    request = place.admit(logprobs=True, top_limit=1)
    prompt = [None, {1: -0.5}]
    place.apply(
        (request, [1]), details={0: RowDetail(top_logprobs=[((1, -1.0),)], prompt_logprobs=prompt)}
    )
    place.apply((request, [2], "stop"), details={0: RowDetail(2, top_logprobs=[((2, -2.0),)])})
    result = request.result()
    assert result.top_logprobs == [{1: -1.0}, {2: -2.0}]
    assert result.prompt_logprobs == prompt
    assert result.stop_reason == 2


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_top_logprobs_do_not_slip_where_a_step_has_none(missing):
    """An empty mapping stands there, as NaN does among the logprobs."""
    place = Place()
    request, other = place.admit(logprobs=True, top_limit=1, streaming=True), place.admit()
    expected: list[dict[int, float]] = []
    for step in range(3):
        ids = [10 * step, 10 * step + 1]
        details = None
        if step != missing:
            tops = [((token, -1.0 * token),) for token in ids]
            details = {0: RowDetail(top_logprobs=tops)}
        expected += map(dict, tops) if step != missing else [{}, {}]
        place.apply((request, ids), (other, [1]), details=details)
    assert request.tokens.tolist() == [0, 1, 10, 11, 20, 21]
    assert request.top_logprobs == expected
    assert request.chunk(2, None).top_logprobs == expected[2:]
    assert other.top_logprobs is None


def test_versions_of_the_weights_are_told_with_their_tokens():
    """A version that made none of a request's tokens is none of it; nor is one that came back."""
    place = Place()
    first, second, late = place.admit(), place.admit(), place.admit()
    place.apply((first, [1, 2]), (second, []), weight_version="a")
    place.apply((first, [3]), (second, []), weight_version="b")
    place.apply((first, []), (second, [1]), weight_version="c")
    place.apply((first, []), (second, [2]), weight_version="b")
    place.apply((second, [3]), (late, [1]), (first, [4, 5]), weight_version="b")
    place.apply((second, [], "stop"), (late, [2]), (first, [6], "stop"), weight_version="d")
    place.apply((late, [3], "stop"), weight_version="d")
    assert first.result().weight_versions == [("a", 0, 2), ("b", 2, 5), ("d", 5, 6)]
    assert second.result().weight_versions == [("c", 0, 1), ("b", 1, 3)]
    assert late.result().weight_versions == [("b", 0, 1), ("d", 1, 3)]


@pytest.mark.parametrize("alone", [False, True])
def test_a_request_that_comes_back_knows_its_versions(alone):
    """It was preempted while the weights changed; or came in a batch by itself."""
    place = Place()
    others, request = [place.admit() for _ in range(20)], place.admit()
    place.apply(*[(other, [1]) for other in others], (request, [1]), weight_version="a")
    place.apply(*[(other, [2]) for other in others], weight_version="b")
    if alone:
        place.apply((request, [2]), weight_version="c")
    rest = [(other, [3]) for other in others]
    place.apply(*rest, (request, [5]), weight_version="b")
    place.apply((request, [], "stop"), (others[0], [], "stop"), weight_version="b")
    middle = [("c", 1, 2)] if alone else []
    start = 2 if alone else 1
    stop = start + 1
    assert request.result().weight_versions == [("a", 0, 1), *middle, ("b", start, stop)]
    assert others[0].result().weight_versions == [("a", 0, 1), ("b", 1, 3)]


def test_no_versions_where_the_wire_has_none():
    place = Place()
    request, aborted = place.admit(), place.admit()
    place.apply((request, [1], "stop"))
    place.apply((aborted, []), weight_version="a")
    place.flights.withdraw(aborted, ABORTED, 3.0)
    assert request.result().weight_versions is None
    assert aborted.result().weight_versions == []


def test_transfer_params_reach_the_result():
    """Also where another detail follows them; each result has its own."""
    place = Place()
    request = place.admit()
    params = {"do_remote_prefill": True}
    place.apply((request, [1]), details={0: RowDetail(kv_transfer_params=params)})
    place.apply((request, [], "stop"), details={0: RowDetail(stop_reason=5)})
    result = request.result()
    assert (result.kv_transfer_params, result.stop_reason) == (params, 5)
    assert result.kv_transfer_params is not request.result().kv_transfer_params


def test_the_last_chunk_tells_the_stop_reason():
    place = Place()
    request = place.admit(streaming=True)
    place.apply((request, [1]), details={0: RowDetail(stop_reason=5)})
    place.apply((request, [5], "stop"), details={0: RowDetail(stop_reason=5)})
    assert request.chunk(0, None).stop_reason is None
    assert request.chunk(1, "stop").stop_reason == 5


def test_what_a_result_holds_is_the_callers_own():
    place = Place()
    request = place.admit(logprobs=True, top_limit=1)
    detail = RowDetail(top_logprobs=[((1, -1.0),)], prompt_logprobs=[None, {1: -0.5}])
    place.apply((request, [1], "stop"), logprobs=[[-1.0]], details={0: detail})
    first, second = request.result(), request.result()
    for column in (first.token_ids, first.top_logprobs, first.prompt_logprobs):
        assert column
        column.clear()
    assert second == request.result()
    assert (second.token_ids, second.top_logprobs) == ([1], [{1: -1.0}])
    assert second.prompt_logprobs == [None, {1: -0.5}]


def test_cached_tokens_are_told_with_the_first_token_and_at_the_end():
    place = Place()
    stream, plain, other = place.admit(streaming=True), place.admit(), place.admit()
    place.apply((stream, [1]), (plain, [1]), (other, []), cached_tokens=[2, 3, 4])
    assert (stream.cached_tokens, plain.cached_tokens, other.cached_tokens) == (2, 3, 0)
    place.apply((stream, [1]), (plain, [1]), (other, [1]), cached_tokens=[5, 6, 7])
    assert (stream.cached_tokens, plain.cached_tokens, other.cached_tokens) == (2, 3, 7)
    place.flights.withdraw(other, ABORTED, 3.0)
    assert other.result().cached_tokens == 7
    place.apply((stream, [1]), (plain, [1], "stop"), cached_tokens=[2, 8])
    assert plain.result().cached_tokens == 8


def test_who_waits_for_a_first_token_moves_up_with_the_rows():
    """As those before them end."""
    place = Place()
    first, second, third = place.admit(), place.admit(), place.admit()
    place.apply((first, [1]), (second, []), (third, []))
    place.apply((first, [2], "stop"), (second, []), (third, []))
    place.apply((second, [5]), (third, []), now=3.0)
    place.apply((second, [6], "stop"), (third, []), now=4.0)
    place.apply((third, [7]), now=5.0)
    assert (second.first, third.first) == (3.0, 5.0)
    assert place.flights.routing.view(0) == (1, 0, 4)


def test_what_was_not_shown_yet_is_shown_at_the_end():
    """Somebody aborts it between two looks of the receiver's."""
    place = Place()
    stream, other = place.admit(streaming=True), place.admit()
    for count in (1, 2, 3):
        place.flights.apply(place.step((stream, count), (other, 9), counts=[count] * 2), 2.0)
    place.flights.withdraw(stream, ABORTED, 3.0)
    assert stream.visible == 3
    assert stream.result().token_ids == [1, 2, 3]


def test_a_step_is_stored_like_any_batch():
    """One token each, as most batches are: kept together, and dealt out when looked at."""
    place = Place()
    a, b = place.admit(logprobs=True), place.admit(logprobs=True)
    for count in range(1, 200):
        step = place.step(
            (a, count), (b, 1000 + count), counts=[count] * 2, logprobs=[[-count], [count]]
        )
        place.flights.apply(step, 2.0)
    assert place.tokens_of(a) == list(range(1, 200))
    assert place.tokens_of(b) == list(range(1001, 1200))
    assert list(a.logprobs or ()) == [-float(count) for count in range(1, 200)]
    place.check()


@pytest.mark.parametrize("row", [0, 1])
def test_a_step_that_counts_too_much_ends_the_request(row):
    place = Place()
    requests = [place.admit(), place.admit()]
    counts = [0, 0]
    for _ in range(5):
        counts = [count + 1 for count in counts]
        rows = [(request, 7) for request in requests]
        place.flights.apply(place.step(*rows, counts=counts), 2.0)
    counts = [count + 1 for count in counts]
    counts[row] += 1
    applied = place.flights.apply(place.step(*rows, counts=counts), 2.0)
    assert applied.owed == [requests[row]]
    with pytest.raises(TokensLost, match=r"counts 7 tokens.* 5 came before a gap") as caught:
        requests[row].result()
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == [7] * 5  # what follows a gap is worth nothing
    assert requests[1 - row].end is None
    place.check()


def test_requests_that_end_without_a_token_are_forgotten():
    """Beside rows that go on for as long as the engine is busy."""
    place = Place()
    busy = place.admit()
    place.apply((busy, [1]))
    for step in range(20):
        refused = place.admit()
        place.apply((busy, [step]), (refused, [], "abort"))
        assert refused.end is not None
    assert place.flights._rows[0].unstarted == []
    place.check()


def test_a_request_that_is_named_twice_ends_once_and_for_all():
    place = Place()
    a, b = place.admit(), place.admit()
    place.apply((a, [1]), (b, [1]), (a, [2], "stop"))
    place.apply((a, [3]), (b, [2]))
    assert place.tokens_of(a) == [1, 2]
    assert place.tokens_of(b) == [1, 2]
    place.check()


def test_steps_that_name_a_request_twice_keep_its_tokens_in_order():
    place = Place()
    a, b = place.admit(), place.admit()
    expected: list[int] = []
    for count in range(1, 6):
        rows = [(a, 10 * count), (b, 1), (a, 10 * count + 1)]
        place.flights.apply(place.step(*rows, counts=[2 * count, count, 2 * count]), 2.0)
        expected += [10 * count, 10 * count + 1]
    assert place.tokens_of(a) == expected
    # The same with counts that go up by one: fewer than came is no loss.
    for count in range(11, 15):
        step = place.step((a, count), (b, 1), (a, -count % 100), counts=[count, count - 5, count])
        place.flights.apply(step, 2.0)
        expected += [count, -count % 100]
    assert place.tokens_of(a) == expected


def test_streams_are_woken_at_each_row_others_at_their_end():
    place = Place()
    stream, plain = place.admit(streaming=True), place.admit()
    assert place.apply((stream, [1]), (plain, [1])).wakes == [stream.gate]
    assert stream.visible == 1
    assert place.apply((plain, [1])).wakes == []
    assert place.apply((plain, [1], "stop")).wakes == [plain.gate]


def test_a_group_is_woken_when_enough_of_it_has_finished_or_one_failed():
    place = Place()
    many = group(wake_at=2)
    first, second, third, fourth = (
        place.admit(group=many, gate=many.gate, streaming=number == 3) for number in range(4)
    )
    assert place.apply((first, [1], "stop")).wakes == []
    assert place.apply((second, [1], "stop")).wakes == [many.gate]
    assert list(many.finished) == [first, second]
    many.finished.clear()
    assert place.apply((third, [], "abort"), (fourth, [1])).wakes == [many.gate] * 2
    assert many.failed
    assert list(many.touched) == [fourth]


# --- the bound on unfinished requests ------------------------------------------------------------


def test_tickets_are_served_in_order():
    place = Place(max_inflight=2)
    running = [place.admit(), place.admit()]
    waiters = [Waiter() for _ in range(3)]
    requests = [place.request() for _ in range(3)]
    admit = [
        partial(place.flights.admit, request, None, 1.0, waiter)
        for request, waiter in zip(requests, waiters, strict=True)
    ]
    assert [ask() for ask in admit] == [False] * 3
    assert [ask() for ask in admit] == [False] * 3  # asking again takes no second turn
    applied = place.apply((running[0], [1], "stop"))
    assert applied.wakes == [running[0].gate, waiters[0]]
    # The place is kept for whoever was woken, also from one who comes just now.
    assert not place.flights.admit(place.request(), None, 1.0, Waiter())
    assert not admit[1]()
    assert admit[0]()
    assert place.flights.grant() == []
    place.flights.withdraw(running[1], ABORTED, 2.0)
    # Free, but there are those who have waited for it.
    assert not place.flights.admit(place.request(), None, 1.0, Waiter())
    assert place.flights.grant() == [waiters[1]]
    assert admit[1]()
    place.check()
    assert len(place.flights.requests) == 2


def test_giving_up_passes_the_turn_on():
    place = Place(max_inflight=1)
    running = place.admit()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        assert not place.flights.admit(place.request(), None, 1.0, waiter)
    assert place.flights.give_up(waiters[1]) == []  # it was only waiting
    place.flights.withdraw(running, ABORTED, 2.0)
    assert place.flights.grant() == [waiters[0]]
    assert place.flights.give_up(waiters[0]) == [waiters[2]]
    assert place.flights.give_up(waiters[2]) == []
    place.admit()


def test_an_engines_death_frees_places():
    place = Place(2, max_inflight=2)
    place.admit(pinned=0)
    place.admit(pinned=0)
    waiters = [Waiter(), Waiter(), Waiter()]
    for waiter in waiters:
        assert not place.flights.admit(place.request(), None, 1.0, waiter)
    place.flights.drop(0, place.epochs[0], ABORTED, 2.0)
    assert place.flights.grant() == waiters[:2]


def test_a_granted_turn_that_ends_in_an_error_is_given_up():
    place = Place(max_inflight=1)
    running = place.admit()
    first, second = Waiter(), Waiter()
    for waiter in (first, second):
        assert not place.flights.admit(place.request(), None, 1.0, waiter)
    place.flights.withdraw(running, ABORTED, 2.0)
    assert place.flights.grant() == [first]
    with pytest.raises(InvalidRank):
        place.flights.admit(place.request(), 9, 2.0, first)
    assert place.flights.give_up(first) == [second]


def test_everyone_who_waits_is_named_after_close_until_he_leaves():
    """As often as somebody asks: a signal may cut off whoever wakes them."""
    place = Place(max_inflight=1)
    place.admit()
    waiters = [Waiter(), Waiter()]
    for waiter in waiters:
        place.flights.admit(place.request(), None, 1.0, waiter)
    place.flights.close(lambda: ClientClosed("closed"))
    for _ in range(2):
        assert place.flights.places.everyone() == waiters
    for waiter in waiters:
        with pytest.raises(ClientClosed):
            place.flights.admit(place.request(), None, 1.0, waiter)
        place.flights.give_up(waiter)
    assert place.flights.places.everyone() == []


# --- apply() beside a row-by-row reading -------------------------------------------------------


@attrs.define
class Expected:
    """A request as somebody keeps it who looks at one row after the other."""

    request: Request
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    cached: int = 0
    stop_reason: object = None
    end: str | None = None
    first: float | None = None

    def check(self) -> None:
        """What the request holds is that; call it after the tokens were dealt out."""
        request = self.request
        assert request.first == self.first
        assert request.tokens.tolist() == self.tokens
        assert outcome(request) == self.end
        assert request.cached_tokens == self.cached
        assert (request.detail and request.detail.stop_reason) == self.stop_reason
        if request.streaming:
            assert request.visible == len(self.tokens)
        if request.logprobs is not None:
            assert list(map(repr, request.logprobs)) == list(map(repr, self.logprobs))  # nan too


def now_of(expected: dict[str, Expected]) -> float:
    """Another time after each token."""
    return 2.0 + sum(len(each.tokens) for each in expected.values())


def apply_naively(expected: dict[str, Expected], batch: Any, now: float) -> None:
    """All or nothing; then tokens, then ends, each row on its own."""
    rows = list(enumerate(batch.request_ids))
    token_ids, logprobs = batch.rows_of_tokens(), batch.rows_of_logprobs()
    known = [(i, expected[each]) for i, each in rows if expected[each].end is None]
    for i, _ in known:
        for token in token_ids[i]:
            if type(token) is not int or not 0 <= token < 1 << 32:
                raise DecodeError("bad")
    for i, each in known:
        each.tokens += token_ids[i]
        if each.tokens and each.first is None:
            each.first = now
            each.cached = batch.cached_tokens[batch.request_ids.index(batch.request_ids[i])]
        values = logprobs and logprobs[i]
        each.logprobs += values or [math.nan] * len(token_ids[i])
        if batch.details and i in batch.details:
            each.stop_reason = batch.details[i].stop_reason
    ends: dict[str, str] = {}
    for i, each in known:
        reason = batch.finished.get(i)
        if reason:
            refused = reason == "abort" and not each.tokens
            each.cached = batch.cached_tokens[i]
            ends.setdefault(batch.request_ids[i], "refused" if refused else reason)
    counts = batch.rows_of_counts()
    gaps = [(i, each) for i, each in known if counts[i] > len(each.tokens)]
    for i, each in gaps:
        ends[batch.request_ids[i]] = "lost"
        kept = len(each.tokens) - len(token_ids[i])  # what came after the gap is not shown
        del each.tokens[kept:], each.logprobs[kept:]
    for wire_id, end in ends.items():
        expected[wire_id].end = end


def outcome(request: Request) -> str | None:
    if request.end is None:
        return None
    try:
        return request.result().finish_reason
    except RequestRejected:
        return "refused"
    except TokensLost:
        return "lost"


TOKENS = st.integers(0, (1 << 32) - 1)
REASONS = ["stop", "abort"]  # of a request without a token, the latter is a refusal
CHANGES = ("admit", "admit", "remove", "return", "double", "turn", "withdraw", "other", "nothing")
ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(CHANGES),
        st.integers(0, 9),
        st.sampled_from(["steps", "steps", "steps", "any", "alone", "claim", "look", "none"]),
    ),
    min_size=5,
    max_size=30,
)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    kinds=st.sampled_from([(0,), (1,), (2,), (0, 1, 2)]),
    rounds=ROUNDS,
    fewest_kept=st.sampled_from([1, 3, 8]),
    data=st.data(),
)
@mock.patch("tszmq.core.flights._FEW", 2)
def test_apply_agrees_with_the_row_by_row_reading(kinds, rounds, fewest_kept, data):
    """Batches mostly repeat the ids of their engine's last, as engines do, less those that have
    ended, and with new ones after them: remembered rows are used, and must be forgotten when
    others come. Two engines; a broken sender names the wrong one, or mixes them."""
    with mock.patch("tszmq.core.rows._FEWEST_KEPT", fewest_kept):
        apply_rounds(kinds, rounds, data)


def apply_rounds(kinds: tuple[int, ...], rounds: list[Any], data: st.DataObject) -> None:
    """Both ways, and what they come to."""
    place = Place(2)
    expected: dict[str, Expected] = {}
    queues: list[list[str]] = [[], []]  # the ids of each engine's next batch
    engine = 0
    start = [("admit", kind, "none") for kind in range(3)]
    for change, number, bring in [*start, *rounds, ("nothing", 0, "look")]:
        if change == "other":
            engine = 1 - engine
        elif change == "withdraw":
            each = list(expected.values())[number % len(expected)]
            assert place.flights.withdraw(each.request, ABORTED, 1.0) is (each.end is None)
            each.end = each.end or "abort"
        elif change == "admit":
            kind = kinds[number % len(kinds)]
            request = place.admit(engine, streaming=kind == 1, logprobs=kind > 0)
            expected[request.wire_id] = Expected(request)
            queues[engine].append(request.wire_id)
        queues[engine] = ids = changed(queues[engine], change, number, expected)
        if bring == "look":
            place.check()
            for each in expected.values():
                each.check()
        elif bring == "any":
            apply_both(place, expected, ids, data, engine)
        elif bring == "claim":
            apply_both(place, expected, ids, data, (1 - engine, 7, None)[number % 3])
        elif bring == "alone" and ids:
            step_both(place, expected, ids[-1:], data, engine)
        elif bring == "steps" and ids:
            for _ in range(1 + number % 4):
                step_both(place, expected, ids, data, engine)
        # No need to look for these: they are right at any moment.
        alive = [each for each in expected.values() if each.end is None]
        assert set(place.flights.requests.values()) == {each.request for each in alive}
        for index in (0, 1):
            mine = [each for each in alive if each.request.engine_index == index]
            assert place.flights.routing.view(index) == (
                len(mine),
                sum(3 for each in mine if not each.tokens),
                sum(3 + len(each.tokens) for each in mine if each.tokens),
            )


def changed(ids: list[str], change: str, number: int, expected: dict[str, Expected]) -> list[str]:
    """The ids of an engine's next batch."""
    if change == "remove":
        return [each for i, each in enumerate(ids) if i != number % len(ids)]
    if change == "turn":
        return [*ids[1:], *ids[:1]]
    if change in ("return", "double"):
        return [*ids, list(expected)[number % len(expected)]]
    if number == 9:
        return list(ids)  # late rows of requests that have ended
    return [each for each in dict.fromkeys(ids) if expected[each].end is None]


def step_both(
    place: Place,
    expected: dict[str, Expected],
    ids: list[str],
    data: st.DataObject,
    engine: int | None,
) -> None:
    """One token a row, mostly with the right counts and sometimes with one too many; some end."""
    tokens = [data.draw(TOKENS) for _ in ids]
    reasons = [""] * len(ids)
    if data.draw(st.integers(0, 7)) == 7:
        reasons[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.sampled_from(REASONS))
    counts = [len(expected[each].tokens) + 1 for each in ids]
    if len(set(ids)) == len(ids) and data.draw(st.integers(0, 15)) == 15:
        counts[data.draw(st.integers(0, len(ids) - 1))] += 1
    some = data.draw(st.integers(0, 7)) < 7
    batch = place.step(
        *zip(list(ids), tokens, reasons, strict=True),
        counts=counts,
        engine=engine,
        cached_tokens=[5] * len(ids),
        logprobs=[[float(token)] for token in tokens] if some else None,
        load=load(1),
        details={0: RowDetail(stop_reason=tokens[0])}
        if data.draw(st.integers(0, 7)) == 7
        else None,
    )
    now = now_of(expected)
    apply_naively(expected, batch, now)
    place.flights.apply(batch, now)


def apply_both(
    place: Place,
    expected: dict[str, Expected],
    ids: list[str],
    data: st.DataObject,
    engine: int | None,
) -> None:
    """Any batch at all: several tokens or none, ends, a bad token, a count that is too high."""
    tokens: list[list[Any]] = [data.draw(st.lists(TOKENS, max_size=2)) for _ in ids]
    if ids and data.draw(st.integers(0, 7)) == 0:
        row = data.draw(st.integers(0, len(ids) - 1))
        tokens[row] = [*tokens[row], data.draw(st.sampled_from(BAD_TOKENS))]
    reasons = [data.draw(st.sampled_from(["", "", "", "", "", "stop", "abort"])) for _ in ids]
    counts = [0] * len(ids)
    if len(ids) == len(set(ids)) > 0 and data.draw(st.integers(0, 7)) == 0:
        counts[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.integers(0, 30))
    batch = place.batch(
        *zip(list(ids), tokens, reasons, strict=True),
        completion_tokens=counts,
        engine=engine,
        cached_tokens=[len(each) for each in tokens],
        logprobs=[[float(len(tokens))] * len(each) for each in tokens],
        load=load(1),
    )
    now = now_of(expected)
    try:
        apply_naively(expected, batch, now)
    except DecodeError:
        place.check()
        before = snapshot(place)
        with pytest.raises(DecodeError):
            place.flights.apply(batch, now)
        assert snapshot(place) == before
    else:
        place.flights.apply(batch, now)
        place.flights.reveal()


def test_an_end_after_a_loss_is_an_error_where_the_wire_does_not_count() -> None:
    """Or a short answer would look whole."""
    place = Place()
    lost, counted, other = (place.admit() for _ in range(3))
    place.flights.doubt(0, "it broke", math.inf)
    later = place.admit()
    place.apply((lost, [5], "stop"))
    place.apply((counted, [5], "stop"), completion_tokens=[1])
    place.apply((later, [5], "stop"))
    assert counted.result().token_ids == later.result().token_ids == [5]
    with pytest.raises(DecodeError, match="it broke") as caught:
        lost.result()
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == [5]
    assert other.end is None
    place.check()


def test_a_long_queue_is_served_in_order():
    """Thousands wait: each looks at few others."""
    places, tickets = Places(1), [Waiter() for _ in range(5000)]
    for ticket in tickets:
        places.wait(ticket, mock.sentinel.request)
    places.wait(tickets[0], mock.sentinel.request)  # keeps its place
    for gone in tickets[1:10]:
        places.leave(gone)
    left = tickets[:1] + tickets[10:]
    for ticket in left:
        assert places.grant(0) == [ticket]
        assert not places.has_one_for(left[-1], 1) or ticket is left[-1]
        places.leave(ticket)
    assert places.grant(0) == []
    assert not places.waiting
