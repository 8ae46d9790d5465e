"""Engines that hold work and send nothing: warned about, and given up only when told so.

Silence is not death: a long prefill, a compile or a debugger is silent too. It is counted per
engine, and only while that engine holds work.
"""

from __future__ import annotations

from tszmq.net.log import log

__all__ = ["SilenceWatch"]


class SilenceWatch:
    """Decides what silence means. Told the time; keeps none itself.

    Args:
        timeout: Seconds after which a silent engine counts as dead, or None for never.
        warning: Seconds after which it is warned about, once, or None for never.
    """

    def __init__(self, timeout: float | None, warning: float | None) -> None:
        self._timeout = timeout
        self._warning = warning
        self._warned: set[int] = set()
        limits = [limit for limit in (timeout, warning) if limit is not None]
        self.interval: float | None = min(5.0, max(0.02, min(limits) / 5)) if limits else None
        """How often to look, or None when nothing is watched."""
        self._last: float | None = None
        self._late = False
        self._silent: dict[int, float] = {}  # seconds in which somebody looked, by engine

    def overdue(self, quiet: dict[int, float], now: float) -> list[tuple[int, float]]:
        """Which engines are to be given up.

        Args:
            quiet: Seconds of silence of each engine that holds work.
            now: Monotonic seconds.
        """
        assert self.interval is not None
        # A look that comes late counts as one, and decides nothing: this process slept meanwhile
        # (a suspended laptop, SIGSTOP, a thread that kept the interpreter), and outputs may be
        # there unread. Where all of them are late, every other one decides.
        step = self.interval if self._last is None else now - self._last
        self._last = now
        self._late = step > 1.5 * self.interval and not self._late
        step = min(step, self.interval)
        self._silent = {
            index: min(seconds, self._silent.get(index, 0.0) + step)
            for index, seconds in quiet.items()
        }
        self._warned &= quiet.keys()
        dead = []
        for index, silent in self._silent.items():
            if self._timeout is not None and silent > self._timeout:
                if not self._late:
                    dead.append((index, silent))
            elif self._warning is None or silent <= self._warning:
                self._warned.discard(index)
            elif index not in self._warned:
                self._warned.add(index)
                log.warning(
                    "tszmq: engine %d holds requests and has sent nothing for %.1f s",
                    index,
                    silent,
                )
        return dead
