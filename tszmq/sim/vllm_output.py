"""vLLM's ``EngineCoreOutputs`` as the engine writes it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import attrs

from tszmq.codec import pack
from tszmq.sim.request import SimRequest, SimStep, expected_logprobs

__all__ = ["ABORT", "ERROR", "Extras", "Writer", "finish_row"]

STOP, LENGTH, ABORT, ERROR = range(4)
_CODES = {"": None, "stop": STOP, "length": LENGTH, "abort": ABORT}
_RAW_VIEW = 3  # extension type of an array's bytes
_INLINE_BELOW = 256  # bytes; larger arrays travel as frames of their own
_ROW_HEAD = b"\xdc\x00\x13"  # an array of 19


@attrs.define(eq=False)
class Extras:
    """What a request has beyond the scheduler's needs: the ``tag`` of its ``SimRequest``.

    Attributes:
        queued: When it came, on the monotonic clock.
        eos: Its end token; stopping there has no stop reason.
        top: Alternatives beside the sampled token, None for no logprobs.
        prompt_top: The same for the prompt's tokens.
    """

    queued: float
    eos: int | None = None
    top: int | None = None
    prompt_top: int | None = None


def finish_row(request_id: str, code: int, error: dict[str, Any] | None = None) -> list[Any]:
    """A row without tokens that ends a request."""
    return [
        request_id, [], None, None, None, code, None, None, None, None, None, None, None, 0,
        None, None, None, None, error,
    ]  # fmt: skip


class Writer:
    """Writes the messages of one engine.

    Args:
        index: The engine index.
        vocab_size: Alternatives are below it.
        cache_page: Tokens a page of the prefix cache, 0 without one.
    """

    def __init__(self, index: int, vocab_size: int, cache_page: int = 0) -> None:
        self._index = index
        self._vocab_size = vocab_size
        self._cache_page = cache_page
        self._logprobs = expected_logprobs(256)
        self.weights = "default"

    def batch(self, step: SimStep, stats: dict[str, Any]) -> list[bytes]:
        """The message of a step: rows, statistics, and frames of large arrays."""
        top = max((self._width(request) for request in step.requests), default=-1)
        rows: list[Any] = []
        aux: list[bytes] = []
        arrays = False
        for request, tokens, reason, made in zip(
            step.requests, step.tokens, step.reasons, step.completion, strict=True
        ):
            extras = request.tag
            assert isinstance(extras, Extras)
            first = made == len(tokens)
            row = [
                request.request_id, tokens, None, None, None, _CODES[reason], None, None, None,
                None, None, None, None, 0, None, None, None, None, None,
            ]  # fmt: skip
            if reason == "stop" and tokens[-1] != extras.eos:
                row[6] = tokens[-1]
            if first:
                self._describe_start(row, request, extras)
            if extras.top is not None or (first and extras.prompt_top is not None):
                rows.append(self._row_with_arrays(row, request, made, top, aux))
                arrays = True
            else:
                rows.append(row)
        message = [self._index, rows, stats, time.monotonic(), None, None, None, None, self.weights]
        return [_join(message) if arrays else pack(message), *aux]

    def _describe_start(self, row: list[Any], request: SimRequest, extras: Extras) -> None:
        page, prompt, cached = self._cache_page, request.prompt_tokens, request.cached_tokens
        row[7] = [
            {"type": 1, "timestamp": extras.queued},
            {"type": 2, "timestamp": time.monotonic()},
        ]
        row[11] = {
            "num_prompt_tokens": prompt,
            "num_computed_tokens": prompt - cached,
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": prompt // page * page - cached if page else 0,
        }

    def ends(self, rows: list[list[Any]]) -> list[bytes]:
        """Rows that end requests, and their ids as finished."""
        return self._single(1, rows, 5, [row[0] for row in rows])

    def stats_only(self, stats: dict[str, Any]) -> list[bytes]:
        """Statistics without rows, for a frontend to see that the engine is idle."""
        return self._single(2, stats, 8, self.weights)

    def utility(self, call_id: int, failure: str | None, result: Any) -> list[bytes]:
        """The answer to a call: a failure's text, or a result."""
        answer = [call_id, failure, None if failure is not None else [None, result]]
        return self._single(4, answer)

    def wave_complete(self, wave: int) -> list[bytes]:
        """The rank parks after this wave."""
        return self._single(6, wave)

    def _single(self, *fields: Any) -> list[bytes]:
        message: list[Any] = [self._index, [], None, time.monotonic(), *[None] * 5]
        for place, value in zip(fields[::2], fields[1::2], strict=True):
            message[place] = value
        return [pack(message, int_keys=True)]

    def _row_with_arrays(
        self, row: list[Any], request: SimRequest, made: int, top: int, aux: list[bytes]
    ) -> bytes:
        """The row packed; ``top`` is the batch's: every row that asked gets as many columns."""
        extras = request.tag
        assert isinstance(extras, Extras)
        parts = [pack(value) for value in row]
        if extras.top is not None:
            start = made - len(row[1])
            if made > len(self._logprobs):
                self._logprobs = expected_logprobs(2 * made)
            best = self._logprobs[start:made]
            values = self._values(row[1], best, top, 0.5)
            parts[2] = _logprobs(values, ("<i4", "<f4", "<i8"), 1, aux)
        if extras.prompt_top is not None and made == len(row[1]) and request.prompt_tokens > 1:
            tokens = request.prompt[1:]
            values = self._values(
                tokens, [-0.25] * len(tokens), self._columns(extras.prompt_top), 0.25
            )
            parts[3] = _logprobs(values, ("int32", "float32", "int64"), 2, aux)
        return _ROW_HEAD + b"".join(parts)

    def _width(self, request: SimRequest) -> int:
        extras = request.tag
        assert isinstance(extras, Extras)
        return -1 if extras.top is None else self._columns(extras.top)

    def _columns(self, top: int) -> int:
        """Alternatives that ``top`` asks for; -1 is the whole vocabulary."""
        return self._vocab_size if top == -1 else min(top, self._vocab_size)

    def _values(
        self, tokens: Sequence[int], best: Sequence[float], top: int, gap: float
    ) -> tuple[int, int, bytes, bytes, bytes]:
        """Rows, columns, and the bytes of ids, logprobs and ranks; column 0 is the token itself."""
        vocab = self._vocab_size
        width = top + 1
        ids = array("i", ((t + j) % vocab for t in tokens for j in range(width)))
        logprobs = array("f", (b - gap * j for b in best for j in range(width)))
        ranks = array("q", [1]) * len(tokens)
        return len(tokens), width, ids.tobytes(), logprobs.tobytes(), ranks.tobytes()


