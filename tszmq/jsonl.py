"""Requests and results as JSON lines, for the command line.

A line is read, checked and answered on its own: what is wrong with one costs no other.
"""

from __future__ import annotations

import io
import json
import math
import os
import select
import stat
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

import attrs

from tszmq.types import Completion, SamplingParams, token_id_list

__all__ = [
    "InOrder",
    "LineError",
    "LineSource",
    "RequestLine",
    "error_line",
    "result_line",
    "write_all",
]

_CHUNK_BYTES = 1 << 16
_LONGEST_WAIT = 1e6  # seconds: poll() takes milliseconds as an int of 32 bits
_FIELDS = ("prompt_token_ids", "sampling_params", "request_id")
_PARAMETERS = {field.name for field in attrs.fields(SamplingParams)}


class LineError(ValueError):
    """A line that is no request.

    Attributes:
        request_id: The label on the line, where one could be read.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


@attrs.frozen
class RequestLine:
    """One request of the input."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None

    @classmethod
    def parse(cls, line: bytes, defaults: Mapping[str, Any]) -> RequestLine:
        """Read one line.

        Args:
            line: A JSON object with ``prompt_token_ids`` and, where wanted,
                ``sampling_params`` and ``request_id``.
            defaults: Sampling parameters for what the line does not say.

        Raises:
            LineError: The line is no such object; the text says what to mend.
        """
        fields = _json_object(line)
        label = fields.get("request_id")
        request_id = label if isinstance(label, str) else None
        if label is not None and request_id is None:
            raise LineError(f"request_id must be text or null, got {json.dumps(label)[:60]}")
        try:
            _refuse_unknown(fields, _FIELDS, "field")
            if "prompt_token_ids" not in fields:
                raise LineError("prompt_token_ids is missing")
            prompt = token_id_list(fields["prompt_token_ids"], what="prompt_token_ids")
            return cls(prompt, _sampling_params(fields.get("sampling_params"), defaults), label)
        except (TypeError, ValueError) as error:
            raise LineError(str(error), request_id) from None


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise LineError(f"a request must be a JSON object, got {line.strip()[:60]!r}")
    return fields


def _refuse_unknown(fields: Mapping[str, Any], known: Any, what: str) -> None:
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise LineError(f"unknown {what} {unknown[0][:60]!r}; there are {', '.join(sorted(known))}")


def _sampling_params(given: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise LineError(f"sampling_params must be an object, got {type(given).__name__}")
    _refuse_unknown(given, _PARAMETERS, "sampling parameter")
    chosen = {**defaults, **given}
    if isinstance(chosen.get("logit_bias"), dict):  # JSON has no other keys than text
        chosen["logit_bias"] = {_token(key): bias for key, bias in chosen["logit_bias"].items()}
    return SamplingParams(**chosen)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise LineError(f"logit_bias keys must be token ids, got {key[:60]!r}")
    return int(key)


def result_line(completion: Completion, request_id: str | None) -> str:
    """A result as one line of JSON, without its line end."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "engine_index": completion.engine_index,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    for name in ("stop_reason", "logprobs", "top_logprobs", "prompt_logprobs", "weight_versions"):
        value = getattr(completion, name)
        if value is not None:
            fields[name] = _finite(value)
    return json.dumps(fields, allow_nan=False)


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them, and many readers stop there."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def error_line(text: str, request_id: str | None) -> str:
    """A failure as one line of JSON, without its line end."""
    return json.dumps({"error": text, "request_id": request_id})


class InOrder:
    """Gives texts out by position, however they come in."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, str] = {}

    def put(self, position: int, text: str) -> list[str]:
        """Keep a text; what is next in order and complete is given out."""
        self._held[position] = text
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready

    @property
    def given(self) -> int:
        """How many were given out."""
        return self._next


def write_all(stream: TextIO, text: str) -> None:
    """Write and flush a text, also where the descriptor does not block.

    A pipe that is shared with other programs may not: what it has no room for raises then, and
    Python's streams throw away the rest of the text.

    Raises:
        OSError: The disk is full, nobody reads the pipe.
    """
    try:
        stream.flush()
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # it only lives in memory
        descriptor = -1
    if descriptor < 0 or os.get_blocking(descriptor):
        stream.write(text)
        stream.flush()
        return
    data = memoryview(text.encode(stream.encoding, stream.errors or "strict"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            _wait_for(descriptor, select.POLLOUT, None)


def _wait_for(descriptor: int, what: int, timeout: float | None) -> bool:
    """Whether it became readable or writable in time. Not ``select.select``, which knows the
    first 1,024 descriptors only."""
    poll = select.poll()
    poll.register(descriptor, what)
    wait = None if timeout is None else math.ceil(min(timeout, _LONGEST_WAIT) * 1000)
    return bool(poll.poll(wait))


class LineSource:
    """Lines of a file, pipe or terminal; waiting for the next one can be bounded.

    Reads the descriptor itself: a buffered file object may hold lines that ``select`` does
    not know of.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ready_always = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._lines: deque[bytes] = deque()
        self._pieces: list[bytes] = []
        self._at_end = False

    @property
    def ended(self) -> bool:
        """Whether every line was given out."""
        return self._at_end and not self._lines

    def next_line(self, timeout: float | None) -> bytes | None:
        """The next line without its end; None when there is none within ``timeout`` or ever."""
        while not self._lines and not self._at_end:
            if not (self._ready_always or _wait_for(self._descriptor, select.POLLIN, timeout)):
                return None
            self._read()
        return self._lines.popleft() if self._lines else None

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:  # another program that shares it was quicker
            return
        first, *others = chunk.split(b"\n")
        self._pieces.append(first)
        self._at_end = not chunk
        if others or self._at_end:
            self._lines.append(b"".join(self._pieces))
            self._lines.extend(others[:-1])
            self._pieces = others[-1:]
        if self._at_end and not self._lines[-1]:  # the file ended with a line end
            self._lines.pop()
