"""Who is at the other end of a connection."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tszmq.net.peers import CLOSED, Attribution, Connections, inode, local_host, peer_pid
from tszmq.net.sockets import NOWHERE

pytestmark = pytest.mark.timeout(10)

needs_credentials = pytest.mark.skipif(
    not hasattr(socket, "SO_PEERCRED"), reason="this kernel does not say who a peer is"
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def tcp_pair(family: int, host: str) -> tuple[socket.socket, socket.socket]:
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        one = socket.create_connection(listener.getsockname()[:2])
        return one, listener.accept()[0]


@needs_credentials
def test_the_process_at_the_other_end(pair):
    assert peer_pid(pair[0].fileno()) == os.getpid()
    pair[0].getpeername()  # still open


@needs_credentials
def test_the_process_of_a_child(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen()
        pid = os.posix_spawn(
            sys.executable,
            [
                sys.executable,
                "-Sc",
                "import socket; s = socket.socket(socket.AF_UNIX); s.connect('s'); s.recv(1)",
            ],
            dict(os.environ),
        )
        try:
            listener.settimeout(8)
            with listener.accept()[0] as connection:
                assert peer_pid(connection.fileno()) == pid
        finally:
            os.waitpid(pid, 0)


def test_tcp_says_nothing_of_processes():
    for end in tcp_pair(socket.AF_INET, "127.0.0.1"):
        with end:
            assert peer_pid(end.fileno()) is None


def test_our_own_address_as_the_peer_sees_it(pair):
    for end in tcp_pair(socket.AF_INET, "127.0.0.1"):
        with end:
            assert local_host(end.fileno()) == "127.0.0.1"
    assert local_host(pair[0].fileno()) is None


def test_ipv6_has_brackets():
    try:
        ends = tcp_pair(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    for end in ends:
        with end:
            assert local_host(end.fileno()) == "[::1]"


def test_a_descriptor_that_is_closed_already():
    """libzmq closes it whenever it likes."""
    one, other = socket.socketpair()
    fd = one.fileno()
    one.close()
    other.close()
    for gone in (fd, NOWHERE):
        assert peer_pid(gone) in (CLOSED, None)
        assert local_host(gone) is None


def test_a_descriptor_that_is_no_socket_any_more(tmp_path: Path):
    with (tmp_path / "file").open("w") as file:
        free = os.dup(file.fileno())
        os.close(free)
        assert peer_pid(file.fileno()) in (CLOSED, None)
        assert local_host(file.fileno()) is None
        assert os.dup(file.fileno()) == free  # none is left open
        os.close(free)


@pytest.mark.parametrize("blocks", [True, False])
def test_looking_changes_nothing(pair, blocks):
    """The descriptor may be anybody's by then."""
    socket.setdefaulttimeout(30)
    try:
        for end in pair:
            os.set_blocking(end.fileno(), blocks)
            peer_pid(end.fileno())
            local_host(end.fileno())
            assert os.get_blocking(end.fileno()) is blocks
    finally:
        socket.setdefaulttimeout(None)


LOCK_PROBE = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_a_file_that_took_the_descriptor_keeps_its_locks(tmp_path: Path):
    """Those that a process loses as soon as it closes any descriptor of the file."""
    path = tmp_path / "file"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert peer_pid(file.fileno()) == CLOSED
        assert local_host(file.fileno()) is None
        probe = subprocess.run([sys.executable, "-c", LOCK_PROBE, str(path)], capture_output=True)
        assert b"BlockingIOError" in probe.stderr


# --- connections -----------------------------------------------------------------------------


def test_an_inode_tells_a_descriptor_from_its_successor(pair):
    fd = pair[0].fileno()
    before = inode(fd)
    assert before is not None
    assert inode(fd) == before
    assert inode(pair[1].fileno()) != before
    other = socket.socket()
    os.dup2(other.fileno(), fd)  # the same descriptor, another socket
    assert inode(fd) == inode(other.fileno()) != before
    other.close()
    pair[0].close()
    assert inode(fd) is None


@pytest.fixture
def inodes(monkeypatch) -> dict[int, int]:
    """What is open: descriptor to inode; the test opens and closes."""
    opened = {10: 1010, 11: 1011, 12: 1012, 13: 1013}
    monkeypatch.setattr("tszmq.net.peers.inode", opened.get)
    return opened


def test_a_connection_keeps_its_number_until_it_is_gone(inodes):
    connections = Connections()
    number = connections.number(10, True)
    assert connections.number(10, True) == number
    assert connections.number(11, True) != number
    assert connections.closed(10) == []  # reported just before it is closed
    assert connections.descriptors() == [10, 11]
    del inodes[10]
    assert connections.closed(10) == [number]
    assert connections.closed(10) == []
    assert connections.descriptors() == [11]


