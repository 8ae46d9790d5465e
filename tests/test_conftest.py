"""The leak check finds what it is there to find, and time limits follow the unit of time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import child_processes, leaks, tszmq_threads, wait_until


def test_a_thread_of_ours_is_a_leak_while_it_runs() -> None:
    threads, processes = tszmq_threads(), child_processes()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="tszmq-forgotten", daemon=True)
    thread.start()
    try:
        assert leaks(threads, processes) == "thread 'tszmq-forgotten'"
        assert leaks(threads | {thread}, processes) == ""
        assert not wait_until(lambda: not leaks(threads, processes), units=0.05)
    finally:
        stop.set()
        thread.join()
    assert leaks(threads, processes) == ""


def test_threads_of_others_are_not_ours() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="someone-else", daemon=True)
    thread.start()
    try:
        assert thread not in tszmq_threads()
    finally:
        stop.set()
        thread.join()


def test_a_child_process_is_a_leak_until_it_ends() -> None:
    threads, processes = tszmq_threads(), child_processes()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert f"process {child.pid} (" in leaks(threads, processes)
    finally:
        child.communicate(b"\n")
    assert leaks(threads, processes) == ""


LIMITED = """
import time
import pytest

def test_default():
    time.sleep(0.6)

@pytest.mark.timeout(0.2)
def test_marked():
    time.sleep(0.6)
"""


@pytest.mark.parametrize(("stretched", "outcome"), [("1", "2 failed"), ("100", "2 passed")])
def test_time_limits_follow_the_unit_of_time(tmp_path, stretched, outcome) -> None:
    (tmp_path / "test_limited.py").write_text(LIMITED)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "timeout=0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *options, str(tmp_path)],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "TSZMQ_TIME_UNIT": stretched},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert outcome in done.stdout
    assert ("Timeout" in done.stdout) is (outcome == "2 failed")
