"""Log-probabilities in vLLM's outputs: arrays of token ids and of logprobs, one row a token.

Column 0 is the token itself, the others are the most likely ones in order. Of sampled tokens it
is ``[ids, logprobs, ranks, boundaries]``, of the prompt's tokens the same with one more element
since 0.33; what follows the first two is not needed here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from tszmq.errors import DecodeError
from tszmq.wire.base import Ranking
from tszmq.wire.described import described
from tszmq.wire.vllm.arrays import FLOATS, INTEGERS, ArrayReader

__all__ = ["read_prompt_logprobs", "read_sampled_logprobs"]

_SHORTEST = 3
_TABLE = 2  # dimensions
_ITEM = 4  # bytes of an int32, and of a float32
_UNUSUAL = (TypeError, ValueError, IndexError, KeyError)

_Table = tuple[tuple[int, ...], tuple[float, ...], int]  # ids, logprobs, columns
_first_two = itemgetter(0, 1)


def read_sampled_logprobs(
    values: Sequence[object], counts: Sequence[int], arrays: ArrayReader
) -> tuple[list[list[float]], list[list[Ranking] | None]]:
    """The logprobs of new tokens, and what else was likely where there is more.

    Args:
        values: ``new_logprobs`` of some rows, as decoded.
        counts: New tokens of each.
        arrays: Of the message.

    Raises:
        DecodeError: One is not that, or has rows for other than all of its tokens or none.
    """
    table = _read_small(values, counts)
    if table is None:
        pairs = [_sampled(value, n, arrays) for value, n in zip(values, counts, strict=True)]
        return [logprobs for logprobs, _ in pairs], [top for _, top in pairs]
    _, logprobs, width = table
    sampled = logprobs[::width]
    rankings = _rankings(*table) if width > 1 else None
    columns: list[list[float]] = []
    tops: list[list[Ranking] | None] = []
    end = 0
    for count in counts:
        start, end = end, end + count
        columns.append(list(sampled[start:end]))
        tops.append(rankings[start:end] or None if rankings is not None else None)
    return columns, tops


def read_prompt_logprobs(value: object, arrays: ArrayReader) -> list[dict[int, float] | None]:
    """Those of the prompt's tokens: None for the first, which nothing predicts, then the rest.

    Raises:
        DecodeError: It is not that.
    """
    table = _read_table(value, "new_prompt_logprobs_tensors", arrays)
    return [None, *map(dict, _rankings(*table))]


def _read_small(values: Sequence[Any], counts: Sequence[int]) -> _Table | None:
    """The tables of all rows as one, when all are inline, of one width and of the usual types.

    What is read here, ``_read_table`` would read with the same result; None for anything else.
    """
    try:
        ids, logprobs = zip(*map(_first_two, values), strict=True)
        width = logprobs[0][1][1]
        if type(width) is not int or width < 1 or min(map(len, values)) < _SHORTEST:
            return None
        shapes = [[count, width] for count in counts]
        sizes = [_ITEM * width * count for count in counts]
        raw_ids = _joined(ids, "<i4", shapes, sizes)
        raw = _joined(logprobs, "<f4", shapes, sizes)
    except _UNUSUAL:
        return None
    if raw_ids is None or raw is None:
        return None
    items = len(raw) // _ITEM
    return struct.unpack(f"<{items}i", raw_ids), struct.unpack(f"<{items}f", raw), width


def _joined(
    items: Sequence[Any], dtype: str, shapes: list[list[int]], sizes: list[int]
) -> bytes | None:
    dtypes, all_shapes, data = zip(*items, strict=True)
    raw = b"".join(data)  # proves bytes
    fine = (
        dtypes.count(dtype) == len(items)
        and list(map(len, data)) == sizes
        and list(all_shapes) == shapes
        and set(map(type, chain.from_iterable(all_shapes))) == {int}
    )
    return raw if fine else None


def _sampled(
    value: object, num_tokens: int, arrays: ArrayReader
) -> tuple[list[float], list[Ranking] | None]:
    ids, logprobs, width = _read_table(value, "new_logprobs", arrays)
    if not logprobs:
        return [], None
    if len(logprobs) != num_tokens * width:
        raise DecodeError(
            "new_logprobs must have a row for each of the new tokens, got "
            f"{len(logprobs) // width} rows for {num_tokens} tokens"
        )
    top = _rankings(ids, logprobs, width) if width > 1 else None
    return list(logprobs[::width]), top


def _read_table(value: object, what: str, arrays: ArrayReader) -> _Table:
    """The ids, the logprobs, and how many columns both have."""
    if type(value) is not list or len(value) < _SHORTEST:
        raise DecodeError(
            f"{what} must be an array of at least {_SHORTEST}, got {described(value)}"
        )
    ids = arrays.read(value[0], f"the token ids of {what}")
    logprobs = arrays.read(value[1], f"the logprobs of {what}")
    if ids.kind not in INTEGERS or logprobs.kind not in FLOATS:
        raise DecodeError(f"{what} must be integers and floats, got {ids.kind} and {logprobs.kind}")
    shape = logprobs.shape
    # Without columns there could be any number of rows in no bytes at all.
    if ids.shape != shape or len(shape) != _TABLE or (shape[0] and not shape[1]):
        raise DecodeError(
            f"{what} must be two tables of one size, got {ids.shape} and {logprobs.shape}"
        )
    return ids.values, logprobs.values, shape[1]


def _rankings(ids: Sequence[int], logprobs: Sequence[float], width: int) -> list[Ranking]:
    """The pairs of each row."""
    pairs = zip(ids, logprobs, strict=True)
    # Taking the one iterator ``width`` times gives the pairs row by row.
    return list(zip(*[pairs] * width, strict=True)) if width else []
