"""The table of faults names tests that there are."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
TABLE = (TESTS / "faults" / "README.md").read_text(encoding="utf-8")


@functools.cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_table_exists():
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE))
    assert len(named) > 100
    missing = [f"{path}::{test}" for path, test in named if test not in functions(TESTS / path)]
    assert not missing


def test_every_row_names_a_test_or_says_why_not():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| What"))]
    assert len(rows) > 48
    for row in rows:
        _, what, where, _ = row.split("|")
        assert what.strip()
        assert "::" in where or where.strip().startswith(("Not tested", "Does not apply")), row


def test_every_file_of_faults_is_in_the_table():
    files = {path.name for path in (TESTS / "faults").glob("test_*.py")} - {Path(__file__).name}
    assert files == {name for name in files if f"faults/{name}::" in TABLE}
