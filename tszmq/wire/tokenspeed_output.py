"""TokenSpeed's output messages: one ``BatchTokenIDOutSlim`` array a scheduler step.

Elements, in order (0.1.1): the tag, rids, output_ids, finished_reasons, prompt_tokens,
completion_tokens, cached_tokens, output_token_logprobs_val, output_token_logprobs_idx; then
engine_index (from the 10-element era on), num_running, num_waiting, kv_active_pages and
kv_total_pages (from the 14-element era on). Later elements are skipped.

``read_batch`` checks one concern after the other and says what is wrong. The quick way for the
usual message is in ``tokenspeed_decoder``.
"""

from __future__ import annotations

import operator
from array import array
from itertools import chain
from math import nan
from operator import countOf
from typing import Any

from tszmq.codec import preview, unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import EngineBatch
from tszmq.wire.described import described
from tszmq.wire.startup import MAX_ENGINE_INDEX

__all__ = ["TAG", "engine_load", "read_batch"]

TAG = "BatchTokenIDOutSlim"
RUNNING = ""  # the finish reason of a row whose request goes on
_COLUMNS = (
    "rids",
    "output_ids",
    "finished_reasons",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
)
_FIRST_ERA = 1 + len(_COLUMNS)  # 9 elements
_INDEX_ERA = _FIRST_ERA + 1
_LOAD_ERA = _INDEX_ERA + 4
_LOAD = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")

_COUNT_LIMIT = 2**32
_SHOWN_ROWS = 8


def read_batch(data: bytes) -> EngineBatch:
    """A batch of any era, with or without logprobs.

    Raises:
        DecodeError: With the first thing that is wrong.
    """
    values = unpack(data, f"a {TAG} array")
    if not isinstance(values, list) or not values or values[0] != TAG:
        raise DecodeError(f"expected a {TAG} array, got {preview(data)}")
    if len(values) < _FIRST_ERA:
        raise DecodeError(
            f"{TAG} must have at least {_FIRST_ERA} elements, got {len(values)} in {preview(data)}"
        )
    columns = values[1:_FIRST_ERA]
    _require_columns(columns)
    rids, tokens, reasons, prompt, completion, cached, logprobs, logprob_ids = columns
    _require_type(str, rids, "rids")
    _require_type(list, tokens, "output_ids")
    _require_counts(_joined(tokens), "output_ids")
    _require_type(str, reasons, "finished_reasons")
    _require_counts(prompt, "prompt_tokens")
    _require_counts(completion, "completion_tokens")
    _require_counts(cached, "cached_tokens")
    return EngineBatch(
        engine_index=_engine_index(values),
        request_ids=rids,
        token_ids=tokens,
        finished={row: reason for row, reason in enumerate(reasons) if reason != RUNNING},
        completion_tokens=completion,
        cached_tokens=cached,
        logprobs=_logprobs(logprobs, logprob_ids, tokens),
        load=_load(values),
    )


def _require_columns(columns: list[Any]) -> None:
    """Every column is a list, and all have as many rows as ``rids``."""
    for name, column in zip(_COLUMNS, columns, strict=True):
        if not isinstance(column, list):
            raise DecodeError(f"{name} must be an array, got {type(column).__name__}")
        if len(column) != len(columns[0]):
            raise DecodeError(
                f"{name} must have as many rows as rids, got {len(column)} and {len(columns[0])}"
            )


def _require_type(expected: type, items: list[Any], name: str) -> None:
    if countOf(map(type, items), expected) != len(items):
        wrong = next(item for item in items if type(item) is not expected)
        raise DecodeError(f"{name} must hold {expected.__name__}, got {described(wrong)}")


def _require_counts(items: list[Any], name: str) -> None:
    """Ints in [0, 2**32), no bools: what token ids and token counts are."""
    _require_type(int, items, name)
    try:
        array("I", items)  # the quickest range check there is
    except OverflowError:
        wrong = min(items) if min(items) < 0 else max(items)
        raise DecodeError(f"{name} must be in [0, 2**32), got {wrong}") from None


def _joined(rows: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(rows))


def _logprobs(
    values: list[Any], token_ids: list[Any], tokens: list[list[int]]
) -> list[list[float]] | None:
    """The column of logprobs; None when no row has any.

    A row has none (its request did not ask) or one for each of its new tokens. Fewer it has
    where its first token came from a prefill engine that sent no logprob beside it: NaN then.
    """
    _require_type(list, values, "output_token_logprobs_val")
    _require_type(list, token_ids, "output_token_logprobs_idx")
    have, ids, new = (list(map(len, column)) for column in (values, token_ids, tokens))
    if have != ids or any(map(operator.gt, have, new)):
        raise DecodeError(
            "a row must have a logprob for every token at most, got rows of "
            f"{have[:_SHOWN_ROWS]} values and {ids[:_SHOWN_ROWS]} ids for {new[:_SHOWN_ROWS]} "
            f"tokens in a batch of {len(new)}"
        )
    numbers = _joined(values)
    _require_counts(_joined(token_ids), "output_token_logprobs_idx")
    if not numbers:
        return None
    if countOf(map(type, numbers), float) != len(numbers):
        # The wire lets an encoder write a whole number as an int.
        _require_type(
            float, [n for n in numbers if type(n) is not int], "output_token_logprobs_val"
        )
        values = [list(map(float, row)) for row in values]
    if have == new:
        return values
    return [
        [nan] * (count - len(row)) + row if row else row
        for row, count in zip(values, new, strict=True)
    ]


def _engine_index(values: list[Any]) -> int | None:
    """The engine that the batch names; older senders name none."""
    if len(values) < _INDEX_ERA:
        return None
    index = values[_FIRST_ERA]
    if type(index) is not int or not 0 <= index <= MAX_ENGINE_INDEX:
        raise DecodeError(
            f"engine_index must be an int in [0, {MAX_ENGINE_INDEX}], got {described(index)}"
        )
    return index


def _load(values: list[Any]) -> EngineLoad | None:
    """The engine's load; None from older senders, and before the engine's first sample."""
    if len(values) < _LOAD_ERA:
        return None
    load = values[_INDEX_ERA:_LOAD_ERA]
    for name, value in zip(_LOAD, load, strict=True):
        if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
            raise DecodeError(f"{name} must be an int in [0, 2**32), got {described(value)}")
    return engine_load(*load)


def engine_load(running: int, waiting: int, active: int, total: int) -> EngineLoad | None:
    """The four counts as a load; None before the engine's first sample (no pages at all)."""
    if total == 0:
        return None
    # num_running counts every admitted request, those still waiting included.
    return EngineLoad(running, waiting, min(active / total, 1.0), max(running, waiting))
