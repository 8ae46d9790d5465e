"""Addresses: what may be bound, what is refused and why, and what is left on disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from tests.mock_engine import PATIENCE, in_thread
from tszmq import Client
from tszmq.bound import BoundClient
from tszmq.errors import ConnectError, InvalidRequest
from tszmq.net import addresses, sockets
from tszmq.net.addresses import (
    IPC_PATH_BYTES,
    IpcFiles,
    binding_alone,
    check_endpoints,
    claim_ipc_path,
    ipc_path,
    is_loopback,
    is_tcp,
    tcp_host,
)
from tszmq.types import Endpoints

pytestmark = pytest.mark.timeout(10)


@pytest.fixture
def short() -> Iterator[Path]:
    """A private directory whose path leaves room for socket names."""
    path = tempfile.mkdtemp(prefix="tz-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:30500", "127.0.0.1"),
        ("tcp://localhost:*", "localhost"),
        ("tcp://[::1]:5", "::1"),
        ("tcp://*:5", "*"),
    ],
)
def test_parts_of_a_tcp_address(address, host):
    assert is_tcp(address)
    assert tcp_host(address) == host


def test_parts_of_an_ipc_address():
    assert not is_tcp("ipc:///run/x")
    assert ipc_path("ipc:///run/x") == "/run/x"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("*", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("localhost.example.org", False),
        ("lo", False),
        ("", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:30500",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:0",
        "tcp://[::1]:65535",
        "tcp://localhost:1",
        "ipc:///run/ts/handshake.sock",
    ],
)
def test_good_addresses(address):
    assert check_endpoints(address, False) == Endpoints(address)
    whole = Endpoints("ipc:///a", address, address)
    assert check_endpoints(whole, False) == whole


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("", "must begin with tcp:// or ipc://"),
        ("127.0.0.1:30500", "must begin with"),
        ("inproc://x", "must begin with"),
        ("TCP://127.0.0.1:1", "must begin with"),
        ("tcp://", "must look like"),
        ("tcp://127.0.0.1", "must look like"),
        ("tcp://127.0.0.1:", "must look like"),
        ("tcp://:30500", "must look like"),
        ("tcp://127.0.0.1:65536", "must look like"),
        ("tcp://127.0.0.1:-1", "must look like"),
        ("tcp://127.0.0.1:http", "must look like"),
        ("tcp://0.0.0.0:1", "can be reached from other machines"),
        ("tcp://*:1", "can be reached from other machines"),
        ("tcp://example.org:1", "allow_remote=True"),
        ("ipc://", "must name a file"),
        ("ipc://@abstract", "must name a file"),
        ("ipc://*", "must name a file"),
        ("ipc://" + "x" * (IPC_PATH_BYTES + 1), f"is {IPC_PATH_BYTES + 1} bytes long"),
        ("ipc://" + "é" * (IPC_PATH_BYTES // 2 + 1), "bytes long"),
        ("ipc:///a\0b", "path"),
    ],
)
@pytest.mark.parametrize("what", ["handshake", "input", "output"])
def test_bad_addresses_are_refused_by_name(address, text, what):
    endpoints = Endpoints(**{"handshake": "ipc:///a", what: address})
    with pytest.raises(InvalidRequest, match=f"the {what} ") as caught:
        check_endpoints(endpoints, False)
    assert text in str(caught.value)


def test_remote_binding_has_to_be_asked_for():
    for address in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:*"):
        assert check_endpoints(address, True).handshake == address


def test_the_longest_path_is_taken():
    check_endpoints("ipc://" + "x" * IPC_PATH_BYTES, False)


def test_relative_paths_become_absolute(short, monkeypatch):
    """Wherever the process and its engines are later."""
    (short / "elsewhere" / "inner").mkdir(parents=True)
    (short / "link").symlink_to(short / "elsewhere" / "inner")
    monkeypatch.chdir(short)
    endpoints = check_endpoints(Endpoints("ipc://./h", "ipc://link/../i", "ipc://o"), False)
    here = os.path.realpath(short)
    assert endpoints.handshake == f"ipc://{here}/h"
    assert endpoints.input == f"ipc://{here}/elsewhere/i"
    assert endpoints.output == f"ipc://{here}/o"
    given = Endpoints("ipc:///a/./b", "tcp://127.0.0.1:*", None)
    assert check_endpoints(given, False) == given


@pytest.mark.parametrize("deep", [False, True])
def test_a_relative_path_is_removed_from_another_directory(short, monkeypatch, deep):
    """Also one that is too long to be bound by its whole name."""
    directory = short / ("x" * IPC_PATH_BYTES if deep else "x")
    directory.mkdir(mode=0o700)
    monkeypatch.chdir(directory)
    with Client.bind(Endpoints("ipc://./h", "ipc://i", "tcp://127.0.0.1:*")) as bound:
        assert sorted(os.listdir(directory)) == ["h", "i"]
        assert os.path.isabs(ipc_path(bound.endpoints.handshake)) is not deep
        monkeypatch.chdir(short)
    assert os.listdir(directory) == []


def test_a_relative_path_in_a_directory_that_was_removed(short, monkeypatch):
    gone = short / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConnectError):
        Client.bind("ipc://./h")


@pytest.mark.parametrize("endpoints", [None, 7, b"tcp://127.0.0.1:1", ["tcp://127.0.0.1:1"]])
def test_other_types_are_refused(endpoints):
    with pytest.raises(TypeError, match="endpoints must be an address"):
        check_endpoints(endpoints, False)


@pytest.mark.parametrize("address", [None, 7, b"tcp://127.0.0.1:1"])
def test_other_types_inside_are_refused(address):
    with pytest.raises(TypeError, match="the handshake address must be a str"):
        check_endpoints(Endpoints(address), False)


# --- what stands at the path -----------------------------------------------------------------


def test_a_free_path_is_claimed_and_its_directory_made(short):
    path = short / "new" / "handshake.sock"
    claim_ipc_path(str(path))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_a_live_socket_is_not_taken_over(short):
    path = str(short / "s")
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(path)
        live.listen()
        with pytest.raises(ConnectError, match="is in use"):
            claim_ipc_path(path)
        assert os.path.exists(path)
    claim_ipc_path(path)  # dead now: what is left over is cleared away
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_anything_else_is_left_alone(short, kind):
    path = short / "s"
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(short / "elsewhere")
    with pytest.raises(ConnectError, match="is not a socket: it is left alone"):
        claim_ipc_path(str(path))
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o700, True), (0o755, True), (0o1777, True), (0o777, False), (0o770, False)]
)
def test_a_directory_in_which_others_could_replace_it(short, mode, fine):
    os.chmod(short, mode)
    if fine:
        claim_ipc_path(str(short / "s"))
    else:
        with pytest.raises(ConnectError, match=f"has mode {mode:04o}"):
            claim_ipc_path(str(short / "s"))


def test_a_directory_that_is_none(short):
    (short / "file").write_text("")
    with pytest.raises(ConnectError, match="cannot use the ipc path"):
        claim_ipc_path(str(short / "file" / "s"))


# --- two at once -------------------------------------------------------------------------------


def test_one_of_two_that_bind_at_once_wins(short, monkeypatch):
    """The other one comes between the first one's look at the path and its binding there."""
    monkeypatch.setattr(addresses, "_LOCK_SECONDS", 60.0)
    endpoints = Endpoints(f"ipc://{short}/h")
    others: list[Future[BoundClient]] = []
    claim = sockets.claim_ipc_path

    def interfere(path: str) -> None:
        claim(path)
        if path == f"{short}/h" and not others:
            others.append(in_thread(Client.bind, endpoints))
            wait([others[0]], 0.5)

    monkeypatch.setattr(sockets, "claim_ipc_path", interfere)
    with Client.bind(endpoints):
        with pytest.raises(ConnectError, match="is in use"):
            others[0].result(PATIENCE).close()
        assert os.listdir(short) == ["h"]
    assert os.listdir(short) == []


