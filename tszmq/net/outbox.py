"""Sending on the input ROUTER without ever waiting for an engine."""

from __future__ import annotations

from collections import deque

import attrs
import zmq

from tszmq.net.log import log
from tszmq.wire.startup import engine_identity

__all__ = ["Outbox"]

_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LONGEST_TURN = 0.5  # seconds between two tries; what is more, this process slept
_WARNING_SECONDS = 10.0


@attrs.define(eq=False)
class _Blocked:
    """Messages that an engine's connection had no room for, in order.

    Attributes:
        messages: They.
        tried: When the last try was.
        stalled: Seconds without progress, in which somebody looked for it.
        warned: The log has it.
    """

    messages: deque[list[bytes]]
    tried: float
    stalled: float = 0.0
    warned: bool = False


class Outbox:
    """The ROUTER's send half, with a queue for each engine that does not read.

    Args:
        router: The input socket; the thread that owns it owns this.
        send_timeout: Seconds without progress after which an engine is given up.
    """

    def __init__(self, router: zmq.Socket[bytes], send_timeout: float) -> None:
        self._router = router
        self._send_timeout = send_timeout
        self.blocked: dict[int, _Blocked] = {}

    def send(self, index: int, frames: list[bytes], now: float) -> str | None:
        """Send, or queue behind what is queued. Returns why the engine is lost, or None."""
        blocked = self.blocked.get(index)
        if blocked is not None:
            blocked.messages.append(frames)
            return None
        try:
            self._send(index, frames)
        except zmq.Again:
            self.blocked[index] = _Blocked(deque([frames]), now)
        except zmq.ZMQError as error:
            return f"nothing can be sent to it: {error}"
        return None

    def _send(self, index: int, frames: list[bytes]) -> None:
        """What ``send_multipart`` does, which looks into every frame first and takes twice as
        long. Only the first frame can fail: the others go where it went."""
        send = self._router.send
        send(engine_identity(index), _MORE)
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1], _LAST)

    def retry(self, now: float) -> list[tuple[int, str]]:
        """Send what was blocked. Returns the engines that are lost, and why."""
        lost = []
        for index, blocked in list(self.blocked.items()):
            blocked.stalled += min(now - blocked.tried, _LONGEST_TURN)
            blocked.tried = now
            reason = self._drain(index, blocked)
            if reason is None and blocked.stalled > self._send_timeout:
                reason = f"it has not read its requests for {self._send_timeout} s"
            elif blocked.stalled > _WARNING_SECONDS and not blocked.warned:
                blocked.warned = True
                log.warning(
                    "tszmq: engine %d has read no request for %.1f s, and %d wait; it is given up "
                    "after %.1f s",
                    index,
                    blocked.stalled,
                    len(blocked.messages),
                    self._send_timeout,
                )
            if reason is not None:
                lost.append((index, reason))
                self.forget(index)
            elif not blocked.messages:
                del self.blocked[index]
        return lost

    def _drain(self, index: int, blocked: _Blocked) -> str | None:
        while blocked.messages:
            try:
                self._send(index, blocked.messages[0])
            except zmq.Again:
                return None
            except zmq.ZMQError as error:
                return f"nothing can be sent to it: {error}"
            blocked.messages.popleft()
            blocked.stalled = 0.0
            blocked.warned = False
        return None

    def forget(self, index: int) -> None:
        """The engine is dead: nothing queued for it will be sent."""
        self.blocked.pop(index, None)
