"""What a terminal row, or a gap, means for its request."""

from __future__ import annotations

from functools import lru_cache, partial

from tszmq.core.request import End, Request
from tszmq.errors import EnginePaused, RequestRejected, TokensLost, TszmqError
from tszmq.types import Completion
from tszmq.wire.base import RowDetail

__all__ = ["ending", "tokens_lost"]


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
    if detail is None or detail.error_message is None:
        return RequestRejected(
            f"engine {partial_result.engine_index} refused the request and gave no reason on "
            f"the wire ({partial_result.prompt_tokens} prompt tokens): its log has it"
        )
    kind = EnginePaused if detail.error_code == "engine_paused" else RequestRejected
    return kind(
        f"engine {partial_result.engine_index}: {detail.error_message:.500}",
        code=detail.error_code,
        retryable=detail.retryable,
    )


def tokens_lost(count: int, partial_result: Completion) -> TszmqError:
    return TokensLost(
        f"engine {partial_result.engine_index} counts {count} tokens of this request, "
        f"{partial_result.completion_tokens} came before a gap: a message was lost",
        partial=partial_result,
    )
