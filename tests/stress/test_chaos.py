"""Engines that die, stall and talk nonsense under a crowd of callers; see ``chaos.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
SECONDS = float(os.environ.get("TSZMQ_CHAOS_SECONDS", "20"))
"""Both runs together, without what it takes to start and to come to rest."""
REST = 100.0 * UNIT

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.embedded,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS / 2 + 120),
]


@pytest.mark.parametrize(
    ("protocol", "debug"), [("tokenspeed", os.environ.get("TSZMQ_DEBUG", "")), ("vllm", "1")]
)
def test_chaos(protocol, debug):
    """Every request ends once, every call in its time, and nothing is left at the end."""
    seconds = SECONDS / 2
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "tests/stress/chaos.py"),
            *("--protocol", protocol, "--seconds", str(seconds)),
        ],
        cwd=ROOT,
        env={**os.environ, "TSZMQ_DEBUG": debug},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds + REST,
        check=False,
    )
    print(done.stdout)  # noqa: T201 - the figures, for whoever asks pytest for them
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    figures = json.loads(done.stdout)
    assert figures["debug"] is (debug == "1") or not debug
    assert figures["kills"] > 0
    assert figures["ends"]["length"] > 0, "no request came through at all"
    assert figures["ends"]["EngineDead"] > 0, "nobody noticed a kill"
    assert figures["kill_to_error_s"]["median"] < 1.0 * UNIT
