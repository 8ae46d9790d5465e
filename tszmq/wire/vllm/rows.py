"""What few outputs of a vLLM message have: an end, logprobs, a prompt's statistics, an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tszmq.errors import DecodeError
from tszmq.wire.base import EngineBatch, RowDetail
from tszmq.wire.described import described
from tszmq.wire.vllm.arrays import ArrayReader
from tszmq.wire.vllm.logprobs import read_prompt_logprobs, read_sampled_logprobs
from tszmq.wire.vllm.utility import holds_opaque

__all__ = ["read_rare"]

_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_Details = defaultdict[int, RowDetail]
_Cells = list[tuple[int, Any]]


def read_rare(
    batch: EngineBatch,
    rows: list[int],
    columns: Sequence[Sequence[Any]],
    arrays: ArrayReader,
) -> None:
    """Fill in what a batch does not have from its usual elements.

    Args:
        batch: With ids and tokens, and every request running.
        rows: Those that have something.
        columns: Their new_logprobs, new_prompt_logprobs_tensors, finish_reason, stop_reason,
            kv_transfer_params, prefill_stats and error.
        arrays: Of the message.

    Raises:
        DecodeError: One of them is not what it should be.
    """
    logprobs, prompt_logprobs, finishes, stops, transfers, prefills, errors = (
        _present(rows, column) for column in columns
    )
    details: _Details = defaultdict(RowDetail)
    if logprobs:
        _read_logprobs(batch, details, logprobs, arrays)
    for row, value in prompt_logprobs:
        details[row].prompt_logprobs = read_prompt_logprobs(value, arrays)
    batch.finished = {row: _finish_reason(value) for row, value in finishes}
    for row, value in stops:
        details[row].stop_reason = _stop_reason(value)
    for row, value in transfers:
        details[row].kv_transfer_params = _transfer_params(value)
    for row, value in prefills:
        cached = _cached_tokens(value)
        if cached:
            details[row].cached_tokens = cached
    for row, value in errors:
        _read_error(value, details[row])
    if details:
        batch.details = dict(details)


def _present(rows: list[int], column: Sequence[Any]) -> _Cells:
    """The rows that have something in this column, and what."""
    return [cell for cell in zip(rows, column, strict=True) if cell[1] is not None]


def _read_logprobs(
    batch: EngineBatch, details: _Details, cells: _Cells, arrays: ArrayReader
) -> None:
    counts = [len(batch.token_ids[row]) for row, _ in cells]
    logprobs, tops = read_sampled_logprobs([value for _, value in cells], counts, arrays)
    if any(logprobs):
        batch.logprobs = [[] for _ in batch.request_ids]
        for (row, _), numbers in zip(cells, logprobs, strict=True):
            batch.logprobs[row] = numbers
    for (row, _), top in zip(cells, tops, strict=True):
        if top is not None:
            details[row].top_logprobs = top


def _finish_reason(code: object) -> str:
    """The neutral word; a code of a later version is an end as well, of a kind not known here."""
    if type(code) is not int:
        raise DecodeError(f"finish_reason must be an int or nil, got {described(code)}")
    if 0 <= code < len(_FINISH_REASONS):
        return _FINISH_REASONS[code]
    return f"unknown({code})"


def _stop_reason(value: object) -> int | str:
    if type(value) is int or type(value) is str:
        return value
    raise DecodeError(f"stop_reason must be an int, text or nil, got {described(value)}")


def _transfer_params(value: object) -> dict[str, Any] | None:
    """None where they hold pickled objects: the tokens beside them are wanted all the same."""
    if type(value) is not dict or not set(map(type, value)) <= {str}:
        raise DecodeError(f"kv_transfer_params must be a map from text, got {described(value)}")
    return None if holds_opaque(value) else value


def _cached_tokens(stats: object) -> int:
    """Prompt tokens that needed no computing."""
    if type(stats) is not dict:
        raise DecodeError(f"prefill_stats must be a map or nil, got {described(stats)}")
    cached = stats.get("num_cached_tokens", 0)
    if type(cached) is not int or cached < 0:
        raise DecodeError(
            f"num_cached_tokens must be an int of at least 0, got {described(cached)}"
        )
    return cached


def _read_error(error: object, detail: RowDetail) -> None:
    """Why the engine refused the request: a code, words, and whether to try again."""
    if type(error) is not dict:
        raise DecodeError(f"error must be a map or nil, got {described(error)}")
    code, message = error.get("code"), error.get("message")
    retryable = error.get("retryable", False)
    if type(code) is not str or type(message) is not str or type(retryable) is not bool:
        raise DecodeError(
            "error must have a code, a message and retryable, got "
            f"{described(code)}, {described(message)} and {described(retryable)}"
        )
    detail.error_code, detail.error_message, detail.retryable = code, message, retryable
