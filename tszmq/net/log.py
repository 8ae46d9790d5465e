"""The logger of the client's own threads: a log handler that raises must not end one, and nobody
who reaches a socket can fill the log."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

__all__ = ["Limited", "log"]

_WARNINGS = 50
_SECONDS = 600.0


class _Guarded(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except Exception:  # the handler's own bug; shown as logging shows those that it catches
            if logging.raiseExceptions:
                traceback.print_exc()


log = _Guarded(logging.getLogger("tszmq"), {})
"""Runs the handlers of ``tszmq``, which are the caller's code, in the thread that logs."""


class Limited:
    """Warnings that anyone who reaches a socket can cause: 50 in ten minutes, then only how many
    there were. For one thread."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._count = 0

    def warning(self, text: str) -> None:
        """Log it, or count it."""
        now = time.monotonic()
        if now - self._since >= _SECONDS:
            if self._count > _WARNINGS:
                log.warning("tszmq: %d more such warnings were left out", self._count - _WARNINGS)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _WARNINGS:
            log.warning("tszmq: %s", text)
