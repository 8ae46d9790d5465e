"""Utility calls that wait for an engine's answer. Part of the state behind the one lock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from tszmq.core.request import Wakeable
from tszmq.errors import TszmqError
from tszmq.wire.base import UtilityResult

__all__ = ["Call", "Calls"]


class Call:
    """One call to one engine.

    Attributes:
        call_id: Ours; never used again.
        engine_index: Whom it was sent to.
        gate: Where its caller waits.
        result: The answer; None while there is none.
        error: Makes the exception that it ended with instead.
    """

    __slots__ = ("call_id", "engine_index", "error", "gate", "result")

    def __init__(self, call_id: int, engine_index: int, gate: Wakeable) -> None:
        self.call_id = call_id
        self.engine_index = engine_index
        self.gate = gate
        self.result: UtilityResult | None = None
        self.error: Callable[[], TszmqError] | None = None

    def ended(self) -> bool:
        """Whether there is an answer, or an error instead."""
        return self.result is not None or self.error is not None


class Calls:
    """Every unanswered call."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, Call] = {}

    def add(self, engine_index: int, gate: Wakeable) -> Call:
        """A new call, which is waited for from here on."""
        call = Call(next(self._ids), engine_index, gate)
        self._waiting[call.call_id] = call
        return call

    def answer(self, result: UtilityResult) -> list[Wakeable]:
        """An answer came; one that nobody waits for (any more) is noise."""
        call = self._waiting.pop(result.call_id, None)
        if call is None:
            return []
        call.result = result
        return [call.gate]

    def forget(self, call: Call) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(call.call_id, None)

    def unanswered(self, engine_index: int | None = None) -> list[Call]:
        """The calls to an engine, or all of them."""
        return [
            call
            for call in self._waiting.values()
            if engine_index is None or call.engine_index == engine_index
        ]

    @staticmethod
    def fail(calls: Iterable[Call], error: Callable[[], TszmqError]) -> list[Wakeable]:
        """End those that have not ended. Their callers forget them. Returns whom to wake."""
        failed = [call for call in calls if not call.ended()]
        for call in failed:
            call.error = error
        return [call.gate for call in failed]
