"""The simulator's scheduler: pages, order, tokens, load."""

from __future__ import annotations

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tszmq.sim import (
    EngineFault,
    Scheduler,
    SimRequest,
    SimStep,
    expected_logprobs,
    expected_tokens,
)

VOCAB = 997


def make(**options) -> Scheduler:
    return Scheduler(VOCAB, **options)


def ask(request_id="a", prompt=(1, 2, 3), n=4, **more) -> SimRequest:
    return SimRequest(request_id, list(prompt), n, **more)


def run(scheduler: Scheduler, limit: int = 10_000) -> list[SimStep]:
    steps = []
    while not scheduler.idle:
        steps.append(scheduler.step())
        assert len(steps) < limit
    return steps


def rows(steps: list[SimStep], request_id: str) -> list[tuple[list[int], str]]:
    return [
        (step.tokens[place], step.reasons[place])
        for step in steps
        for place, request in enumerate(step.requests)
        if request.request_id == request_id
    ]


def sizes(steps: list[SimStep], request_id: str = "a") -> list[int]:
    return [len(tokens) for tokens, _ in rows(steps, request_id)]


def joined(steps: list[SimStep], request_id: str = "a") -> list[int]:
    return [token for tokens, _ in rows(steps, request_id) for token in tokens]


def test_tokens_and_logprobs_are_the_documented_formula():
    assert expected_tokens([1, 2, 3], 2, 32000) == [6 * 31 + 3, 6 * 31 + 7 + 3]
    assert expected_tokens([31999] * 40, 1, 32000) == [(31999 * 40 * 31 + 40) % 32000]
    assert expected_logprobs(2) == [-0.5, struct.unpack("f", struct.pack("f", -0.501))[0]]


def test_a_request_gets_a_token_a_step_and_ends_with_length():
    scheduler = make()
    scheduler.add(ask(logprobs=True))
    steps = run(scheduler)
    tokens = expected_tokens([1, 2, 3], 4, VOCAB)
    assert rows(steps, "a") == [
        ([t], r) for t, r in zip(tokens, ["", "", "", "length"], strict=True)
    ]
    assert [step.completion for step in steps] == [[1], [2], [3], [4]]
    assert [step.logprobs[0][0] for step in steps] == expected_logprobs(4)
    assert scheduler.active_pages == 0


@pytest.mark.parametrize(("asked", "made"), [(0, 1), (1, 1), (None, 58), (1000, 58)])
def test_the_length_is_clamped_to_the_context(asked, made):
    scheduler = make(max_model_len=64)
    scheduler.add(ask(prompt=range(1, 5), n=asked))
    steps = run(scheduler)
    assert joined(steps) == expected_tokens(range(1, 5), made, VOCAB)
    assert rows(steps, "a")[-1][1] == "length"


def test_the_context_is_what_the_kv_cache_holds_when_that_is_less():
    assert make(max_model_len=1000, kv_pages=10, page_size=16).context == 158


class TestStops:
    tokens = expected_tokens([1, 2, 3], 20, VOCAB)

    def test_the_stop_token_is_output(self):
        scheduler = make()
        scheduler.add(ask(n=20, stop_token_ids=frozenset({self.tokens[5]})))
        steps = run(scheduler)
        assert joined(steps) == self.tokens[:6]
        assert rows(steps, "a")[-1] == ([self.tokens[5]], "stop")

    def test_length_wins_over_a_stop_at_the_same_token(self):
        scheduler = make()
        scheduler.add(ask(n=6, stop_token_ids=frozenset({self.tokens[5]})))
        assert rows(run(scheduler), "a")[-1][1] == "length"

    def test_eos(self):
        scheduler = make(eos_token_id=self.tokens[2])
        scheduler.add(ask(n=20))
        assert joined(run(scheduler)) == self.tokens[:3]

    def test_ignore_eos_switches_off_both(self):
        scheduler = make(eos_token_id=self.tokens[2])
        scheduler.add(ask(n=20, ignore_eos=True, stop_token_ids=frozenset({self.tokens[5]})))
        assert joined(run(scheduler)) == self.tokens

    @pytest.mark.parametrize(("least", "made"), [(2, 3), (3, 6), (5, 6), (6, 20)])
    def test_min_new_tokens(self, least, made):
        scheduler = make()
        stops = frozenset({self.tokens[2], self.tokens[5]})
        scheduler.add(ask(n=20, min_new_tokens=least, stop_token_ids=stops))
        assert joined(run(scheduler)) == self.tokens[:made]


