"""Two dozen threads against four engines, in both builds: nothing stalls, nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = float(os.environ.get("TSZMQ_STRESS_SECONDS", "6"))
UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
STALL = 20.0 * UNIT

pytestmark = [
    pytest.mark.timeout(SECONDS + 90),
    pytest.mark.embedded,
    pytest.mark.slow,
]


@pytest.mark.parametrize(
    ("protocol", "debug"), [("tokenspeed", "0"), ("tokenspeed", "1"), ("vllm", "0")]
)
def test_everything_at_once(protocol, debug):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.stress.workload", str(SECONDS), str(STALL)],
        cwd=ROOT,
        env={**os.environ, "TSZMQ_DEBUG": debug, "TSZMQ_STRESS_PROTOCOL": protocol},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS + 80 * UNIT,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith("checked " if debug == "1" else "plain ")
    assert "Traceback" not in done.stderr, done.stderr
