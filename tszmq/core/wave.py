"""The wave clock of a lockstep group (vLLM's MoE data parallel).

Ranks of such a group step together and park together. A parked rank ignores a wake-up for a wave
lower than its own, and each parking adds one to that; one that is about to park ignores them all.
So this client wakes every rank after every request, with a number that only grows and that no
rank's own can exceed, and again when a rank says that it has parked while there are requests.
"""

from __future__ import annotations

from tszmq.wire.base import StartWave, WaveComplete

__all__ = ["WaveClock"]


class WaveClock:
    """The highest wave known."""

    def __init__(self) -> None:
        self._wave = 0

    def next(self) -> int:
        """The number to wake the group with."""
        self._wave += 1
        return self._wave

    def observe(self, signal: WaveComplete | StartWave) -> None:
        """A rank said where it is."""
        # It parks after the wave that it completes, and is in the next one then.
        reached = signal.wave + 1 if isinstance(signal, WaveComplete) else signal.wave
        self._wave = max(self._wave, reached)
