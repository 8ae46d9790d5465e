"""Showing how far a batch call is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from tszmq.checks import shown

__all__ = ["PROGRESS_SECONDS", "Meter", "meter"]

PROGRESS_SECONDS = 0.1
"""How often at most, while nothing else wakes the thread."""

Meter = Callable[[int, "int | None", bool], None]


def meter(progress: object) -> Meter | None:
    """What shows the progress; told (done, total, whether that was the last)."""
    if progress is False or progress is None:
        return None
    if progress is True:
        return _Line()
    if not callable(progress):
        raise TypeError(f"progress must be True, False or a callable, got {shown(progress)}")
    return _Callback(progress)


class _Callback:
    """Calls the caller's function when the number has changed, and for the last."""

    def __init__(self, function: Callable[[int, int | None], object]) -> None:
        self._function = function
        self._shown = -1

    def __call__(self, done: int, total: int | None, last: bool) -> None:
        if done != self._shown:
            self._shown = done
            self._function(done, total)


class _Line:
    """One line on standard error, rewritten at most ten times a second.

    Where that is closed, or a terminal that has hung up, it goes nowhere: the results matter.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int | None, last: bool) -> None:
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + PROGRESS_SECONDS
        of = "" if total is None else f"/{total}"
        if sys.stderr is None:
            return
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r{done}{of} done" + ("\n" if last else ""))
            sys.stderr.flush()
