"""What the control thread wants the receiver to do.

An order stands in a queue that both threads have; ``WAKE``, sent through the inproc connection to
the output socket, has the receiver look there.
"""

from __future__ import annotations

import attrs

from tszmq.net.peers import Departure

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
    """A connection of the output socket closed.

    Attributes:
        fd: Its descriptor.
        accepted: How many had been accepted until then.
        gone: What else is known of it; None to look only whether the descriptor is closed by now.
        reopened: Another has the descriptor by now.
    """

    fd: int
    accepted: int
    gone: Departure | None = None
    reopened: bool = False


@attrs.frozen
class Blame:
    """Nothing else told who sent this: every engine that may have is dead.

    Attributes:
        sole: The only one that may have, when it came; None to look again.
        gone: What is known of the connection, which may be there still.
    """

    fd: int
    reason: str
    unreadable: bool
    sole: int | None
    gone: Departure


@attrs.frozen
class Halt:
    """End the thread."""
