"""The calls that drive many requests from one thread, as users see them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from tszmq import bulk
from tszmq.types import Completion, SamplingParams, TokenChunk, TokenIds

if TYPE_CHECKING:
    from tszmq.client import Client

__all__ = ["BulkCalls"]

Prompts = Iterable[TokenIds]
Params = SamplingParams | Iterable[SamplingParams | None] | None
Progress = bool | Callable[[int, int | None], object]


class BulkCalls:
    """The part of a ``Client`` that drives many requests; any thread may call any method."""

    @overload
    def generate_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise"] = "raise",
        progress: Progress = False,
    ) -> list[Completion]: ...
    @overload
    def generate_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["return"],
        progress: Progress = False,
    ) -> list[Completion | Exception]: ...
    def generate_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise", "return"] = "raise",
        progress: Progress = False,
    ) -> Any:
        """Generate completions of many prompts from this one thread, in the prompts' order.

        Args:
            prompts: Any iterable of prompts; pulled as places become free.
            sampling_params: One for all, or one each: of an iterator as many as there are prompts.
            timeout: Seconds for the whole batch.
            max_inflight: Unfinished requests of this call at once; None: enough to keep the
                engines busy.
            errors: ``"raise"``: the first error is raised, with a note that names its prompt, and
                the rest aborted. ``"return"``: a failed prompt's place holds its exception, with
                a traceback only when the caller's own code raised it.
            progress: True for a line on standard error, or a callable ``(done, total or None)``,
                called in this thread under no lock; calls are coalesced, the last says all.

        Raises:
            As ``generate``, with ``errors="raise"``; what the caller's own iterators raise.
        """
        return bulk.generate_many(
            cast("Client", self), prompts, sampling_params, timeout, max_inflight, errors, progress
        )

    @overload
    def as_completed(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise"] = "raise",
        progress: Progress = False,
    ) -> Generator[tuple[int, Completion], None, None]: ...
    @overload
    def as_completed(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["return"],
        progress: Progress = False,
    ) -> Generator[tuple[int, Completion | Exception], None, None]: ...
    def as_completed(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise", "return"] = "raise",
        progress: Progress = False,
    ) -> Any:
        """As ``generate_many``, but yields ``(index, Completion)`` as they finish.

        Nothing is sent before the first ``next()``, while ``timeout`` counts from this call. This
        thread pulls the prompts, too: while it waits for one, nothing is yielded.
        Closing the iterator, or dropping it, aborts what is unfinished.
        """
        return bulk.as_completed(
            cast("Client", self), prompts, sampling_params, timeout, max_inflight, errors, progress
        )

    @overload
    def stream_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise"] = "raise",
    ) -> Generator[tuple[int, TokenChunk], None, None]: ...
    @overload
    def stream_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["return"],
    ) -> Generator[tuple[int, TokenChunk | Exception], None, None]: ...
    def stream_many(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> Any:
        """Every chunk of many prompts in this one thread: yields ``(index, TokenChunk)``.

        Costs what a bulk call costs, where a thread for each stream costs a wake-up for each
        chunk. Nothing is sent before the first ``next()``, while ``timeout`` counts from this
        call. A prompt's last chunk has a ``finish_reason``. Arguments and errors as
        ``generate_many``; with ``errors="return"`` an exception stands in the place of a failed
        prompt's last chunk. Closing the iterator, or dropping it, aborts what is unfinished.
        """
        return bulk.stream_many(
            cast("Client", self), prompts, sampling_params, timeout, max_inflight, errors
        )
