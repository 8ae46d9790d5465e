"""Waking the ranks of a lockstep group (vLLM's MoE data parallel); see ``core.wave``."""

from __future__ import annotations

from collections.abc import Callable

from tszmq.core.wave import WaveClock
from tszmq.net.mailbox import Wave
from tszmq.net.sender import Sender
from tszmq.net.shared import Shared
from tszmq.wire.base import WaveComplete

__all__ = ["Lockstep"]

_PARKED_SECONDS = 0.02  # for the last outputs of a group that parks to be read


class Lockstep:
    """Wakes every rank when one has work; for the control thread.

    Args:
        shared: For what the ranks hold, and the wire.
        sender: Where wake-ups go.
        at: Calls an action so many seconds later.
    """

    def __init__(
        self, shared: Shared, sender: Sender, at: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._shared = shared
        self._sender = sender
        self._at = at
        self._waves = WaveClock()
        self._looking = False

    def wake_for_requests(self) -> None:
        """Wake the group for what it was sent since the last time, if anything."""
        if self._sender.has_new_work():
            self._wake()

    def observe(self, item: Wave) -> None:
        """A rank said where its waves are."""
        self._waves.observe(item.signal)
        if isinstance(item.signal, WaveComplete) and not self._looking:
            self._looking = True
            self._at(_PARKED_SECONDS, self._look)

    def _look(self) -> None:
        """Wake a group that parked while it has requests.

        A rank that reads our wake-up just before it parks ignores it; a peer that had parked
        before and reads its request after that is alone then, and waits for the others for ever.
        """
        self._looking = False
        with self._shared.state as flights:
            busy = any(flights.routing.inflight(index) for index in self._sender.lockstep())
        if busy:
            self._wake()

    def _wake(self) -> None:
        frames = self._shared.protocol.encode_start_wave(self._waves.next())
        self._sender.send_to_group(frames)
