"""Which engine gets the next request: load and in-flight ids, together.

A plain object: no thread, socket or clock. Invariants, at every moment between two calls:

* an engine with nothing in flight reports ``num_running == num_waiting == 0`` and keeps its
  ``kv_cache_usage``: engines report only when tokens flow, the last report is sampled before
  the last finish commits, so that an idle engine would look busy for ever;
* a commit stores the report first, releases the ids that the batch finishes next, and clamps
  an emptied engine last, in one call;
* ids are tracked, not counters: a release counts once, whichever of its racing ways is first;
* no report lowers the own in-flight count;
* each sum equals what its ids say, and is zero for an empty engine.

``place`` and ``release`` run in callers' threads, where a signal handler may raise at any call.
Ids and sums therefore change without a call in between, and ``release`` makes whole what was
cut off after that, whether or not it still finds the id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tszmq.checks import engines_listed, shown
from tszmq.core.policy import LeastLoaded, Policy, RequestView
from tszmq.errors import EngineDead, InvalidRank
from tszmq.types import EngineLoad

__all__ = ["RoutingState", "all_dead"]


def all_dead() -> EngineDead:
    """No engine is left."""
    return EngineDead(
        "every engine is dead, or has lost its output connection: restart one, or close this client"
    )


class _Engine:
    """One engine's ids, sums and report; what a policy sees as an ``EngineView``."""

    __slots__ = (
        "alive",
        "inflight",
        "load",
        "pending_prompt_tokens",
        "position",
        "resident_tokens",
        "unstarted",
    )

    def __init__(self) -> None:
        self.alive = True
        self.position = 0  # among the living engines
        self.inflight: dict[str, int] = {}  # id -> prompt tokens
        self.unstarted: dict[str, int] = {}  # the same, of those without a first token
        self.load: EngineLoad | None = None
        self.pending_prompt_tokens = 0
        self.resident_tokens = 0

    @property
    def num_inflight(self) -> int:
        return len(self.inflight)

    def settle(self) -> None:
        """The clamp: nothing in flight means nothing running and nothing waiting."""
        if not self.inflight:
            self.pending_prompt_tokens = 0
            self.resident_tokens = 0
            load = self.load
            if load is not None and load.num_requests:
                self.load = load.idle()