def test_three_addresses_in_one_directory_under_two_names(short, monkeypatch):
    """A lock that is already ours is not waited for."""
    (short / "link").symlink_to(short)
    monkeypatch.setattr(addresses, "_LOCK_SECONDS", 60.0)
    with Client.bind(Endpoints(f"ipc://{short}/h", f"ipc://{short}/link/i", f"ipc://{short}/o")):
        assert sorted(os.listdir(short)) == ["h", "i", "link", "o"]


def test_a_directory_that_somebody_keeps_locked(short, monkeypatch):
    """It is bound all the same."""
    monkeypatch.setattr(addresses, "_LOCK_SECONDS", 0.05)
    descriptor = os.open(short, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Client.bind(f"ipc://{short}/h").close()
    finally:
        os.close(descriptor)


def test_the_lock_is_let_go(short):
    """A client that is open, or was refused, keeps nobody out."""
    descriptor = os.open(short, os.O_RDONLY)
    try:
        with Client.bind(f"ipc://{short}/h"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            with pytest.raises(ConnectError):
                Client.bind(f"ipc://{short}/h")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def descriptors() -> set[str]:
    """Those that are open, without the listing's own."""
    listed = os.listdir("/proc/self/fd")
    return {number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are looked up there")
def test_no_descriptor_stays_and_a_copy_of_one_holds_up_nobody(short):
    """A process that forks meanwhile has copies for as long as it lives."""
    (short / "link").symlink_to(short)
    before = descriptors()
    with binding_alone(Endpoints(f"ipc://{short}/h", f"ipc://{short}/link/i")):
        [opened] = descriptors() - before
        copy = os.dup(int(opened))
    try:
        descriptor = os.open(short, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    finally:
        os.close(copy)
    assert descriptors() == before


# --- our files ---------------------------------------------------------------------------------


def bind(path: str) -> None:
    """A socket's file, as libzmq leaves it."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)


def test_private_addresses_are_in_one_directory_of_our_own():
    files = IpcFiles()
    one, other = (ipc_path(files.private_address(name)) for name in ("in", "out"))
    directory = os.path.dirname(one)
    assert os.path.dirname(other) == directory
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    for path in (one, other):
        bind(path)
        files.bound(path)
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    files.remove()
    assert not os.path.exists(directory)
    files.remove()  # again is nothing


def test_a_long_temporary_directory_is_gone_round(short, monkeypatch):
    long = short / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    files = IpcFiles()
    path = ipc_path(files.private_address("out"))
    assert len(os.fsencode(path)) <= IPC_PATH_BYTES
    assert list(long.iterdir()) == []
    files.remove()
    assert not os.path.exists(os.path.dirname(path))


def test_what_somebody_else_has_put_there_stays(short):
    files = IpcFiles()
    path = short / "s"
    bind(str(path))
    files.bound(str(path))
    aside = short / "aside"
    path.rename(aside)  # keeps its inode from being used again
    bind(str(path))
    files.remove()
    assert path.exists()
    assert aside.exists()


def test_what_was_only_expected_is_removed_if_it_is_a_dead_socket(short):
    """A signal came before it could be said that it was bound."""
    files = IpcFiles()
    dead, living, other = short / "dead", short / "living", short / "other"
    bind(str(dead))
    other.write_text("")
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.bind(str(living))
        somebody.listen()
        for path in (dead, living, other, short / "absent"):
            files.expect(str(path))
        files.remove()
    assert {path.name for path in short.iterdir()} == {"living", "other"}


def test_a_private_directory_with_something_in_it_stays():
    files = IpcFiles()
    directory = Path(ipc_path(files.private_address("in"))).parent
    (directory / "other").write_text("")
    files.remove()
    assert (directory / "other").exists()
    shutil.rmtree(directory)
