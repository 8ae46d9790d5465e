"""Which engines are coming up, and what each HELLO means: a plain state machine.

    (unknown) --HELLO, INIT sent--> GREETED --READY--> READY --registration--> REGISTERED
    GREETED and READY may be left by the registration in either order: it is on another socket.
    GREETED --connection closed--> (gone) --READY or registration, its place still free--> ...
    Engines load for minutes, and say HELLO once: one whose connection broke dials in again by
    itself and goes on where it was.
    REGISTERED --death--> DEAD --HELLO, INIT sent--> GREETED ...

A HELLO with the index of a living engine is kept waiting: engines say it once, and the one
that says it may be the successor of one whose death is not known yet.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["Stage", "Startup"]

_SHOWN = 8  # of a list, in a text


class Stage(enum.Enum):
    """Where an engine is on its way to serving."""

    GREETED = "said HELLO and was sent INIT, has not registered"
    READY = "said READY, has not registered"
    REGISTERED = "registered"
    DEAD = "dead"


class Startup:
    """The engines of one client, by index.

    Args:
        expected: How many engines there will be.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._stages: dict[int, Stage] = {}
        self._waiting: dict[int, int] = {}  # index -> the connection that said HELLO
        self._greeted_by: dict[int, int] = {}
        self._gone: set[int] = set()  # said HELLO, were sent INIT, and their connection closed
        self.ignored = 0
        """Messages of strangers on the handshake socket."""

    def hello(self, index: int, connection: int) -> bool:
        """An engine said HELLO; True when it is to be sent INIT, False when it has to wait."""
        stage = self._stages.get(index)
        if stage is Stage.GREETED and self._greeted_by.get(index) == connection:
            return True  # engines say it once: that before was a predecessor's last word
        if not self._is_vacant(index):
            self._waiting[index] = connection
            return False
        self._greet(index, connection)
        return True

    def _greet(self, index: int, connection: int) -> None:
        self._waiting.pop(index, None)
        self._gone.discard(index)
        self._stages[index] = Stage.GREETED
        self._greeted_by[index] = connection

    def is_known(self, index: int) -> bool:
        """Whether an engine of that index is there, on its way or dead."""
        return index in self._stages

    def ready(self, index: int) -> bool:
        """An engine said READY; False when nobody expected that of it."""
        if self._stages.get(index) is Stage.GREETED or self._may_return(index):
            self._gone.discard(index)
            self._stages[index] = Stage.READY
        return index in self._stages

    def _may_return(self, index: int) -> bool:
        """Whether this one's connection closed during its start-up, and its place is free."""
        return index in self._gone and self._is_vacant(index)

    def _is_vacant(self, index: int) -> bool:
        stage = self._stages.get(index)
        return stage is Stage.DEAD or (stage is None and len(self._stages) < self.expected)

    def is_greeted(self, index: int) -> bool:
        """Whether the engine was sent INIT and has not said READY."""
        return self._stages.get(index) is Stage.GREETED

    def expects_registration(self, index: int) -> bool:
        """Whether the engine was sent INIT and has not registered."""
        return self._stages.get(index) in (Stage.GREETED, Stage.READY) or self._may_return(index)

    def registered(self, index: int) -> None:
        """An engine registered, which was expected."""
        self._gone.discard(index)
        self._stages[index] = Stage.REGISTERED

    def died(self, index: int) -> list[int]:
        """An engine is dead. Returns who is to be sent INIT now: a successor that waited."""
        if index not in self._stages:
            return []
        self._stages[index] = Stage.DEAD
        return self._serve_waiting()

    def failed(self, index: int) -> list[int]:
        """A start-up failed, its place is free again. Returns who is to be sent INIT now."""
        if self._stages.get(index) not in (Stage.GREETED, Stage.READY):
            return []
        del self._stages[index]
        return self._serve_waiting()

    def handshake_closed(self, connection: int) -> int | None:
        """A connection of the handshake socket closed.

        Returns:
            The index of the engine whose start-up failed thereby; None when it means nothing
            (it had said READY, or only waited).
        """
        for index, waiting in list(self._waiting.items()):
            if waiting == connection:
                del self._waiting[index]
        for index, greeted in list(self._greeted_by.items()):
            if greeted == connection:
                del self._greeted_by[index]
                if self._stages.get(index) is Stage.GREETED:
                    self._gone.add(index)
                    return index
        return None

    def stalled(self) -> list[int]:
        """Those that said READY and closed that connection, did not register, and have a
        successor waiting: an engine registers at once, so they probably died in between."""
        return [
            index
            for index in self._waiting
            if self._stages.get(index) is Stage.READY and index not in self._greeted_by
        ]

    def _serve_waiting(self) -> list[int]:
        """Greet those kept waiting whose place has become free."""
        served = []
        for index, connection in list(self._waiting.items()):
            if self._is_vacant(index):
                self._greet(index, connection)
                served.append(index)
        return served

    def pending(self) -> bool:
        """Whether some engine was sent INIT and has not registered."""
        return any(stage in (Stage.GREETED, Stage.READY) for stage in self._stages.values())

    def is_settled(self) -> bool:
        """Whether no engine is on its way, or kept waiting."""
        return not self._waiting and not self.pending()

    def num_missing(self) -> int:
        """Engines that have never registered."""
        coming = sum(stage in (Stage.REGISTERED, Stage.DEAD) for stage in self._stages.values())
        return self.expected - coming

    def advise(self) -> str:
        """What may be done about those that are missing."""
        advice = []
        if Stage.READY in self._stages.values():
            advice.append(
                "Who said READY dials the input address next: see that it can from where it runs."
            )
        if self.expected > len(self._stages) + len(self._gone - set(self._stages)):
            advice.append(
                "Engines may say HELLO only once: start those anew that served an earlier client."
            )
        return " ".join(advice)

    def describe_missing(self) -> str:
        """Who is missing and at which stage, for people."""
        coming = [
            f"engine {index} {stage.value}"
            for index, stage in sorted(self._stages.items())
            if stage in (Stage.GREETED, Stage.READY)
        ]
        parts = [_few(coming, "; ")] if coming else []
        gone = sorted(self._gone - set(self._stages))
        if gone:
            parts.append(f"gone after HELLO, before READY: {_few(gone)}")
        silent = self.expected - len(self._stages) - len(gone)
        if silent > 0:
            # Ranks are numbered from 0 unless somebody chose otherwise.
            named = [i for i in range(self.expected) if i not in self._stages and i not in gone]
            guess = ""
            if len(named) == silent and all(i < self.expected for i in self._stages):
                guess = f" ({_few(named)}, if they are numbered from 0)"
            parts.append(f"{silent} never said HELLO{guess}")
        if self._waiting:
            waiting = _few(sorted(self._waiting))
            parts.append(f"kept waiting because their index or place is taken: {waiting}")
        if self.ignored:
            parts.append(f"{self.ignored} messages of strangers were ignored")
        return f"{self.num_missing()} of {self.expected} engines missing: " + "; ".join(parts)


def _few(items: Sequence[object], between: str = ", ") -> str:
    """So many that a text stays readable: there may be thousands, of strangers, too."""
    shown = between.join(map(str, items[:_SHOWN]))
    return f"{shown} and {len(items) - _SHOWN} more" if len(items) > _SHOWN else shown
