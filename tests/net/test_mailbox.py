"""The mailbox: what is posted arrives, and rings, whoever posts it and wherever."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.parts import interrupt_everywhere
from tests.mock_engine import PATIENCE, in_thread
from tszmq.net.mailbox import Mailbox

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def rings(mailbox: Mailbox, seconds: float = 0) -> bool:
    """Whether the control thread's poller would return within that time."""
    return bool(select.select([mailbox.fileno()], [], [], seconds)[0])


def drain(mailbox: Mailbox) -> list[Any]:
    items = mailbox.take()
    taken = []
    while items:
        taken.append(items.popleft())
    return taken


def test_a_post_rings_and_arrives(mailbox):
    assert not rings(mailbox)
    mailbox.post("one")
    assert rings(mailbox)
    assert drain(mailbox) == ["one"]
    assert not rings(mailbox)


def test_posts_keep_their_order(mailbox):
    for number in range(1000):
        mailbox.post(number)
    assert drain(mailbox) == list(range(1000))


def test_one_byte_rings_for_all_until_it_is_taken(mailbox):
    """Or a hundred thousand posts would fill the socket."""
    for number in range(1000):
        mailbox.post(number)
    assert len(mailbox._reader.recv(4096)) == 1
    assert drain(mailbox) == list(range(1000))
    mailbox.post("again")
    assert rings(mailbox)


def test_a_post_while_the_items_are_taken_rings_again(mailbox):
    mailbox.post("one")
    items = mailbox.take()
    mailbox.post("two")
    assert rings(mailbox)
    assert [items.popleft(), items.popleft()] == ["one", "two"]


def test_a_post_between_the_drained_byte_and_the_flag_is_taken(mailbox):
    """Whoever posts there sees the old flag and does not ring; the taker must see the item."""

    class Reader:
        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner

        def recv(self, size: int) -> bytes:
            try:
                return self.inner.recv(size)
            except BlockingIOError:
                mailbox.post("late")
                raise

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    mailbox.post("early")
    mailbox._reader = Reader(mailbox._reader)
    assert drain(mailbox) == ["early", "late"]
    mailbox._reader = mailbox._reader.inner
    mailbox.post("next")
    assert rings(mailbox)


def test_no_ring_is_lost_between_many_posters_and_the_taker(mailbox):
    """The taker sleeps until it rings; one lost ring and it sleeps over something posted."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    posters, each = 6, 3000
    received: list[list[int]] = [[] for _ in range(posters)]
    credit = threading.Semaphore(0)

    def post(me: int) -> None:
        for number in range(each):
            mailbox.post((me, number))
            if number % 7 == 0:
                # Let it run dry, so that nobody else's ring hides a lost one.
                assert credit.acquire(timeout=PATIENCE), "a lost ring"

    def take() -> None:
        left = posters * each
        while left:
            assert rings(mailbox, PATIENCE), "a lost ring"
            for me, number in drain(mailbox):
                received[me].append(number)
                left -= 1
                if number % 7 == 0:
                    credit.release()

    try:
        taking = in_thread(take)
        posting = [in_thread(post, me) for me in range(posters)]
        for future in (*posting, taking):
            future.result(2 * PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    assert received == [list(range(each))] * posters


def test_a_post_in_a_signal_handler_or_a_finalizer_arrives(mailbox):
    """Both may run in the middle of a post of the same thread."""

    class Posts:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            mailbox.post("finalizer")

    def handler(*_: Any) -> None:
        mailbox.post("handler")

    before = signal.signal(signal.SIGALRM, handler)
    taken: list[str] = []
    gc.freeze()  # what other tests left is not looked at each time
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        deadline = time.monotonic() + PATIENCE
        while taken.count("handler") < 30:
            assert time.monotonic() < deadline
            mailbox.post("plain")
            Posts()
            if len(taken) % 20 == 0:
                gc.collect()
            taken += drain(mailbox)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.unfreeze()
    gc.collect()
    taken += drain(mailbox)
    assert taken.count("plain") >= 10
    assert taken.count("finalizer") == taken.count("plain")
    mailbox.post("after")
    assert rings(mailbox)


def test_a_post_that_a_signal_cut_off_leaves_a_mailbox_that_rings():
    def prepare():
        mailbox = Mailbox()

        def verify():
            posted = list(mailbox._items)
            # Either it was not posted at all, or it rings for it.
            assert not posted or rings(mailbox) or not mailbox._rung
            mailbox.post("next")
            assert rings(mailbox)
            assert drain(mailbox)[-1] == "next"
            mailbox.close()

        return lambda: mailbox.post("cut off"), verify

    assert interrupt_everywhere(prepare) >= 2


def test_a_full_socket_does_not_block_a_poster(mailbox):
    with contextlib.suppress(BlockingIOError):
        while True:
            mailbox._writer.send(b"\0" * 4096)
    started = time.monotonic()
    mailbox.post("one")
    assert time.monotonic() - started < PATIENCE
    assert rings(mailbox)
    assert drain(mailbox) == ["one"]
    assert not rings(mailbox)


def test_a_post_after_the_end_is_nobodys(mailbox):
    mailbox.close()
    mailbox.post("late")
    mailbox._rung = False
    mailbox.post("later")


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(20):
        mailbox = Mailbox()
        mailbox.post("one")
        mailbox.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before
