"""Showing how far a batch call is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Protocol

from tszmq.checks import shown

__all__ = ["PROGRESS_SECONDS", "Meter", "meter"]

PROGRESS_SECONDS = 0.1
"""How often at most, while nothing else wakes the thread."""


class Meter(Protocol):
    """What shows the progress."""

    def is_due(self, done: int, last: bool) -> bool:
        """Whether there is something new to show, and it is time to."""

    def show(self, done: int, total: int | None, last: bool) -> None:
        """Show it: how many are done, of how many, and whether that was the last."""


def meter(progress: object) -> Meter | None:
    """What shows the progress, as the caller wants it."""
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

    def is_due(self, done: int, last: bool) -> bool:
        return done != self._shown

    def show(self, done: int, total: int | None, last: bool) -> None:
        self._shown = done
        self._function(done, total)


class _Line:
    """One line on standard error, rewritten at most ten times a second.

    Where that is closed, or a terminal that has hung up, it goes nowhere: the results matter.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._shown = -1

    def is_due(self, done: int, last: bool) -> bool:
        return last or (done != self._shown and time.monotonic() >= self._next)

    def show(self, done: int, total: int | None, last: bool) -> None:
        self._shown = done
        self._next = time.monotonic() + PROGRESS_SECONDS
        of = "" if total is None else f"/{total}"
        with contextlib.suppress(Exception):  # whatever stands there: none, a closed one, a wrapper
            sys.stderr.write(f"\r{done}{of} done" + ("\n" if last else ""))
            sys.stderr.flush()
