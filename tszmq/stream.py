"""The consuming half of one request: an iterator that blocks, and aborts when it is left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NoReturn

from tszmq.checks import shown
from tszmq.core.request import ABORTED, End, Request
from tszmq.errors import TszmqError
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Settle
from tszmq.net.session import Session
from tszmq.net.submit import withdraw
from tszmq.ownership import Level, lock
from tszmq.prepare import check_timeout
from tszmq.types import Completion, TokenChunk

__all__ = ["RequestStream"]


class RequestStream:
    """Chunks of one request, made by ``Client.stream``.

    Iterating blocks until there is something. A reader that lags gets one chunk with all that
    came meanwhile; several threads may iterate, and each chunk goes to one of them. Leaving
    the ``with`` block, ``close()``, dropping the last reference and an exception such as Ctrl-C
    in ``next()`` or ``result()`` abort the request if it is unfinished, once.

    Any thread may call any method.
    """

    def __init__(self, session: Session, request: Request, gate: Gate) -> None:
        self._session = session
        self._request = request
        self._gate = gate
        self._readers = lock(Level.READERS)
        self._taken = 0
        self._over = False  # closed, or its last chunk was taken

    @property
    def request_id(self) -> str | None:
        """The caller's label."""
        return self._request.label

    @property
    def engine_index(self) -> int:
        """The engine that serves it."""
        return self._request.engine_index

    @property
    def finished(self) -> bool:
        """Whether the request has ended, whatever was read of it."""
        return self._request.end is not None

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> TokenChunk:
        """The next chunk; blocks.

        Raises:
            StopIteration: After the chunk with a ``finish_reason``, or once closed.
            TszmqError: The request ended with an error; a new exception at each call.
        """
        self._session.check_caller()
        try:
            return self._next()
        except (StopIteration, TszmqError):
            raise
        except BaseException:
            self.close()
            raise

    def _next(self) -> TokenChunk:
        request = self._request
        while True:
            # end before visible: what is visible once it has ended is all there is.
            end = request.end
            with self._readers:
                chunk = None if self._over else self._take(end)
            if chunk is not None:
                return chunk
            if self._over:
                raise StopIteration
            if end is not None:
                request.result()  # raises: an end without an error gives a last chunk
            self._gate.wait(self._has_news)

    def _has_news(self) -> bool:
        request = self._request
        return self._over or request.end is not None or request.visible > self._taken

    def _take(self, end: End | None) -> TokenChunk | None:
        """What came since the last chunk; under the readers' lock."""
        finish_reason = None if end is None else end.finish_reason
        if self._request.visible == self._taken and finish_reason is None:
            return None
        chunk = self._request.chunk(self._taken, finish_reason)
        # Not what is visible by now: more may have come since the chunk was made.
        self._taken = chunk.completion_tokens
        if finish_reason is not None:  # never back to False: another thread may have closed it
            self._over = True
        return chunk

    def close(self) -> None:
        """Abort if unfinished; a reader blocked elsewhere gets StopIteration. Never blocks."""
        self._over = True
        request = self._request
        if request.end is None:
            withdraw(self._session, request, ABORTED)
        self._gate.wake()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end, and return the whole output, what was read included.

        Args:
            timeout: Seconds to wait for, as in ``concurrent.futures``: it ends the waiting,
                not the request.

        Raises:
            TimeoutError: The request goes on.
            TszmqError: As the request ended.
        """
        self._session.check_caller()
        request = self._request
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + check_timeout(timeout, "timeout")
        try:
            ended = self._gate.wait(lambda: request.end is not None, deadline)
        except BaseException:
            self.close()
            raise
        if not ended:
            raise TimeoutError(f"the request has not finished after {timeout} s; it goes on")
        return request.result()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Anywhere the collector runs: post, take no lock.
        request = getattr(self, "_request", None)
        if request is not None and request.end is None and not self._session.is_foreign():
            self._session.shared.mailbox.post(Settle([request], ABORTED))

    def __repr__(self) -> str:
        request = self._request
        end = request.end  # before visible, as in reading
        if end is None:
            state = "running"
        else:
            state = "failed" if end.finish_reason is None else f"ended: {shown(end.finish_reason)}"
        label = "" if request.label is None else f" {shown(request.label)}"
        return (
            f"<tszmq.RequestStream{label} at engine {request.engine_index}, "
            f"tokens: {request.visible}, {state}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RequestStream cannot be copied or pickled; take its result() instead")
