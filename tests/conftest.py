"""What every suite shares: a unit of time, waiting for a condition, and a check for leaks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

THREAD_PREFIX = "tszmq-"
LEAK_PATIENCE = 2.0
"""Units that threads and child processes of a test have to end after it."""

if not faulthandler.is_enabled():
    faulthandler.enable()
# The same for child processes: an engine that dies on a signal says where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# Of a slow machine the tests learn nothing.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background jobs, where a test of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unit_of_time() -> float:
    """Seconds that count as one: TSZMQ_TIME_UNIT stretches every wait on a slow machine."""
    return float(os.environ.get("TSZMQ_TIME_UNIT", "1"))


def wait_until(condition: Callable[[], object], units: float = LEAK_PATIENCE) -> bool:
    """Wait for ``condition`` to become true; whether it did."""
    deadline = time.monotonic() + units * unit_of_time()
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.005)
    return True


def tszmq_threads() -> set[threading.Thread]:
    """The threads of this package that run now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)}


def child_processes() -> set[int]:
    """Process ids of our children that run now, but for multiprocessing's own."""
    if sys.platform.startswith("linux"):
        children = {
            int(pid)
            for listing in Path("/proc/self/task").glob("*/children")
            for pid in _text_of(listing).split()
        }
        return {pid for pid in children if _is_of_a_test(pid)}
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # the thread or process ended meanwhile
        return ""


def _is_of_a_test(pid: int) -> bool:
    state = _text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    command = _text_of(Path(f"/proc/{pid}/cmdline"))
    own = "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
    return bool(state) and state[0] not in "ZX" and not own


def leaks(threads: set[threading.Thread], processes: set[int]) -> str:
    """What of this package still runs, beyond what was there before; empty when nothing."""
    late = [f"thread {thread.name!r}" for thread in tszmq_threads() - threads]
    late += [
        f"process {pid} ({_text_of(Path(f'/proc/{pid}/cmdline')).replace(chr(0), ' ').strip()})"
        for pid in child_processes() - processes
    ]
    return ", ".join(sorted(late))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Stretch the time limits of the tests too: they have to outlast several patient waits."""
    unit = unit_of_time()
    if unit <= 1:
        return
    default = config.getoption("timeout")
    if default is None:
        default = float(config.getini("timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = default if marker is None else marker.args[0]
        item.add_marker(pytest.mark.timeout(seconds * unit), append=False)


@pytest.fixture
def unit() -> float:
    """The unit of time: multiply every wait of a test with it."""
    return unit_of_time()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads of ours or child processes behind."""
    threads, processes = tszmq_threads(), child_processes()
    yield
    if not wait_until(lambda: not leaks(threads, processes)):
        pytest.fail(f"left behind: {leaks(threads, processes)}")