def _logprobs(
    values: tuple[int, int, bytes, bytes, bytes],
    dtypes: tuple[str, str, str],
    nils: int,
    aux: list[bytes],
) -> bytes:
    rows, width, ids, logprobs, ranks = values
    shapes = ([rows, width], [rows, width], [rows])
    parts = [
        _ndarray(dtype, shape, raw, aux)
        for dtype, shape, raw in zip(dtypes, shapes, (ids, logprobs, ranks), strict=True)
    ]
    return bytes((0x90 + 3 + nils,)) + b"".join(parts) + b"\xc0" * nils


def _ndarray(dtype: str, shape: list[int], raw: bytes, aux: list[bytes]) -> bytes:
    if len(raw) < _INLINE_BELOW:
        data = bytes((0xC7, len(raw), _RAW_VIEW)) + raw
    else:
        aux.append(raw)
        data = pack(len(aux))  # the message itself is frame 0
    return b"\x93" + pack(dtype) + pack(shape) + data


def _join(message: list[Any]) -> bytes:
    """Pack a message some of whose rows are packed already."""
    rows = [row if isinstance(row, bytes) else pack(row) for row in message[1]]
    head = b"\xdd" + len(rows).to_bytes(4, "big")
    rest = [pack(value) for value in message[2:]]
    return b"".join((bytes((0x90 + len(message),)), pack(message[0]), head, *rows, *rest))
