"""The logger of the client's own threads: a log handler that raises must not end one."""

from __future__ import annotations

import logging
import traceback
from typing import Any

__all__ = ["log"]


class _Guarded(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except Exception:  # the handler's own bug; shown as logging shows those that it catches
            if logging.raiseExceptions:
                traceback.print_exc()


log = _Guarded(logging.getLogger("tszmq"), {})
"""Runs the handlers of ``tszmq``, which are the caller's code, in the thread that logs."""