@pytest.mark.parametrize(
    ("more", "n", "expected"),
    [
        ({"stream": False}, 1, [1]),
        ({"stream": False}, 49, [1, 48]),
        ({"stream": False}, 50, [1, 49]),
        ({"stream": False}, 120, [1, 49, 50, 20]),
        ({"stream_interval": 4}, 10, [1, 4, 4, 1]),
        ({"stream_interval": 4}, 9, [1, 4, 4]),
        ({"stream_interval": 2}, 4, [1, 2, 1]),
    ],
)
def test_rows_are_held_back(more, n, expected):
    scheduler = make()
    scheduler.add(ask(n=n, logprobs=True, **more))
    steps = run(scheduler)
    assert sizes(steps) == expected
    assert joined(steps) == expected_tokens([1, 2, 3], n, VOCAB)
    assert [p for step in steps for row in step.logprobs for p in row] == expected_logprobs(n)


def test_a_stream_interval_of_zero_is_fatal():
    scheduler = make()
    scheduler.add(ask(stream_interval=0))
    with pytest.raises(ZeroDivisionError):
        scheduler.step()


@pytest.mark.parametrize(
    "prompt", [[], [2**31], [-(2**31) - 1], list(range(8191))], ids=["0", "high", "low", "long"]
)
def test_what_a_real_engine_dies_of(prompt):
    with pytest.raises(EngineFault):
        make().add(ask(prompt=prompt))


def test_an_id_is_in_flight_until_the_step_after_its_end():
    scheduler = make()
    scheduler.add(ask(n=1))
    with pytest.raises(EngineFault):
        scheduler.add(ask())
    scheduler.step()
    assert scheduler.idle
    with pytest.raises(EngineFault):
        scheduler.add(ask())
    scheduler.step()
    scheduler.add(ask())


class TestAbort:
    def test_a_running_request_goes_in_silence(self):
        scheduler = make()
        scheduler.add(ask("a", n=50))
        scheduler.add(ask("b", n=5))
        steps = [scheduler.step()]
        assert scheduler.abort(["a", "nobody"]) == ["nobody"]
        steps += run(scheduler)
        assert sizes(steps) == [1]
        assert sizes(steps, "b") == [1] * 5
        assert scheduler.active_pages == 0

    def test_a_waiting_request_keeps_its_place_until_its_turn(self):
        scheduler = make(max_num_seqs=1)
        scheduler.add(ask("a", n=2))
        scheduler.add(ask("b"))
        scheduler.abort(["b"])
        steps = [scheduler.step(), scheduler.step()]
        assert scheduler.num_waiting == 1
        steps += run(scheduler)
        assert rows(steps, "b") == []

    @pytest.mark.parametrize("steps_before", [0, 1])
    def test_at_once_frees_everything(self, steps_before):
        scheduler = make()
        scheduler.add(ask(n=50))
        for _ in range(steps_before):
            scheduler.step()
        scheduler.abort(["a"], at_once=True)
        assert scheduler.idle
        assert scheduler.active_pages == 0
        assert not scheduler.in_flight("a")

    def test_an_ended_request_is_unknown(self):
        scheduler = make()
        scheduler.add(ask(n=1))
        scheduler.step()
        assert scheduler.abort(["a"]) == ["a"]


def test_a_refusal_is_one_row_of_its_own_with_the_previous_load():
    scheduler = make()
    scheduler.add(ask(n=9))
    load = scheduler.step().load
    step = scheduler.refusal(ask("bad", prompt=range(5)))
    assert (step.tokens, step.reasons, step.completion) == ([[]], ["abort"], [0])
    assert step.requests[0].prompt_tokens == 5
    assert step.load == load
    assert not scheduler.in_flight("bad")


def test_the_load_is_sampled_before_the_finishes_and_after_the_admissions():
    scheduler = make(max_num_seqs=2, kv_pages=8, page_size=4, max_model_len=100)
    for name in "abc":
        scheduler.add(ask(name, n=1))
    first, second = run(scheduler)
    assert (first.load.running, first.load.waiting) == (2, 1)
    assert (first.load.active_pages, first.load.total_pages) == (2, 8)
    assert (second.load.running, second.load.waiting) == (1, 0)
    assert scheduler.active_pages == 0


def test_the_youngest_is_preempted_and_goes_on_where_it_was():
    scheduler = make(kv_pages=4, page_size=4, max_model_len=100)
    for name in "ab":
        scheduler.add(ask(name, n=10))
    steps = []
    preempted = False
    while not scheduler.idle:
        steps.append(scheduler.step())
        preempted = preempted or scheduler.num_waiting > 0
    assert preempted
    for name in "ab":
        assert sizes(steps, name) == [1] * 10
        assert joined(steps, name) == expected_tokens([1, 2, 3], 10, VOCAB)
    ends = [n for step in steps for n, r in zip(step.requests, step.reasons, strict=True) if r]
    assert [request.request_id for request in ends] == ["a", "b"]


def test_chunked_prefill_delays_the_first_token():
    scheduler = make(prefill_tokens_per_step=10)
    scheduler.add(ask("a", prompt=range(25), n=1))
    scheduler.add(ask("b", prompt=range(7), n=1))
    steps = run(scheduler)
    assert [[request.request_id for request in step.requests] for step in steps] == [
        [],
        [],
        ["a"],
        ["b"],
    ]


