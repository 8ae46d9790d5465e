"""Which output connection may be which engine's.

Nothing on the wire says whose a connection is before its engine's first batch. Until then a local
one is known by its process. Over tcp they are counted: each living engine that has not been heard
on a connection needs one of those that nobody was heard on and that are newer than its INIT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tszmq.net.mailbox import Learnt
from tszmq.net.monitors import Connection, Monitor
from tszmq.net.peers import CLOSED

__all__ = ["Outputs"]


class Outputs:
    """For the control thread.

    Args:
        monitor: Of the output socket.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._pids: dict[int, int | None] = {}
        # How many connections there had been when the engine was told where to dial.
        self._invited: dict[int, int] = {}
        self._heard: dict[int, Connection] = {}  # the last on which the engine was heard

    def invite(self, index: int) -> None:
        """An engine is about to be told where to dial."""
        # Told again, it may have dialled in already: the first time counts until it is dead.
        self._invited.setdefault(index, self._monitor.num_accepted())

    def join(self, index: int, pid: int | None) -> None:
        """An engine registered; its process, where it is known."""
        self._pids[index] = pid
        self._heard.pop(index, None)

    def forget(self, index: int) -> None:
        """An engine is dead."""
        for known in (self._pids, self._invited, self._heard):
            known.pop(index, None)

    def learn(self, item: Learnt) -> None:
        """An engine was heard."""
        connection = self._monitor.at(item.fd)
        if connection is not None and item.engine_index in self._pids:
            connection.owner = item.engine_index
            self._heard[item.engine_index] = connection

    def suspects(self, gone: Connection, alive: Sequence[int]) -> list[int]:
        """A connection closed, or is about to: the engine whose it was; or several, one of which.

        Args:
            gone: The connection.
            alive: The living engines.
        """
        if gone.owner is not None:
            is_its_own = self._heard.get(gone.owner) is gone and gone.owner in alive
            return [gone.owner] if is_its_own else []
        if not gone.speaks:
            return []
        silent = self._silent(alive, gone.pid)
        if not self._left_over(silent, gone):
            # As long as each may have one of those that are left, it was a stranger's.
            return []
        return [index for index in silent if self._invited.get(index, 0) < gone.number]

    def candidates(self, fd: int, alive: Sequence[int]) -> list[int]:
        """The same of the connection at that descriptor, or the last there."""
        connection = self._monitor.at(fd)
        return list(alive) if connection is None else self.suspects(connection, alive)

    def reachable_since(self, index: int, alive: Sequence[int]) -> float:
        """When the engine made the connection that it has now (monotonic seconds); infinite when
        there are fewer than are needed, and it may have none."""
        heard = self._heard.get(index)
        if heard is not None and self._is_open(heard):
            return heard.since
        # It was the last to dial in, most likely.
        others = [each for each in self._silent(alive, self._pids.get(index)) if each != index]
        unnamed = self._unnamed(self._pids.get(index))
        self._deal(others, unnamed)
        mine = self._deal([index], unnamed)
        return mine[0].since if mine else math.inf

    def may_be_reachable(self, index: int) -> bool:
        """Whether there is a connection that may be its own."""
        return bool(self._deal([index], self._unnamed(self._pids.get(index))))

    def _silent(self, alive: Sequence[int], pid: int | None) -> list[int]:
        """Engines of that process that have no connection on which they were heard."""
        return [
            index
            for index in alive
            if index in self._pids
            and not (index in self._heard and self._is_open(self._heard[index]))
            and _may_be(self._pids[index], pid)
        ]

    def _unnamed(self, pid: int | None) -> list[Connection]:
        """Connections of that process on which nobody was heard, in order of their numbers."""
        return [
            each
            for each in self._monitor.connections()
            if each.owner is None and _may_be(each.pid, pid)
        ]

    def _left_over(self, silent: list[int], gone: Connection) -> bool:
        """Whether one of these engines can have no connection beside that one."""
        unnamed = [each for each in self._unnamed(gone.pid) if each is not gone]
        return len(self._deal(silent, unnamed)) < len(silent)

    def _deal(self, engines: list[int], unnamed: list[Connection]) -> list[Connection]:
        """Give each engine the oldest of those connections that may be its own, and take it out.
        Returns what they got."""
        dealt = []
        for index in sorted(engines, key=lambda each: self._invited.get(each, 0)):
            its = next((c for c in unnamed if c.number > self._invited.get(index, 0)), None)
            if its is not None:
                unnamed.remove(its)
                dealt.append(its)
        return dealt

    def _is_open(self, connection: Connection) -> bool:
        fd = connection.fd
        return self._monitor.is_open(fd) and self._monitor.at(fd) is connection


def _may_be(pid: int | None, other: int | None) -> bool:
    """Whether two processes may be the same, as far as they are known."""
    return pid == other or not {None, CLOSED}.isdisjoint((pid, other))