class RoutingState:
    """Load and in-flight ids of every engine, and the rotating choice among them.

    Args:
        policy: How to choose; the default is ``LeastLoaded``.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy: Policy = LeastLoaded() if policy is None else policy
        self._engines: dict[int, _Engine] = {}
        self._alive: list[int] = []  # indices of living engines, in order
        # Beside _alive, kept while the policy allows it, but for those whose engine has changed.
        self._scores: list[float] = []
        self._changed: set[_Engine] = set()
        self._turn = 0

    # -- engines

    def add_engine(self, index: int) -> None:
        """A new engine, or a new incarnation of a dead one: nothing in flight, load unknown."""
        self._engines[index] = _Engine()
        self._list_alive()

    def suspend_engine(self, index: int) -> None:
        """No new requests for it; what it holds stays until it is dropped."""
        engine = self._engines.get(index)
        if engine is not None:
            engine.alive = False
            self._list_alive()

    def resume_engine(self, index: int) -> None:
        """It takes new requests again, after ``suspend_engine``."""
        self._engines[index].alive = True
        self._list_alive()

    def drop_engine(self, index: int) -> list[str]:
        """The engine is dead: forget its report and return the ids it held."""
        engine = self._engines.get(index)
        if engine is None:
            return []
        ids = list(engine.inflight)
        self._engines[index] = dropped = _Engine()
        dropped.alive = False
        self._list_alive()
        return ids

    def _list_alive(self) -> None:
        self._alive = sorted(index for index, engine in self._engines.items() if engine.alive)
        living = [self._engines[index] for index in self._alive]
        for position, engine in enumerate(living):
            engine.position = position
        self._scores = [math.inf] * len(living)
        self._changed = set(living)

    # -- requests

    def reserve(self, request_id: str, prompt_tokens: int, pinned: int | None = None) -> int:
        """Choose an engine and take a place there, in one step.

        Args:
            request_id: A wire id that is not in flight.
            prompt_tokens: Length of its prompt.
            pinned: The engine it must go to, or None.

        Returns:
            The engine's index.

        Raises:
            InvalidRank: The pin names an engine that does not exist.
            EngineDead: The pin names a dead one, or every engine is dead.
            Exception: What the policy raises.
        """
        index = self.choose(prompt_tokens, pinned)
        self.place(index, request_id, prompt_tokens)
        return index

    def place(self, index: int, request_id: str, prompt_tokens: int) -> None:
        """The second half of ``reserve``: take a place on the chosen engine."""
        engine = self._engines[index]
        engine.inflight[request_id] = prompt_tokens
        engine.unstarted[request_id] = prompt_tokens
        engine.pending_prompt_tokens += prompt_tokens
        self._changed.add(engine)

    def choose(self, prompt_tokens: int, pinned: int | None = None) -> int:
        """The first half of ``reserve``, arguments and errors as there: take nothing yet."""
        if pinned is not None:
            return self._check_pin(pinned)
        if not self._alive:
            raise all_dead()
        if self._policy.uses_request:
            scores = self._score_all(RequestView(prompt_tokens))
        else:
            scores = self._rescored()
        count = len(scores)
        start = self._turn % count
        position = self._policy.pick(scores, start)
        chosen = self._alive[position]  # or an error: a policy may return anything
        # After the one chosen, not after the last start: else the neighbour of a busy engine
        # would get that one's share as well as its own.
        self._turn = position + 1
        return chosen

    def _score_all(self, request: RequestView) -> list[float]:
        return [self._policy.score(self._engines[index], request) for index in self._alive]

    def _rescored(self) -> list[float]:
        """The scores, those of engines that have changed made new.

        Here and nowhere else: a policy that raises must do so to whoever chooses, and not where
        something is half released; and more batches come than requests.
        """
        scores, changed = self._scores, self._changed
        for engine in list(changed):
            if engine.alive:
                scores[engine.position] = self._policy.score(engine, None) + 0.0  # or an error
            changed.discard(engine)
        return scores

    def _check_pin(self, pinned: int) -> int:
        engine = self._engines.get(pinned)
        if engine is None:
            raise InvalidRank(
                f"data_parallel_rank={shown(pinned)} names no engine of this client; "
                f"{engines_listed(self._engines)}"
            )
        if not engine.alive:
            raise EngineDead(
                f"data_parallel_rank={pinned} names an engine that is dead, or has lost its output "
                "connection",
                engine_index=pinned,
            )
        return pinned

    def commit(
        self,
        index: int,
        load: EngineLoad | None,
        started: Iterable[str] = (),
        generated: int = 0,
        finished: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Apply one output batch: store its load, then release what it finishes, then clamp.

        Args:
            index: The engine it came from; one that is not known changes nothing.
            load: Its report, or None when it made none (the last one stands).
            started: Ids whose first token it brings.
            generated: Tokens it brings.
            finished: Ids that it ends, each with the tokens of its whole output.
        """
        engine = self._engines.get(index)
        if engine is None:
            return
        if load is not None:
            engine.load = load
        for request_id in started:
            prompt_tokens = engine.unstarted.pop(request_id, None)
            if prompt_tokens is not None:
                engine.pending_prompt_tokens -= prompt_tokens
                engine.resident_tokens += prompt_tokens
        engine.resident_tokens += generated
        for request_id, tokens in finished:
            self._remove(engine, request_id, tokens)
        engine.settle()
        self._changed.add(engine)

    def advance(self, index: int, load: EngineLoad | None, generated: int) -> None:
        """``commit`` of a batch that starts and finishes nothing; arguments as there."""
        engine = self._engines.get(index)
        if engine is None:
            return
        engine.resident_tokens += generated
        if load is not None and load is not engine.load:
            engine.load = load
            engine.settle()
        self._changed.add(engine)

    def release(self, index: int, request_id: str, generated: int = 0) -> bool:
        """Give a place back; only the first release of an id counts.

        Args:
            index: The engine that ``reserve`` returned.
            request_id: The id.
            generated: Tokens of it that were committed.

        Returns:
            Whether this call released it.
        """
        engine = self._engines.get(index)
        if engine is None:
            return False
        released = self._remove(engine, request_id, generated)
        # Also when it was not: an earlier release of it may have been interrupted here.
        engine.settle()
        self._changed.add(engine)
        return released

    def recount(self, index: int, generated: Mapping[str, int]) -> None:
        """Make the sum of resident tokens what the ids say.

        Args:
            index: The engine.
            generated: The tokens committed for each id there.
        """
        engine = self._engines.get(index)
        if engine is None:
            return
        engine.resident_tokens = sum(
            prompt_tokens + generated.get(request_id, 0)
            for request_id, prompt_tokens in engine.inflight.items()
            if request_id not in engine.unstarted
        )
        self._changed.add(engine)

    @staticmethod
    def _remove(engine: _Engine, request_id: str, generated: int) -> bool:
        if request_id not in engine.inflight:
            return False
        prompt_tokens = engine.inflight[request_id]
        if request_id in engine.unstarted:
            del engine.unstarted[request_id]
            engine.pending_prompt_tokens -= prompt_tokens
            engine.resident_tokens -= generated
        else:
            engine.resident_tokens -= prompt_tokens + generated
        del engine.inflight[request_id]
        return True

    # -- reading

    def indices(self) -> list[int]:
        """Every engine known, dead ones included."""
        return sorted(self._engines)

    def is_alive(self, index: int) -> bool:
        """Whether it takes new requests."""
        engine = self._engines.get(index)
        return engine is not None and engine.alive

    def alive_indices(self) -> list[int]:
        """Those that take new requests, in order."""
        return list(self._alive)

    def load(self, index: int) -> EngineLoad | None:
        """The stored report, with empty queues when nothing is in flight there."""
        engine = self._engines.get(index)
        return None if engine is None else engine.load

    def inflight(self, index: int) -> int:
        """Unfinished requests there."""
        engine = self._engines.get(index)
        return 0 if engine is None else len(engine.inflight)

    def inflight_ids(self, index: int) -> list[str]:
        """Their ids."""
        engine = self._engines.get(index)
        return [] if engine is None else list(engine.inflight)

    def unstarted(self, index: int) -> dict[str, int]:
        """Ids there without a first token; the live mapping, for the owner of this state."""
        engine = self._engines.get(index)
        return {} if engine is None else engine.unstarted

    def view(self, index: int) -> tuple[int, int, int]:
        """(in-flight, pending prompt tokens, resident tokens) of an engine."""
        engine = self._engines[index]
        return engine.num_inflight, engine.pending_prompt_tokens, engine.resident_tokens