def test_several_tokens_a_step():
    scheduler = make(spec_tokens=4)
    scheduler.add(ask(n=40, logprobs=True))
    steps = run(scheduler)
    assert joined(steps) == expected_tokens([1, 2, 3], 40, VOCAB)
    assert sizes(steps)[0] == 1
    assert max(sizes(steps)) == 4


def test_cached_tokens_are_whole_pages_and_never_all():
    scheduler = make(prefix_cache=True, page_size=4, prefill_tokens_per_step=4)
    scheduler.add(ask("a", prompt=range(12), n=1))
    scheduler.add(ask("b", prompt=range(12), n=1))
    scheduler.add(ask("c", prompt=[*range(9), 50, 51, 52], n=1))
    cached = {
        request.request_id: request.cached_tokens
        for step in run(scheduler)
        for request in step.requests
    }
    assert cached == {"a": 0, "b": 8, "c": 8}


@pytest.mark.parametrize("field", ["max_num_seqs", "kv_pages", "page_size", "spec_tokens"])
def test_sizes_are_positive(field):
    with pytest.raises(ValueError, match="at least 1"):
        make(**{field: 0})


class Traffic(RuleBasedStateMachine):
    """Requests of all sorts against a cramped engine."""

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.size, self.slots = 12, 4, 3
        self.scheduler = make(
            kv_pages=self.pages,
            page_size=self.size,
            max_num_seqs=self.slots,
            max_model_len=64,
            prefill_tokens_per_step=9,
            spec_tokens=2,
        )
        self.alive: dict[str, SimRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.first_rows: list[int] = []
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        n=st.none() | st.integers(0, 40),
        stream=st.booleans(),
        interval=st.integers(1, 5),
        stop=st.none() | st.integers(0, 30),
    )
    def add(self, prompt, n, stream, interval, stop):
        name = str(self.count)
        self.count += 1
        stops = (
            frozenset() if stop is None else frozenset(expected_tokens(prompt, 31, VOCAB)[stop:])
        )
        request = ask(
            name, prompt, n, stream=stream, stream_interval=interval, stop_token_ids=stops
        )
        self.scheduler.add(request)
        self.alive[name] = request
        self.tokens[name] = []

    @rule(data=st.data())
    def abort(self, data):
        name = str(data.draw(st.integers(0, self.count)))
        unknown = self.scheduler.abort([name])
        assert (unknown == []) == (name in self.alive or name in self.aborted_in_flight())
        if not unknown:
            self.aborted.add(name)
            self.alive.pop(name, None)

    def aborted_in_flight(self) -> set[str]:
        return {
            r.request_id for r in [*self.scheduler._running, *self.scheduler._waiting] if r.aborted
        }

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.take(self.scheduler.step())

    def take(self, step: SimStep) -> None:
        assert step.load.running <= self.slots
        assert step.load.active_pages <= self.pages
        # Nothing has ended yet when the load is sampled.
        ended = sum(1 for reason in step.reasons if reason)
        assert step.load.running >= self.scheduler.num_running + ended
        for request, tokens, reason, made in zip(
            step.requests, step.tokens, step.reasons, step.completion, strict=True
        ):
            name = request.request_id
            assert name in self.alive, "a row of an ended or aborted request"
            assert tokens
            if not self.tokens[name]:
                self.first_rows.append(int(name))
            self.tokens[name] += tokens
            assert made == len(self.tokens[name])
            if reason:
                self.reasons[name] = reason
                self.check_end(self.alive.pop(name), reason)

    def check_end(self, request: SimRequest, reason: str) -> None:
        made = self.tokens[request.request_id]
        room = 12 * 4 - 2 - len(request.prompt)
        limit = max(
            1, room if request.max_new_tokens is None else min(request.max_new_tokens, room)
        )
        assert made == expected_tokens(request.prompt, len(made), VOCAB)
        hits = [k for k, token in enumerate(made) if token in request.stop_token_ids]
        if reason == "length":
            assert len(made) == limit
            assert hits in ([], [limit - 1])
        else:
            assert reason == "stop"
            assert hits == [len(made) - 1]

    @invariant()
    def pages_are_counted(self):
        held = [r.pages for r in self.scheduler._running]
        assert sum(held) == self.scheduler.active_pages
        assert all(r.pages == 0 for r in self.scheduler._waiting)
        for r in self.scheduler._running:
            length = r.prompt_tokens + r.generated
            assert r.pages * self.size >= length
            assert r.pages <= (length + 1) // self.size + 1
        # Running before waiting, older before younger.
        order = [int(r.request_id) for r in [*self.scheduler._running, *self.scheduler._waiting]]
        assert order == sorted(order)

    @invariant()
    def first_tokens_come_in_order(self):
        assert self.first_rows == sorted(self.first_rows)

    def teardown(self):
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.take(self.scheduler.step())
        assert self.scheduler.idle
        assert not self.alive
        assert self.scheduler.active_pages == 0
        assert len(self.reasons) + len(self.aborted) == self.count


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
