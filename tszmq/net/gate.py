"""Waiting and waking without a condition variable.

A waiter is a plain lock taken twice, which costs an eighth of a ``threading.Condition``, and
``Lock.acquire`` with a timeout is interruptible by signals. Gates are not in the lock order:
they are released by another thread than took them, and nothing is held while waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Gate", "never_waits", "remaining"]

_this_thread = threading.local()
_release = type(threading.Lock()).release


def never_waits() -> None:
    """The calling thread serves those who wait: at a gate it would wait for itself."""
    _this_thread.serves = True


class Gate:
    """Where threads wait for a condition that others bring about.

    Whoever makes a condition true does so first and calls ``wake`` then; whoever waits is
    listed first and looks at the condition then. One of the two sees the other.
    """

    __slots__ = ("_sleepers",)

    def __init__(self) -> None:
        self._sleepers: list[threading.Lock] = []

    def wake(self) -> None:
        """Wake everyone who waits here now; any thread, never blocks, safe in a finalizer."""
        try:
            # One C call: no signal can come between taking a sleeper out and waking it.
            any(map(_release, iter(self._sleepers.pop, None)))
        except IndexError:  # no more
            pass

    def wait(self, ready: Callable[[], object], deadline: float | None = None) -> bool:
        """Wait until ``ready()`` is true.

        Args:
            ready: Looks at the condition, and waits for nothing else meanwhile.
            deadline: Monotonic seconds, or None to wait without a limit.

        Returns:
            False when the deadline passed first.

        Raises:
            RuntimeError: In a thread of a client's own, which runs a log handler.
        """
        while not ready():
            if getattr(_this_thread, "serves", False):
                raise RuntimeError(
                    "a thread of the client's own, in which log handlers run, cannot wait for "
                    "a client: it would wait for itself"
                )
            sleeper = threading.Lock()
            sleeper.acquire()
            self._sleepers.append(sleeper)
            try:
                if ready():
                    self._leave(sleeper)
                    return True
                timeout = remaining(deadline)
                if timeout is not None and timeout <= 0:
                    self._leave(sleeper)
                    return False
                if not sleeper.acquire(True, -1 if timeout is None else timeout):
                    self._leave(sleeper)
            except BaseException:
                self._leave(sleeper)
                raise
        return True

    def _leave(self, sleeper: threading.Lock) -> None:
        try:
            self._sleepers.remove(sleeper)
        except ValueError:  # woken
            pass


def remaining(deadline: float | None) -> float | None:
    """Seconds until a monotonic deadline, never more than a lock can wait; None without one."""
    if deadline is None:
        return None
    return min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
