"""Addresses: what may be bound, what is refused and why, and what is left on disk."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tszmq.errors import ConnectError, InvalidRequest
from tszmq.net.addresses import (
    IPC_PATH_BYTES,
    IpcFiles,
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
        "ipc://relative.sock",
    ],
)
def test_good_addresses(address):
    assert check_endpoints(address, False) == Endpoints(address)
    whole = Endpoints("ipc:///a", address, address)
    assert check_endpoints(whole, False) is whole


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


def test_a_private_directory_with_something_in_it_stays():
    files = IpcFiles()
    directory = Path(ipc_path(files.private_address("in"))).parent
    (directory / "other").write_text("")
    files.remove()
    assert (directory / "other").exists()
    shutil.rmtree(directory)
