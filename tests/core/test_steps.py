"""Batches of one token a row, kept together while rows end and join."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.parts import Place
from tszmq.core.request import ABORTED, Request
from tszmq.errors import TokensLost
from tszmq.wire.base import Counts, OneEach

pytestmark = pytest.mark.timeout(60)


@attrs.define(eq=False)
class Row:
    """A request, and what it should have."""

    request: Request
    tokens: list[int] = attrs.field(factory=list)


class Crowd:
    """An engine's rows in order, as continuous batching has them: new ones come last."""

    def __init__(self) -> None:
        self.place = Place()
        self.rows: list[Row] = []
        self.token = 0

    def admit(self, count: int, logprobs: bool = False) -> list[Row]:
        """Requests that the engine does not run yet."""
        return [Row(self.place.admit(logprobs=logprobs)) for _ in range(count)]

    def step(
        self,
        ending: Collection[int] = (),
        joining: Collection[Row] = (),
        reason: str = "stop",
    ) -> None:
        """A batch of all rows, those that join after the others; some end with it."""
        self.rows += joining
        self._apply(self.rows, ending, reason)
        self.rows = [row for at, row in enumerate(self.rows) if at not in ending]

    def alone(self, rows: list[Row], ending: Collection[int] = (), reason: str = "") -> None:
        """A batch of rows that have not joined the others: their prompts were just read."""
        self._apply(rows, ending, reason)

    def _apply(self, rows: list[Row], ending: Collection[int], reason: str) -> None:
        lines = []
        for at, row in enumerate(rows):
            self.token += 1
            row.tokens.append(self.token)
            lines.append((row.request, self.token, *([reason] if at in ending else [])))
        self.place.flights.apply(
            self.place.step(
                *lines,
                counts=[len(row.tokens) for row in rows],
                logprobs=[[-float(row.tokens[-1])] for row in rows],
            ),
            2.0,
        )
        for at in ending:
            self.verify(rows[at])
            assert rows[at].request.result().finish_reason == reason

    def dealt(self) -> int:
        """How many tokens the rows have been dealt out."""
        return sum(len(row.request.tokens) for row in self.rows)

    def verify(self, row: Row) -> None:
        """It has been dealt out what came for it, in order."""
        assert row.request.tokens.tolist() == row.tokens
        if row.request.logprobs is not None:
            assert row.request.logprobs.tolist() == [-float(token) for token in row.tokens]

    def verify_all(self) -> None:
        self.place.check()
        for row in self.rows:
            self.verify(row)


@pytest.mark.parametrize("logprobs", [False, True])
def test_rows_that_end_or_join_do_not_break_up_what_is_kept(logprobs):
    crowd = Crowd()
    crowd.step(joining=crowd.admit(40, logprobs))
    assert crowd.dealt() == 40
    crowd.step(ending={3, 7})
    crowd.step(ending={0, 17})
    crowd.step()
    assert crowd.dealt() == 36
    crowd.step(joining=crowd.admit(2, logprobs))  # the first to join: now there will be room
    dealt = crowd.dealt()
    crowd.step(ending={5})
    crowd.step(joining=crowd.admit(2, logprobs))
    crowd.step(ending={0, 18}, joining=crowd.admit(1, logprobs))
    joining = crowd.admit(2, logprobs)
    crowd.alone(joining)
    crowd.step()
    crowd.step(joining=joining)
    crowd.step()
    assert crowd.dealt() < dealt + 2
    crowd.verify_all()


def test_rows_that_others_take_the_place_of_keep_their_tokens():
    crowd = Crowd()
    crowd.step(joining=crowd.admit(20))
    for _ in range(3):
        crowd.step()
    others = crowd.admit(20)
    for _ in range(3):
        crowd.alone(others)
    crowd.step()
    crowd.verify_all()


def test_requests_that_end_elsewhere_do_not_break_up_what_is_kept():
    """Of one token, or in the engine's queue."""
    crowd = Crowd()
    crowd.step(joining=crowd.admit(20))
    for _ in range(5):
        crowd.step()
        short = crowd.admit(1)
        crowd.alone(short, {0}, "stop")
        [waiting] = crowd.admit(1)
        assert crowd.place.flights.withdraw(waiting.request, ABORTED, 3.0)
        crowd.step()
    assert crowd.dealt() == 20
    crowd.verify_all()


def test_an_abort_after_tokens_that_are_kept_is_no_refusal():
    crowd = Crowd()
    crowd.step(joining=crowd.admit(20))
    crowd.step(joining=crowd.admit(2))
    crowd.step(joining=crowd.admit(2))
    crowd.step(ending={23}, reason="abort")
    crowd.step(ending={0, 22}, reason="abort")
    crowd.verify_all()


def test_a_row_with_logprobs_that_joins_rows_without_gets_its_own():
    crowd = Crowd()
    crowd.step(joining=crowd.admit(20))
    for joining in (crowd.admit(1), crowd.admit(2, True), crowd.admit(1), crowd.admit(1, True)):
        for _ in range(3):
            crowd.step()
        crowd.step(joining=joining)
    crowd.step()
    crowd.verify_all()


