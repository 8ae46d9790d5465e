"""Who waits for a place, where the number of unfinished requests is bounded: first come, first
served."""

from __future__ import annotations

from collections import OrderedDict

from tszmq.core.request import Request, Wakeable

__all__ = ["Places"]


class Places:
    """The queue for places. Each who waits has a ticket, which is woken when its turn comes.

    A signal may cut off any caller: whoever is granted a place and does not take it has to be
    found again, so that a ticket is in the queue or among the granted ones until it leaves.

    Args:
        most: How many places there are; None: no bound, and nobody waits.

    Attributes:
        waiting: By ticket, the request of each who waits or was granted a place.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._queue: OrderedDict[Wakeable, None] = OrderedDict()  # a dict is slow to empty
        self._granted: set[Wakeable] = set()  # woken to take one
        self.waiting: dict[Wakeable, Request] = {}

    def has_one_for(self, ticket: Wakeable, taken: int) -> bool:
        """Whether it may take a place now, of which so many are taken."""
        if self._most is None or ticket in self._granted:
            return True
        return self._most - taken - len(self._granted) > 0 and not self._queue

    def wait(self, ticket: Wakeable, request: Request) -> None:
        """Queue, if it does not yet."""
        self.waiting[ticket] = request
        self._queue[ticket] = None  # one that is there keeps its place

    def leave(self, ticket: Wakeable) -> None:
        """It has its place, or wants none."""
        if self._most is None:
            return
        self._granted.discard(ticket)
        self._queue.pop(ticket, None)
        self.waiting.pop(ticket, None)

    def grant(self, taken: int) -> list[Wakeable]:
        """Whose turn it is, when so many places are taken."""
        granted: list[Wakeable] = []
        if not self._queue or self._most is None:
            return granted
        while self._queue and taken + len(self._granted) < self._most:
            # Never in neither.
            ticket = next(iter(self._queue))
            self._granted.add(ticket)
            del self._queue[ticket]
            granted.append(ticket)
        return granted

    def granted(self) -> list[Wakeable]:
        """Whose turn it is and who has not taken it yet."""
        return list(self._granted)

    def everyone(self) -> list[Wakeable]:
        """Everyone who has not left."""
        return [*self._queue, *self._granted]