def test_a_successor_at_the_descriptor_is_another_connection(inodes):
    connections = Connections()
    old = connections.number(10, True)
    inodes[10] = 2010
    new = connections.number(10, True)
    assert new != old
    assert connections.closed(10) == [old]
    assert connections.descriptors() == [10]
    del inodes[10]
    assert connections.closed(10) == [new]


def test_one_that_was_closed_before_its_message_was_read_is_nobody_elses(inodes):
    connections = Connections()
    del inodes[10]
    one, two = connections.number(10, True), connections.number(10, False)
    assert one != two
    assert sorted(connections.closed(10)) == sorted([one, two])
    inodes[10] = 2010
    assert connections.number(10, True) not in (one, two)


# --- attribution -----------------------------------------------------------------------------


@pytest.fixture
def sources(inodes, monkeypatch) -> Attribution:
    """The processes behind descriptors 10 to 13: 100, 101, not known, closed."""
    pids = {10: 100, 11: 101, 13: CLOSED}
    monkeypatch.setattr("tszmq.net.peers.peer_pid", pids.get)
    made = Attribution()
    made.join(0, 100)
    made.join(1, 101)
    return made


def test_a_readable_batch_tells_whose_connection_it_is(sources, inodes):
    assert not sources.knows(0)
    sources.learn(0, 12)
    assert sources.knows(0)
    assert sources.suspects(12, [0, 1]) == [0]
    del inodes[12]
    assert sources.closed(12) == 0
    assert not sources.knows(0)
    assert sources.closed(12) is None


def test_before_that_the_process_tells(sources):
    assert sources.suspects(10, [0, 1]) == [0]
    assert sources.suspects(11, [0, 1]) == [1]
    assert sources.suspects(10, [1]) == []


def test_whose_a_connection_is_known_to_be(sources):
    """By a batch that came there, or by the process that has it; by nothing else."""
    assert [sources.is_of(10, index) for index in (0, 1)] == [True, False]
    assert not sources.is_of(12, 0)  # nothing tells
    assert not sources.is_of(13, 0)  # gone
    sources.join(2, None)
    assert not sources.is_of(12, 2)
    sources.learn(0, 12)
    assert [sources.is_of(12, index) for index in (0, 1)] == [True, False]
    assert not sources.is_of(10, 0)  # its process's, and another connection


def test_where_nothing_tells_all_that_are_not_known_are_suspects(sources):
    assert sources.suspects(12, [0, 1]) == [0, 1]
    sources.learn(0, 10)
    assert sources.suspects(12, [0, 1]) == [1]
    sources.learn(1, 11)
    assert sources.suspects(12, [0, 1]) == []


def test_a_connection_that_is_gone_is_no_living_engines(sources):
    assert sources.suspects(13, [0, 1]) == []
    sources.learn(0, 13)
    assert sources.suspects(13, [0, 1]) == [0]


def test_an_engine_whose_process_is_not_known_stays_a_suspect(sources):
    """It came over tcp, as did its output."""
    sources.join(2, None)
    assert sources.suspects(12, [0, 1, 2]) == [0, 1, 2]
    assert sources.suspects(10, [0, 1, 2]) == [0, 2]


def test_several_engines_of_one_process(sources):
    sources.join(2, 100)
    assert sources.suspects(10, [0, 1, 2]) == [0, 2]
    sources.learn(0, 10)
    assert sources.suspects(10, [0, 1, 2]) == [0]


def test_a_dead_engine_is_no_suspect(sources):
    sources.learn(0, 10)
    assert sources.suspects(10, [1]) == []


def test_the_connection_of_a_predecessor_is_forgotten(sources):
    sources.learn(0, 10)
    sources.join(0, 105)
    assert not sources.knows(0)
    assert sources.closed(10) is None
    assert sources.suspects(10, [0, 1]) == []  # another process


def test_a_new_connection_replaces_the_old(sources, inodes):
    sources.learn(0, 10)
    sources.learn(0, 12)
    inodes.clear()
    assert sources.closed(10) is None
    assert sources.knows(0)
    assert sources.closed(12) == 0


def test_a_descriptor_used_again_by_another_engine(sources, inodes):
    """The kernel hands out the lowest one free."""
    sources.learn(0, 10)
    del inodes[10]
    assert sources.closed(10) == 0
    inodes[10] = 2010
    sources.learn(1, 10)
    assert sources.suspects(10, [0, 1]) == [1]
    sources.forget(0)
    del inodes[10]
    assert sources.closed(10) == 1


def test_the_end_of_a_predecessor_at_the_descriptor_is_not_the_successors(sources, inodes):
    """It is reported when the successor has spoken already."""
    inodes[10] = 2010
    sources.learn(1, 10)
    assert sources.closed(10) is None
    assert sources.knows(1)
