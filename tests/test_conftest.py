"""The leak check finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
import threading

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
