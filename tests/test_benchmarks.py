"""Every benchmark runs to its end in quick mode and reports what it promises. No speeds here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[!_]*.py"))

pytestmark = [pytest.mark.slow, pytest.mark.embedded]
pytest.importorskip("msgspec")


def test_there_are_benchmarks() -> None:
    assert {"decode.py", "end_to_end.py", "routing.py"} <= set(SCRIPTS)


@pytest.mark.timeout(120)  # the machine may be busy
@pytest.mark.parametrize("script", SCRIPTS)
def test_quick_mode_reports(script: str, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--quick", "--rounds", "1", "--json", report_file],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    assert set(report) == {"benchmark", "quick", "machine", "tables", "verdicts"}
    assert report["benchmark"] == script.removesuffix(".py")
    assert report["quick"] is True
    assert {"cpus", "python", "libzmq", "ormsgpack"} <= set(report["machine"])
    for table in report["tables"]:
        assert table["rows"], table["title"]
        assert len({tuple(row) for row in table["rows"]}) == 1  # the same columns in each
        assert table["title"] in done.stdout
    for verdict in report["verdicts"]:
        assert set(verdict) == {"target", "value", "limit", "met"}
        assert verdict["target"] in done.stdout
