"""Which release of vLLM an engine is of, where its wire depends on that."""

from __future__ import annotations

import re

from tszmq.types import EngineInfo

__all__ = ["release_of"]


def release_of(engine: EngineInfo) -> tuple[int, int] | None:
    """Major and minor number; None when it does not say."""
    numbers = re.match(r"v?(\d+)\.(\d+)", engine.engine_version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
