"""Arbitrary histories of ``RoutingState`` beside a model that counts from scratch each time."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tszmq.core.routing import RoutingState
from tszmq.errors import EngineDead, InvalidRank
from tszmq.types import EngineLoad

pytestmark = pytest.mark.timeout(60)

INDICES = st.integers(0, 3)
NOBODY = 9
LOADS = st.builds(
    # The distinct requests of a report are at least those of its longer queue.
    lambda running, waiting, usage, more: EngineLoad(
        running, waiting, usage, max(running, waiting) + more
    ),
    st.integers(0, 12),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.25, 0.5, 0.625, 0.75, 1.0]),
    st.integers(0, 5),
)


@attrs.define
class ModelRequest:
    prompt: int
    started: bool = False
    tokens: int = 0


@attrs.define
class ModelEngine:
    """An engine as a reader of the documentation would keep it: requests and the last report."""

    alive: bool = True
    requests: dict[str, ModelRequest] = attrs.field(factory=dict)
    report: EngineLoad | None = None

    def ended(self) -> None:
        """A commit or release is over: an engine that is empty now has empty queues."""
        if self.report is not None and not self.requests:
            self.report = EngineLoad(0, 0, self.report.kv_cache_usage, 0)

    def score(self) -> float:
        report = self.report
        if report is None:
            return len(self.requests)
        pressure = max(0.0, report.kv_cache_usage - 0.5)
        return max(len(self.requests), report.num_requests) + report.num_waiting * 6 * pressure


class RoutingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = RoutingState()
        self.model: dict[int, ModelEngine] = {}
        self.ended: list[tuple[int, str]] = []
        self.number = 0
        self.turn = 0

    def alive(self) -> list[int]:
        return sorted(index for index, engine in self.model.items() if engine.alive)

    # -- engines

    @rule(index=INDICES)
    def add(self, index: int) -> None:
        if index in self.model and self.model[index].alive:
            return  # a living one is never replaced
        self.state.drop_engine(index)
        self.state.add_engine(index)
        self.model[index] = ModelEngine()

    @rule(index=INDICES)
    def suspend(self, index: int) -> None:
        self.state.suspend_engine(index)
        if index in self.model:
            self.model[index].alive = False

    @rule(index=INDICES)
    def drop(self, index: int) -> None:
        dropped = self.state.drop_engine(index)
        held = self.model[index].requests if index in self.model else {}
        assert sorted(dropped) == sorted(held)
        self.ended += [(index, each) for each in held]
        if index in self.model:
            self.model[index] = ModelEngine(alive=False)

    # -- requests

    @rule(prompt=st.integers(0, 500))
    def reserve(self, prompt: int) -> None:
        self.number += 1
        wire_id, alive = f"r{self.number}", self.alive()
        if not alive:
            with pytest.raises(EngineDead):
                self.state.reserve(wire_id, prompt)
            return
        scores = [self.model[index].score() for index in alive]
        start = self.turn % len(alive)
        order = [*range(start, len(alive)), *range(start)]
        best = next(position for position in order if scores[position] == min(scores))
        self.turn = best + 1
        assert self.state.reserve(wire_id, prompt) == alive[best]
        self.model[alive[best]].requests[wire_id] = ModelRequest(prompt)

    @rule(prompt=st.integers(0, 500), pinned=st.one_of(INDICES, st.just(NOBODY)))
    def reserve_pinned(self, prompt: int, pinned: int) -> None:
        self.number += 1
        wire_id = f"r{self.number}"
        if pinned not in self.model:
            with pytest.raises(InvalidRank):
                self.state.reserve(wire_id, prompt, pinned)
        elif not self.model[pinned].alive:
            with pytest.raises(EngineDead):
                self.state.reserve(wire_id, prompt, pinned)
        else:
            assert self.state.reserve(wire_id, prompt, pinned) == pinned
            self.model[pinned].requests[wire_id] = ModelRequest(prompt)

    @rule(
        index=st.one_of(INDICES, st.just(NOBODY)),
        load=st.one_of(st.none(), LOADS),
        data=st.data(),
    )
    def commit(self, index: int, load: EngineLoad | None, data: st.DataObject) -> None:
        engine = self.model.get(index)
        requests = {} if engine is None else engine.requests
        rows = []
        if requests:
            rows = data.draw(st.lists(st.sampled_from(sorted(requests)), unique=True, max_size=6))
        started, finished, generated = [], [], 0
        for wire_id in rows:
            request = requests[wire_id]
            count = data.draw(st.integers(0, 3))
            if count:
                request.started = True
                started.append(wire_id)  # said of running ones as well: only the first counts
            request.tokens += count
            generated += count
            if data.draw(st.booleans()):
                finished.append((wire_id, request.tokens))
        noise = data.draw(st.lists(st.sampled_from(self.ended), max_size=2)) if self.ended else []
        self.state.commit(
            index,
            load,
            started + [each for _, each in noise],
            generated,
            finished + [(each, 5) for _, each in noise],
        )
        if engine is None:
            return
        if load is not None:
            engine.report = load
        for wire_id, _ in finished:
            del requests[wire_id]
            self.ended.append((index, wire_id))
        engine.ended()

    @precondition(lambda self: any(engine.requests for engine in self.model.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [(i, each) for i, engine in self.model.items() for each in engine.requests]
        index, wire_id = data.draw(st.sampled_from(sorted(held)))
        request = self.model[index].requests.pop(wire_id)
        self.model[index].ended()
        assert self.state.release(index, wire_id, request.tokens)
        self.ended.append((index, wire_id))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        index, wire_id = data.draw(st.sampled_from(self.ended))
        assert not self.state.release(index, wire_id, 3)

    # -- what must hold after each of them

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.state.indices() == sorted(self.model)
        assert self.state.alive_indices() == self.alive()
        for index, engine in self.model.items():
            requests = engine.requests.values()
            assert sorted(self.state.inflight_ids(index)) == sorted(engine.requests)
            assert self.state.inflight(index) == len(engine.requests)
            shown = self.state.load(index)
            assert shown == engine.report
            assert requests or shown is None or shown.num_running == shown.num_waiting == 0
            assert self.state.view(index) == (
                len(requests),
                sum(request.prompt for request in requests if not request.started),
                sum(request.prompt + request.tokens for request in requests if request.started),
            )
            assert self.state.unstarted(index) == {
                wire_id: request.prompt
                for wire_id, request in engine.requests.items()
                if not request.started
            }

    @invariant()
    def the_kept_scores_are_those_of_the_formula(self) -> None:
        scores = self.state._rescored()
        assert scores == [self.model[index].score() for index in self.alive()]
        for index, score in zip(self.alive(), scores, strict=True):
            assert score >= len(self.model[index].requests)


TestRouting = RoutingMachine.TestCase
TestRouting.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
