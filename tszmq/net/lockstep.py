"""Waking the ranks of a lockstep group (vLLM's MoE data parallel); see ``core.wave``.

None of them steps before all are awake: one that was not woken keeps all others waiting, which
look well meanwhile. A wake-up is ignored by a rank that is about to park, or that is paused, and
one that has not registered yet gets none. So the group is woken

* after every request;
* again, a moment after a rank parks, registers or answers a call (``resume``, say);
* again and again while it holds requests and says nothing: there may be reasons not known here.

One too many costs a group that is awake nothing, and one that sleeps some steps without work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tszmq.core.wave import WaveClock
from tszmq.net.mailbox import Wave
from tszmq.net.sender import Sender
from tszmq.net.shared import Shared
from tszmq.wire.base import WaveComplete

__all__ = ["Lockstep"]

_MOMENT = 0.02  # seconds: for the last outputs of a group that parks to be read
_SILENCE = 1.0  # seconds without output of any rank


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
        self._watching = False
        self._woken_again = -math.inf

    def wake_for_requests(self) -> None:
        """Wake the group for what it was sent since the last time, if anything."""
        if self._sender.has_new_work():
            self._wake()
            self._watch()

    def observe(self, item: Wave) -> None:
        """A rank said where its waves are."""
        self._waves.observe(item.signal)
        if isinstance(item.signal, WaveComplete):
            self.look_soon()

    def look_soon(self) -> None:
        """Wake the group in a moment, if it holds requests then: it may have missed theirs."""
        if not self._looking:
            self._looking = True
            self._at(_MOMENT, self._look)

    def _look(self) -> None:
        self._looking = False
        silent = self._silent_for()
        if silent is None:
            return
        # At once after output; after that as often as silence does: an engine may have lost a
        # request, and would be woken and park for ever.
        since = time.monotonic() - self._woken_again
        if since >= min(silent, _SILENCE):
            self._wake_again()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._at(_SILENCE, self._check)

    def _check(self) -> None:
        self._watching = False
        silent = self._silent_for()
        if silent is None:
            return
        if silent >= _SILENCE:
            self._wake_again()
        self._watch()

    def _silent_for(self) -> float | None:
        """Seconds since any rank said anything; None while none holds requests."""
        ranks = list(self._sender.lockstep())
        with self._shared.state as flights:
            if not any(map(flights.routing.inflight, ranks)):
                return None
            last = max(flights.engines[index].last_output for index in ranks)
        return time.monotonic() - last

    def _wake_again(self) -> None:
        self._woken_again = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        frames = self._shared.protocol.encode_start_wave(self._waves.next())
        self._sender.send_to_group(frames)
