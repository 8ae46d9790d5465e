"""The README says the truth: every block of it is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
PLAIN = [line for language, text in BLOCKS if language == "" for line in text.splitlines()]


def test_it_has_blocks():
    assert len(PYTHON) >= 2
    assert len(SHELL) == 4


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_blocks_run(number):
    """As a program of its own, warnings being errors."""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PYTHON[number]],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout


def test_the_main_command_runs():
    """With the console script replaced by the module, which needs no installation."""
    [line] = [line for line in SHELL if "tszmq generate" in line]
    command = line.replace("tszmq generate", f"{shlex.quote(sys.executable)} -m tszmq generate")
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=50, cwd=README.parent
    )
    assert ran.returncode == 0, ran.stderr
    assert '"finish_reason": "length"' in ran.stdout


def test_the_test_command_is_the_one_that_ci_runs():
    """.ci/run reads it from here."""
    assert "python -m pytest" in SHELL
    assert any("pip install -e '.[test]'" in line for line in SHELL)


def test_the_other_commands_exist():
    """Their options are the parser's."""
    lines = [line for line in PLAIN if line.startswith("tszmq ")]
    assert lines
    for line in lines:
        ran = subprocess.run(
            [sys.executable, "-m", *shlex.split(line), "--help"],
            capture_output=True,
            text=True,
            timeout=50,
            cwd=README.parent,
        )
        assert ran.returncode == 0, ran.stderr
