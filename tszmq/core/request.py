"""One request's local half: what arrived for it, and how it ended.

Who writes what: everything here is written under the lock of the state that holds the
request, but ``sent``, which the thread that sends keeps. A reader in another thread may
read without that lock in this order: ``end`` first, then ``visible``, then the arrays up to
``visible``; they only ever grow, and ``end`` is set last.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Protocol, TypeVar

import attrs

from tszmq.errors import TszmqError
from tszmq.types import Completion, TokenChunk
from tszmq.wire.base import RowDetail

__all__ = ["End", "Group", "Request", "Wakeable"]

_T = TypeVar("_T")


class Wakeable(Protocol):
    """Where somebody waits; woken after the lock is released."""

    def wake(self) -> None:
        """Wake whoever waits there now. Any thread; never blocks."""


@attrs.frozen(eq=False)
class End:
    """How a request ended: with a finish reason, or with an error.

    Attributes:
        finish_reason: Of an ordinary end or an abort of ours.
        error: Makes a new exception from what had come, so that every raise has its own.
        abort: Whether the engine has to be told: it may still be generating.
    """

    finish_reason: str | None = None
    error: Callable[[Completion], TszmqError] | None = None
    abort: bool = False


ABORTED = End(finish_reason="abort", abort=True)


class Group:
    """Requests that one thread drives: what ended, or got tokens, since it last looked.

    Attributes:
        gate: Where that thread waits.
        finished: Requests that ended; it takes them out with ``popleft``.
        touched: Streaming requests with new tokens, in order of arrival; one may be there twice.
        wake_at: How many finished requests are worth waking it for.
        failed: One ended with an error since it last looked.
        aborts: How many times all batches had been aborted when this one began.
    """

    __slots__ = ("aborts", "failed", "finished", "gate", "touched", "wake_at")

    def __init__(self, gate: Wakeable, aborts: int = 0) -> None:
        self.gate = gate
        self.aborts = aborts
        self.finished: deque[Request] = deque()
        self.touched: deque[Request] = deque()
        self.wake_at = 1
        self.failed = False

    def is_worth_waking(self) -> bool:
        """Whether enough has finished to wake its thread."""
        return self.failed or len(self.finished) >= self.wake_at


class Request:
    """A request from admission to its end.

    Attributes:
        wire_id: Its id on the wire: ours, unique for ever.
        label: The caller's ``request_id``, repeated on results.
        prompt_tokens: Length of its prompt.
        engine_index: Where it was placed; -1 before admission.
        tokens: Token ids so far, four bytes each.
        logprobs: One double a token, or None when not asked for.
        top_limit: How many of the most likely tokens it asked for beside the sampled one.
        streaming: Somebody reads chunks: ``visible`` is kept and ``gate`` woken at each.
        visible: Tokens that readers may take.
        doubt: Why some of its output may be missing, or None.
        end: None while unfinished.
    """

    __slots__ = (
        "__weakref__",
        "admitted",
        "cached_tokens",
        "created",
        "detail",
        "doubt",
        "end",
        "ended",
        "engine_index",
        "first",
        "gate",
        "group",
        "label",
        "logprobs",
        "position",
        "prompt_tokens",
        "sent",
        "streaming",
        "tokens",
        "top_limit",
        "top_logprobs",
        "versions",
        "visible",
        "wire_id",
    )

    def __init__(
        self,
        wire_id: str,
        prompt_tokens: int,
        gate: Wakeable,
        now: float,
        *,
        label: str | None = None,
        logprobs: bool = False,
        top_limit: int = 0,
        streaming: bool = False,
        group: Group | None = None,
        position: int = 0,
    ) -> None:
        self.wire_id = wire_id
        self.label = label
        self.prompt_tokens = prompt_tokens
        self.engine_index = -1
        self.tokens = array("I")
        self.logprobs: array[float] | None = array("d") if logprobs else None
        self.top_limit = top_limit
        self.top_logprobs: list[dict[int, float]] | None = None
        self.versions: list[tuple[str, int]] | None = None
        self.detail: RowDetail | None = None
        self.cached_tokens = 0
        self.streaming = streaming
        self.visible = 0
        self.gate = gate
        self.group = group
        self.position = position
        self.created = now
        self.admitted = now
        self.sent = False
        self.first: float | None = None
        self.ended = now
        self.doubt: str | None = None
        self.end: End | None = None

    @property
    def aborted(self) -> bool:
        """Whether it ended in a way that its engine has to be told."""
        return self.end is not None and self.end.abort

    def publish(self) -> None:
        """Let readers see what has been stored."""
        count = len(self.tokens)
        if self.logprobs is not None:
            count = min(count, len(self.logprobs))
        self.visible = count

    def note_version(self, version: str, start: int) -> None:
        """Its tokens from there on are made by this version of the weights."""
        versions = self.versions or []
        if versions and versions[-1][1] == start:  # of the one before, none came
            versions.pop()
        if not versions or versions[-1][0] != version:
            versions.append((version, start))
        self.versions = versions

    def _weight_versions(self, stop: int) -> list[tuple[str, int, int]] | None:
        if self.versions is None:
            return None
        starts = [start for _, start in self.versions]
        spans = zip(self.versions, [*starts[1:], stop], strict=True)
        return [(version, start, end) for (version, start), end in spans if start < end]

    def chunk(self, start: int, finish_reason: str | None) -> TokenChunk:
        """What readers may take from ``start`` on; without the lock, as the head of this file
        says."""
        stop = self.visible
        logprobs, top = self.logprobs, self.top_logprobs
        return TokenChunk(
            request_id=self.label,
            token_ids=self.tokens[start:stop].tolist(),
            finish_reason=finish_reason,
            logprobs=None if logprobs is None else logprobs[start:stop].tolist(),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=stop,
            cached_tokens=self.cached_tokens,
            stop_reason=self.detail.stop_reason if finish_reason and self.detail else None,
            top_logprobs=None if top is None else top[start:stop],
        )

    def completion(self, finish_reason: str | None, now: float) -> Completion:
        """What came, as the caller gets it; under the lock, or after the end."""
        tokens = self.tokens.tolist()
        detail = self.detail
        return Completion(
            request_id=self.label,
            token_ids=tokens,
            finish_reason=finish_reason,
            logprobs=None if self.logprobs is None else self.logprobs.tolist(),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(tokens),
            cached_tokens=self.cached_tokens,
            engine_index=self.engine_index,
            queued=self.admitted - self.created,
            first_token=None if self.first is None else self.first - self.admitted,
            finished=now - self.admitted,
            stop_reason=detail.stop_reason if detail else None,
            top_logprobs=_copied(self.top_logprobs),
            prompt_logprobs=_copied(detail.prompt_logprobs if detail else None),
            weight_versions=self._weight_versions(len(tokens)),
            kv_transfer_params=copy(detail.kv_transfer_params) if detail else None,
        )

    def result(self) -> Completion:
        """The whole result, or the error it ended with; only after ``end`` is set.

        Raises:
            TszmqError: As the request ended; a new exception at each call.
        """
        end = self.end
        assert end is not None
        if end.error is not None:
            raise end.error(self.completion(None, self.ended))
        return self.completion(end.finish_reason, self.ended)


def _copied(column: list[_T] | None) -> list[_T] | None:
    """Every result is the caller's own."""
    return None if column is None else list(column)