@pytest.mark.parametrize("most", [3, 64])
def test_so_many_steps_are_kept_and_no_more(most):
    with mock.patch("tszmq.core.steps._STEPS_KEPT", most):
        crowd = Crowd()
        crowd.step(joining=crowd.admit(20))
        for step in range(1, 2 * most):
            crowd.step()
            assert crowd.dealt() == 20 * (1 + step // most * most)


JOINING = st.tuples(
    st.integers(0, 6), st.integers(0, 2), st.sampled_from([None, None, False, True])
)
ROUNDS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 39), max_size=4),
        JOINING,
        st.integers(1, 4),
        st.sampled_from(["", "", "", "", "look", "withdraw"]),
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(logprobs=st.booleans(), first=st.integers(16, 30), rounds=ROUNDS)
def test_everyone_gets_his_own_whoever_ends_or_joins(logprobs, first, rounds):
    crowd = Crowd()
    crowd.step(joining=crowd.admit(first, logprobs))
    for ending, (count, before, other), steps, then in rounds:
        joining = crowd.admit(count, logprobs if other is None else other)
        for _ in range(before if joining else 0):
            crowd.alone(joining)
        rows = len(crowd.rows) + len(joining)
        if rows:
            crowd.step({at for at in ending if at < rows}, joining)
        for _ in range(steps if crowd.rows else 0):
            crowd.step()
        if then == "look":
            crowd.verify_all()
        elif then == "withdraw" and crowd.rows:
            row = crowd.rows.pop(len(crowd.rows) // 2)
            assert crowd.place.flights.withdraw(row.request, ABORTED, 3.0)
            crowd.verify(row)
    crowd.verify_all()


class Series:
    """The same rows in batches that count on from one another, as the decoder gives them."""

    def __init__(self, rows: int) -> None:
        self.place = Place()
        self.requests = [self.place.admit() for _ in range(rows)]
        self.counts = Counts.of([1] * rows)
        self.ids = [request.wire_id for request in self.requests]

    def step(self, ahead: int, **columns: Any) -> None:
        """The batch after so many others; its tokens tell which."""
        rows = [(request, ahead) for request in self.requests]
        batch = self.place.step(*rows, counts=[1 + ahead] * len(rows), **columns)
        assert batch.one_each is not None
        batch.one_each = OneEach(batch.one_each.tokens, None, self.counts, ahead)
        batch.request_ids = self.ids
        self.place.flights.apply(batch, 2.0)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_counts_that_count_on_are_believed(rows):
    series = Series(rows)
    for ahead in range(150):
        series.step(ahead)
    for request in series.requests:
        assert series.place.tokens_of(request) == list(range(150))


@pytest.mark.parametrize("before", [1, 2, 3, 70])
@pytest.mark.parametrize("missing", [1, 2, 64])
def test_counts_that_count_on_after_a_gap_have_lost_tokens(before, missing):
    series = Series(3)
    for ahead in range(before):
        series.step(ahead)
    series.step(before + missing)
    for request in series.requests:
        with pytest.raises(TokensLost, match=f"{before + missing + 1} tokens"):
            request.result()
        assert request.tokens.tolist() == list(range(before))


def test_the_same_batch_twice_is_no_next_one():
    series = Series(2)
    for ahead in (0, 1, 2, 2):
        series.step(ahead)
    assert [series.place.tokens_of(request) for request in series.requests] == [[0, 1, 2, 2]] * 2


def test_counts_that_count_on_are_of_the_rows_that_are_left():
    """One ends: the others' counts are compared as numbers then, and are still right."""
    series = Series(3)
    for ahead in range(5):
        series.step(ahead)
    series.place.flights.withdraw(series.requests[1], ABORTED, 3.0)
    del series.requests[1]
    series.ids = [request.wire_id for request in series.requests]
    series.counts = Counts.of([1, 1])
    for ahead in range(5, 9):
        series.step(ahead)
    for request in series.requests:
        assert series.place.tokens_of(request) == list(range(9))
        assert request.end is None


def test_a_row_that_is_there_twice_gets_its_tokens_in_order():
    place = Place()
    request = place.admit()
    for step in range(1, 9):
        batch = place.step((request, 2 * step), (request, 2 * step + 1), counts=[step - 1] * 2)
        batch.request_ids = [request.wire_id] * 2
        place.flights.apply(batch, 2.0)
    assert place.tokens_of(request) == list(range(2, 18))


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_batch_of_few_rows_is_dealt_out_at_once(logprobs):
    """Before and after there are more of them."""
    with mock.patch("tszmq.core.rows._FEWEST_KEPT", 4):
        crowd = Crowd()
        crowd.step(joining=crowd.admit(3, logprobs))
        for _ in range(5):
            crowd.step()
        for row in crowd.rows:
            crowd.verify(row)  # without looking for what is kept
        crowd.step(joining=crowd.admit(2, logprobs))
        for _ in range(5):
            crowd.step()
        assert crowd.dealt() < sum(len(row.tokens) for row in crowd.rows)
        crowd.step(ending={0, 3})
        crowd.verify_all()
        for _ in range(70):
            crowd.step()
            crowd.step(ending={1}, joining=crowd.admit(1, logprobs))
        crowd.verify_all()
