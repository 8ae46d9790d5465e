"""What the control thread wants the receiver to do.

An order stands in a queue that both threads have; ``WAKE``, sent through the inproc connection to
the output socket, has the receiver look there.
"""

from __future__ import annotations

import attrs

__all__ = ["Blame", "Halt", "Joined", "OutputClosed", "Retire"]


@attrs.frozen
class Joined:
    """An engine registered: forget what was known of its predecessor's output connection."""

    engine_index: int
    pid: int | None


@attrs.frozen
class Retire:
    """An engine is dead: deliver what it managed to send, then end what it held."""

    engine_index: int
    epoch: int
    reason: str
    last_call: bool = True
    """False: as long as its output connection is open, more of it may be on its way."""


@attrs.frozen
class OutputClosed:
    """A connection of the output socket closed; ``pid``: the process, where it is known."""

    fd: int
    pid: int | None


@attrs.frozen
class Blame:
    """Nothing else told who sent this: every engine that may have is dead.

    Attributes:
        candidates: Those that may have, as far as the control thread knows.
        sole: The only one that may have, when it came; None to look again.
    """

    fd: int
    reason: str
    unreadable: bool
    candidates: frozenset[int]
    sole: int | None


@attrs.frozen
class Halt:
    """End the thread."""
