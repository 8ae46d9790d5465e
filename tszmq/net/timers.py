"""What is to happen when: for one thread, told the time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tszmq.net.mailbox import Expire

__all__ = ["Timers"]

_CLEAN_EVERY = 1024


class Timers:
    """Actions at monotonic times, and requests that expire."""

    def __init__(self) -> None:
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._deadlines: list[tuple[float, int, Expire]] = []
        self._sequence = itertools.count()
        self._watched = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do that then."""
        heapq.heappush(self._actions, (when, next(self._sequence), action))

    def watch(self, item: Expire) -> None:
        """Give ``expired`` that request at its deadline, unless it has ended before."""
        heapq.heappush(self._deadlines, (item.deadline, next(self._sequence), item))
        self._watched += 1
        # Most requests end long before their deadline: do not keep them all until then.
        if self._watched % _CLEAN_EVERY == 0:
            self._deadlines = [entry for entry in self._deadlines if entry[2].request.end is None]
            heapq.heapify(self._deadlines)

    def next_due(self) -> float | None:
        """When something is due, or None."""
        return min((heap[0][0] for heap in (self._actions, self._deadlines) if heap), default=None)

    def run_due(self, now: float) -> None:
        """Do what is due."""
        while self._actions and self._actions[0][0] <= now:
            heapq.heappop(self._actions)[2]()

    def expired(self, now: float) -> list[Expire]:
        """The unfinished requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            item = heapq.heappop(self._deadlines)[2]
            if item.request.end is None:
                expired.append(item)
        return expired
