"""A client's two threads: what stays when one of them cannot be started."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

from tests.client_fixtures import short_dir
from tests.conftest import tszmq_threads, wait_until
from tszmq import Client, Endpoints
from tszmq.errors import ConnectError
from tszmq.net.session import Session
from tszmq.net.sockets import Sockets, _Binder

__all__ = ["short_dir"]

pytestmark = pytest.mark.timeout(30)

THREADS = ["tszmq-control", "tszmq-receiver"]


def descriptors() -> set[str]:
    """Every open descriptor and what it is."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:  # the listing's own
            pass
    return found


@pytest.fixture
def nothing_stays(short_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """The address to bind; checks afterwards that all of it is free."""
    directories = short_dir / "tmp"
    directories.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directories))
    endpoints = Endpoints(f"ipc://{short_dir}/handshake.sock")
    threads, before = tszmq_threads(), descriptors()
    with monkeypatch.context() as patched:
        yield endpoints, patched
    assert tszmq_threads() == threads
    assert os.listdir(short_dir) == ["tmp"]
    assert os.listdir(directories) == []
    # libzmq's own threads let go of theirs a moment after the context has ended.
    assert wait_until(lambda: descriptors() <= before), descriptors() - before
    with Client.bind(endpoints) as bound:
        assert bound.endpoints.handshake == endpoints.handshake


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are looked up there")
class TestNothingStays:
    @pytest.mark.parametrize("name", THREADS)
    def test_when_a_thread_cannot_be_started(self, nothing_stays, name):
        """The other one ends, and every address is free."""
        endpoints, patched = nothing_stays
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConnectError, match="cannot be started: can't start new thread"):
            Client.bind(endpoints)

    @pytest.mark.parametrize("name", THREADS)
    @pytest.mark.parametrize("started", [False, True], ids=["before", "after"])
    def test_when_a_signal_comes(self, nothing_stays, name, started):
        """Ctrl-C before or after the thread has begun."""
        endpoints, patched = nothing_stays
        start = threading.Thread.start

        def interrupt(thread: threading.Thread) -> None:
            if thread.name == name and not started:
                raise KeyboardInterrupt
            start(thread)
            if thread.name == name:
                raise KeyboardInterrupt

        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Client.bind(endpoints)

    def test_when_a_signal_comes_right_after(self, nothing_stays):
        """Both threads run, nobody holds the session."""
        endpoints, patched = nothing_stays
        start = Session._start

        def interrupted(session: Session, sockets: Sockets) -> None:
            start(session, sockets)
            raise KeyboardInterrupt

        before = tszmq_threads()
        patched.setattr(Session, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Client.bind(endpoints)
        gc.collect()
        assert wait_until(lambda: tszmq_threads() == before)

    def test_when_there_are_no_descriptors_left(self, nothing_stays):
        """The last pair is the one that wakes the control thread."""
        endpoints, patched = nothing_stays

        def refuse() -> None:
            raise OSError("Too many open files")

        patched.setattr(socket, "socketpair", refuse)
        with pytest.raises(ConnectError, match="Too many open files"):
            Client.bind(endpoints)


@pytest.mark.parametrize(("send_timeout", "milliseconds"), [(1.0, 25_000), (60.0, 60_000)])
def test_how_long_a_host_may_acknowledge_nothing(send_timeout: float, milliseconds: int) -> None:
    """Not for ever, and longer than an engine may leave unread what it is sent."""
    binder = _Binder(1000, send_timeout)
    try:
        bound, _ = binder.bind(zmq.ROUTER, "tcp://127.0.0.1:*")
        assert bound.getsockopt(zmq.TCP_MAXRT) == milliseconds
    finally:
        binder.undo()


CONTEXT = """
import contextvars, gc, weakref
from tszmq import Client
variable = contextvars.ContextVar("variable")
first = Client.bind("tcp://127.0.0.1:*")
token = variable.set(first)
with Client.bind("tcp://127.0.0.1:*"):
    variable.reset(token)
    seen = weakref.ref(first)
    del first, token
    gc.collect()
    assert seen() is None
"""


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="before, threads have a context of their own"
)
def test_threads_keep_nothing_of_their_makers_context():
    subprocess.run(
        [sys.executable, "-X", "thread_inherit_context=1", "-c", CONTEXT], check=True, timeout=20
    )
