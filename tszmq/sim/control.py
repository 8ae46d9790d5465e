"""The child's standard input: commands from the parent, and the parent's end."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

from tszmq.sim.link import Wake

__all__ = ["Control"]

_STDIN = 0
_LOOK_S = 0.5
_GRACE_S = 2.0


class Control:
    """Reads standard input in a thread of its own: the engine loop may be blocked in a send.

    Args:
        wake: Told about every command.
        parent: End when this pid is no longer the parent, or when standard input ends; 0 for the
            parent at the time of the call, None never to.
    """

    def __init__(self, wake: Wake, parent: int | None) -> None:
        self.commands: deque[str] = deque()
        self._wake = wake
        self._parent = os.getppid() if parent == 0 else parent
        # A daemon: the process must not wait for a line that never comes.
        threading.Thread(target=self._run, name="sim-control", daemon=True).start()

    def _run(self) -> None:
        rest = b""
        while not self._orphaned():
            # Standard input cannot be relied on alone: a forked sibling of ours may hold a
            # copy of its write end.
            if not select.select([_STDIN], [], [], _LOOK_S)[0]:
                continue
            data = os.read(_STDIN, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line.decode("utf-8", "replace").strip())
        if self._parent is not None:
            self._end()

    def _orphaned(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "exit":  # at once, as a crash: no sentinel, nothing flushed
            os._exit(int(rest) if rest.isdigit() else 1)
        if name:
            self.commands.append(line)
            self._wake.set()

    def _end(self) -> None:
        self._wake.stopping = True
        self._wake.set()
        time.sleep(_GRACE_S)
        os._exit(1)  # the loop did not end by itself
