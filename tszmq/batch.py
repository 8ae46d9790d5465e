"""JSON lines in, JSON lines out in the same order, in bounded memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TextIO

import attrs

from tszmq.jsonl import (
    InOrder,
    LineError,
    LineSource,
    RequestLine,
    error_line,
    result_line,
    write_all,
)
from tszmq.types import Completion, SamplingParams, TokenIds

__all__ = ["Batch"]

LOOKAHEAD = 16
"""Results held for a slow earlier one, as a multiple of the requests in flight."""
INPUT_PATIENCE = 0.05
"""Seconds that results may wait for another line of the input."""
LINE_PATIENCE = 0.002
"""Seconds to wait for another line in any case: the writer may be about to write it."""


class BulkClient(Protocol):
    """What is used of a ``Client``."""

    def as_completed(
        self,
        prompts: Iterable[TokenIds],
        sampling_params: Iterable[SamplingParams | None],
        *,
        timeout: float | None,
        max_inflight: int | None,
        errors: Literal["return"],
    ) -> Iterable[tuple[int, Any]]: ...


@attrs.frozen
class _Submitted:
    """A request that the client has: its place in the output, and what its line said."""

    position: int
    line: RequestLine


class Batch:
    """Answers the requests of an input.

    The client pulls requests as it has room for them. It is given them in rounds: when one
    slow request holds too many results back, or the input has nothing for the moment, a round
    ends, and the next one starts when all that was submitted is done.

    Args:
        lines: The input.
        output: Gets one line a request, as soon as those before it are written.
        max_tokens: For lines that say nothing of it; None leaves it to ``SamplingParams``.
        max_inflight: Unfinished requests at the most.
        timeout: Seconds for the whole input, or None. What is read after them fails; an input
            that has no more just then is taken to have ended.
        progress: Is called with how many requests are done and how many of them failed.
    """

    def __init__(
        self,
        lines: LineSource,
        output: TextIO,
        *,
        max_tokens: int | None,
        max_inflight: int,
        timeout: float | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self.done = 0
        self.failed = 0
        self._lines = lines
        self._output = output
        self._defaults: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._max_inflight = max_inflight
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._progress = progress
        self._results = InOrder()
        self._unfinished: dict[int, _Submitted] = {}  # by the client's number in this round
        self._last_result = 0.0
        self._read = 0  # requests read, good and bad
        self._line_number = 0

    def run(self, client: BulkClient) -> None:
        """Answer every line."""
        while not self._lines.ended and self._time_left() > 0:
            prompts, params = itertools.tee(self._round())
            time_left = self._time_left()
            for index, result in client.as_completed(
                (line.prompt_token_ids for line in prompts),
                (line.sampling_params for line in params),
                timeout=None if time_left == math.inf else time_left,
                max_inflight=self._max_inflight,
                errors="return",
            ):
                self._last_result = time.monotonic()
                self._finish(result, self._unfinished.pop(index))
        while (request := self._next_request()) is not None:
            text = "DeadlineExceeded: the timeout passed before it was sent"
            self._fail(text, request.position, request.line.request_id)

    def _round(self) -> Iterator[RequestLine]:
        """Requests for one call of the client, which numbers them from 0."""
        for number in itertools.count():
            request = self._next_request()
            if request is None:
                return
            self._unfinished[number] = request
            yield request.line

    def _next_request(self) -> _Submitted | None:
        """The next good line; None when there is none, or no room for its result."""
        while self._read - self._results.given < LOOKAHEAD * self._max_inflight:
            line = self._lines.next_line(self._patience())
            if line is None:
                return None
            self._line_number += 1
            if not line.strip():
                continue
            position = self._read
            self._read += 1
            try:
                return _Submitted(position, RequestLine.parse(line, self._defaults))
            except LineError as error:
                self._fail(f"line {self._line_number}: {error}", position, error.request_id)
        return None

    def _patience(self) -> float | None:
        """How long to wait for a line: results that came meanwhile are not looked at."""
        patience = self._time_left()
        if self._unfinished:
            left = self._last_result + INPUT_PATIENCE - time.monotonic()
            patience = min(patience, max(LINE_PATIENCE, left))
        return None if patience == math.inf else patience

    def _finish(self, result: Completion | BaseException, request: _Submitted) -> None:
        if isinstance(result, BaseException):
            text = f"{type(result).__name__}: {result}"
            self._fail(text, request.position, request.line.request_id)
        else:
            self._write(result_line(result, request.line.request_id), request.position)

    def _fail(self, text: str, position: int, request_id: str | None) -> None:
        self.failed += 1
        self._write(error_line(text, request_id), position)

    def _write(self, line: str, position: int) -> None:
        self.done += 1
        ready = self._results.put(position, line)
        if ready:
            write_all(self._output, "\n".join(ready) + "\n")
        self._progress(self.done, self.failed)

    def _time_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
