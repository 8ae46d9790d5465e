"""How requests end: what a terminal row means, and every way to end without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from tszmq.core.request import End, Request
from tszmq.errors import (
    ClientClosed,
    DeadlineExceeded,
    DecodeError,
    EngineDead,
    EnginePaused,
    RequestRejected,
    TokensLost,
    TszmqError,
)
from tszmq.types import Completion
from tszmq.wire.base import RowDetail

__all__ = [
    "answer_lost",
    "client_closed",
    "closed_by",
    "deadline_passed",
    "ending",
    "engine_died",
    "output_lost",
    "tokens_lost",
]


def ending(row: Request, reason: str) -> End:
    """What a terminal row means for its request."""
    if reason == "error" or (reason == "abort" and not row.tokens):
        return End(error=partial(_refusal, row.detail))
    return _finished(reason)


@lru_cache(64)
def _finished(reason: str) -> End:
    return End(finish_reason=reason)


def _refusal(detail: RowDetail | None, partial_result: Completion) -> TszmqError:
    """An abort that nobody asked for, without a token, is how TokenSpeed refuses a request."""
    index, came = partial_result.engine_index, partial_result.completion_tokens
    partial_or_none = partial_result if came else None
    if detail is None or detail.error_message is None:
        text = (
            f"engine {index} ended the request with an error after {came} tokens, as its log says"
            if came
            else f"engine {index} ended the request before its first token and gave no reason on "
            f"the wire ({partial_result.prompt_tokens} prompt tokens): it refused it, as its log "
            "says, or was paused, put to sleep or shut down"
        )
        return RequestRejected(text, partial=partial_or_none)
    kind = EnginePaused if detail.error_code == "engine_paused" else RequestRejected
    return kind(
        f"engine {index}: {detail.error_message:.500}",
        code=detail.error_code,
        retryable=detail.retryable,
        partial=partial_or_none,
    )


def tokens_lost(count: int, *, abort: bool) -> End:
    """The engine counts more tokens than came. ``abort``: it has not ended the request itself."""
    return End(error=partial(_tokens_lost, count), abort=abort)


def _tokens_lost(count: int, partial_result: Completion) -> TszmqError:
    return TokensLost(
        f"engine {partial_result.engine_index} counts {count} tokens of this request, "
        f"{partial_result.completion_tokens} came before a gap: a message was lost",
        partial=partial_result,
    )


def client_closed() -> TszmqError:
    """It was closed before, or while it was waited for."""
    return ClientClosed("the client was closed")


def closed_by(error: Callable[[], TszmqError]) -> End:
    """The client was closed, for that reason."""
    return End(error=partial(_closed, error), abort=True)


def _closed(error: Callable[[], TszmqError], partial_result: Completion) -> TszmqError:
    closed = error()
    if isinstance(closed, ClientClosed):
        closed.partial = partial_result
    return closed


def deadline_passed(timeout: float) -> End:
    """The request's ``timeout``, in seconds, has passed."""
    return End(error=partial(_deadline_exceeded, timeout), abort=True)


def _deadline_exceeded(timeout: float, partial_result: Completion) -> TszmqError:
    return DeadlineExceeded(
        f"the request did not finish within its timeout of {timeout} s; "
        f"{partial_result.completion_tokens} tokens had come",
        partial=partial_result,
    )


def engine_died(kind: type[EngineDead], index: int, reason: str) -> End:
    """Its engine is dead, or cannot be understood."""
    return End(error=partial(_engine_dead, kind, index, reason), abort=True)


def _engine_dead(
    kind: type[EngineDead], index: int, reason: str, partial_result: Completion
) -> TszmqError:
    return kind(
        f"engine {index} is dead: {reason}; {partial_result.completion_tokens} tokens of the "
        "request had come",
        engine_index=index,
        reason=reason,
        partial=partial_result,
    )


def output_lost(index: int, reason: str) -> End:
    """Something that its engine sent is gone."""
    return End(error=partial(_output_lost, index, reason), abort=True)


def _output_lost(index: int, reason: str, partial_result: Completion) -> TszmqError:
    return DecodeError(
        f"output of engine {index} was lost: {reason}; {partial_result.completion_tokens} tokens "
        "of the request had come",
        engine_index=index,
        reason=reason,
        partial=partial_result,
    )


def answer_lost(index: int, reason: str) -> TszmqError:
    """The same of a call's answer."""
    return DecodeError(
        f"output of engine {index} was lost: {reason}; the answer to the call may have been in it",
        engine_index=index,
        reason=reason,
    )
