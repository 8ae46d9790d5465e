"""A TokenSpeed batch of 16 rows or more: its elements, decoded but for those that are known.

The ids of rows that were there before, columns that hold nothing, and columns of one value a row
are left out of what is decoded, or replaced by a placeholder there; that each stood where it has
to is seen by what comes out beside the placeholders.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from tszmq.codec import HOLE, PLACEHOLDER, unpack_pieces
from tszmq.errors import DecodeError
from tszmq.wire.base import NONE_ENDS
from tszmq.wire.columns import FLOAT_ROW, rare_texts, single_floats, single_ints
from tszmq.wire.tokenspeed_known import CUT_ZEROS, HEADER, KnownRows, Shape, Span
from tszmq.wire.tokenspeed_output import TAG

__all__ = ["HEAD", "IDS", "Single", "find_single", "unpack_large", "unpack_single"]

HEAD = b"\x9e\xb3" + TAG.encode()
"""How a usual message starts: an array of 14, the tag."""
IDS = len(HEAD) + HEADER
"""Where the first id is, in a large batch."""
_ELEMENTS = 14
_HOLES = [HOLE * columns for columns in range(4)]
_PLACEHOLDERS = [[PLACEHOLDER] * columns for columns in range(7)]

Single: TypeAlias = "tuple[array[int], array[float] | None, Mapping[int, str], int, int, Span]"
"""What is known of a batch of one token a row without decoding it: its tokens; logprobs, if
there are any; the rows that end; where the tokens start; where the known rows' prompt tokens end;
columns before the tail that are not needed."""


def find_single(data: bytes, shape: Shape, known: KnownRows, cut: Span) -> Single | None:
    """A batch that starts with known rows, if it has one token in each row, and a logprob for
    each or for none. That all stands where it has to is seen when the rest is decoded.

    Args:
        data: The message.
        shape: Of its columns.
        known: The rows.
        cut: The columns before its tail that hold nothing.
    """
    rows, header = shape.rows, shape.header
    start = IDS + len(known.ids) + (rows - len(known.rids)) * known.size
    end = data.find(header, start + HEADER + 2 * rows)
    if end < 0 or not data.startswith(header, start):
        return None
    column = data[start:end]
    tokens = single_ints(column[HEADER:], rows)
    if tokens is None:
        return None
    logprobs = None
    if not cut[2]:
        ids = shape.find(data, column)  # they have the tokens beside them again
        first = ids - rows * FLOAT_ROW - HEADER
        if first < end or not data.startswith(header, first):
            return None
        logprobs = single_floats(data[first + HEADER : ids], rows)
        if logprobs is None:
            return None
        cut = first, ids + len(column), 2
    prompts = header + known.prompts
    finished = NONE_ENDS
    if data.startswith(shape.running, end):
        end += len(shape.running)
    else:
        first, end = end + HEADER, data.find(prompts, end + HEADER + rows)
        ends = rare_texts(data[first:end], rows)
        if ends is None:
            return None
        finished = ends
    if not data.startswith(prompts, end):
        return None
    return tokens, logprobs, finished, start, end + len(prompts), cut


def unpack_single(
    data: bytes, shape: Shape, known: KnownRows, single: Single
) -> tuple[list[Any], list[int]]:
    """The values of a batch that starts with known rows and has one token in each. Tokens, and
    what is known, are not decoded again.

    Returns:
        The values, but for tokens and finish reasons; and the prompt tokens of rows that are new.

    Raises:
        DecodeError: As ``unpack_large``.
    """
    _, _, _, start, prompts_end, (stop, tail, holes) = single
    joined, ids = shape.rows - len(known.rids), IDS + len(known.ids)
    values: list[Any] = unpack_pieces(
        (
            _head(_ELEMENTS + 2 * joined) if joined else HEAD,
            HOLE,
            data[ids:start],
            _HOLES[3],  # tokens, finish reasons, known prompt tokens
            data[prompts_end:stop],
            _HOLES[holes],
            data[tail:],
        )
    )
    at = 2 + joined
    new_rids, between, new_prompt = (
        values[2:at],
        values[at : at + 3],
        values[at + 3 : at + 3 + joined],
    )
    values[1 : at + 3 + joined] = [
        known.rids + new_rids if joined else known.rids,
        None,
        None,
        known.prompt + new_prompt if joined else known.prompt,
    ]
    "".join(new_rids)  # proves str
    if between + values[9 - holes : 9] != _PLACEHOLDERS[3 + holes]:
        raise DecodeError("what was left out is something else")
    if holes == CUT_ZEROS:
        values[6] = shape.zeros
    return values, new_prompt


def unpack_large(data: bytes, shape: Shape, known: KnownRows | None, cut: Span) -> list[Any]:
    """The values of a batch of 16 rows or more.

    Columns that hold nothing are cut out before decoding: empty logprobs are two lists a row,
    more than all the rest, and enough of them start a garbage collection in every message. Ids
    that are known are not decoded again.

    Args:
        data: The message.
        shape: Of its columns.
        known: The rows that it starts with, if any.
        cut: The columns before its tail that hold nothing.

    Raises:
        DecodeError: It is not one whole message, or something left out is not where it should be.
    """
    stop, tail, holes = cut
    if known is None:
        values: list[Any] = unpack_pieces((data[:stop], _HOLES[holes], data[tail:]))
    else:
        joined = shape.rows - len(known.rids)
        ids = IDS + len(known.ids)
        values = unpack_pieces(
            (_head(_ELEMENTS + joined), HOLE, data[ids:stop], _HOLES[holes], data[tail:])
        )
        new = values[2 : 2 + joined]
        "".join(new)  # proves str
        values[1 : 2 + joined] = [known.rids + new if joined else known.rids]
    if values[9 - holes : 9] != _PLACEHOLDERS[holes]:
        raise DecodeError("what was left out is something else")
    if holes == CUT_ZEROS:
        values[6] = shape.zeros
    return values


@lru_cache(64)
def _head(elements: int) -> bytes:
    """The start of a message of so many elements, up to its ids."""
    return b"\xdc" + elements.to_bytes(2, "big") + HEAD[1:]
