"""What is to happen when: for one thread, told the time."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable

from tszmq.core.request import Request
from tszmq.net.mailbox import Expire

__all__ = ["Timers"]

_CLEAN_EVERY = 1024


class Timers:
    """Actions at monotonic times, and requests that expire."""

    def __init__(self) -> None:
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        # Weakly: most requests end long before their deadline, and their output is the caller's.
        self._deadlines: list[tuple[float, int, float, weakref.ref[Request]]] = []
        self._sequence = itertools.count()
        self._watched = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do that then."""
        heapq.heappush(self._actions, (when, next(self._sequence), action))

    def watch(self, item: Expire) -> None:
        """Give ``expired`` that request at its deadline, unless it has ended before."""
        watched = weakref.ref(item.request)
        heapq.heappush(
            self._deadlines, (item.deadline, next(self._sequence), item.timeout, watched)
        )
        self._watched += 1
        if self._watched % _CLEAN_EVERY == 0:
            self._deadlines = [entry for entry in self._deadlines if _unfinished(entry[3])]
            heapq.heapify(self._deadlines)

    def next_due(self) -> float | None:
        """When something is due, or None."""
        return min((heap[0][0] for heap in (self._actions, self._deadlines) if heap), default=None)

    def run_due(self, now: float) -> None:
        """Do what is due."""
        while self._actions and self._actions[0][0] <= now:
            heapq.heappop(self._actions)[2]()

    def expired(self, now: float) -> list[tuple[Request, float]]:
        """The unfinished requests whose deadline has passed, each with its timeout."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, timeout, watched = heapq.heappop(self._deadlines)
            request = _unfinished(watched)
            if request is not None:
                expired.append((request, timeout))
        return expired


def _unfinished(watched: weakref.ref[Request]) -> Request | None:
    request = watched()
    return request if request is not None and request.end is None else None
