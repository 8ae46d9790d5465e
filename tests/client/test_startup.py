"""Binding addresses and waiting for engines."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from functools import partial

import pytest
import zmq

import tszmq
from tests.client_fixtures import answer_one
from tests.mock_engine import PATIENCE, UNIT, MockEngine, eventually, in_thread, stays_true
from tszmq import Client, Endpoints
from tszmq.bound import BoundClient
from tszmq.net.addresses import has_only_ipv6
from tszmq.sim import Fleet

pytestmark = pytest.mark.timeout(30)

LOOPBACK = "tcp://127.0.0.1:*"


def ipc_path(address: str | None) -> str:
    assert address is not None
    assert address.startswith("ipc://"), address
    return address.removeprefix("ipc://")


def all_alive(client: Client) -> bool:
    return all(info.alive for info in client.engines)


def check_bindable(address: str) -> None:
    """Nothing holds that address any more."""
    again = Client.bind(address)
    assert again.endpoints.handshake == address
    again.close()


@pytest.fixture
def stranger():
    """Makes sockets that belong to no engine."""
    context = zmq.Context()

    kept = []

    def make(kind, address, identity=None):
        sock = context.socket(kind)
        kept.append(sock)
        sock.linger = 0
        if identity is not None:
            sock.setsockopt(zmq.IDENTITY, identity)
        sock.connect(address)
        return sock

    yield make
    context.destroy(linger=0)


# --- engines that come ---------------------------------------------------------------------


def test_constructor_waits_for_the_engines(client_and_engines, short_dir):
    """It returns when every engine has registered, and not before."""
    address = f"ipc://{short_dir}/handshake.sock"
    call = in_thread(Client, address, engine_count=2)
    engines = [client_and_engines.engine(address, n).hello() for n in range(2)]
    for engine in engines:
        engine.wait_init()
        engine.ready()
    engines[0].register()
    stays_true(lambda: not call.done(), 0.2)
    engines[1].register()
    with call.result(PATIENCE) as client:
        assert client.is_alive
        assert [engine.engine_index for engine in client.engines] == [0, 1]
        for engine in engines:
            answer_one(client, engine)


def test_bind_returns_at_once(client_and_engines):
    """The addresses are bound; nobody has been waited for."""
    started = time.monotonic()
    bound = client_and_engines.bind(LOOPBACK, engine_count=3)
    assert time.monotonic() - started < PATIENCE
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", bound.endpoints.handshake)


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("first", ["ready", "register"])
def test_engines_in_any_order(client_and_engines, order, first):
    """READY and the registration are on different sockets, and race."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=3)
    call = in_thread(bound.connect)
    engines = [client_and_engines.engine(bound.endpoints.handshake, n) for n in (2, 0, 1)]
    for engine in engines:
        engine.hello()
    if order == "backwards":
        engines.reverse()
    for engine in engines:
        engine.wait_init()
    steps = ["ready", "register"] if first == "ready" else ["register", "ready"]
    for step in steps:
        for engine in engines:
            getattr(engine, step)()
    with call.result(PATIENCE) as client:
        assert sorted(engine.engine_index for engine in client.engines) == [0, 1, 2]
        for engine in engines:
            answer_one(client, engine)


def test_engine_that_dials_before_the_client_binds(client_and_engines, short_dir):
    """Engines and clients start in any order."""
    address = f"ipc://{short_dir}/handshake.sock"
    engine = client_and_engines.engine(address, 0).hello()
    bound = client_and_engines.bind(address)
    call = in_thread(bound.connect)
    engine.finish_connect()
    with call.result(PATIENCE) as client:
        answer_one(client, engine)


@pytest.mark.parametrize("indexes", [[0], [7], [0, 255, 256, 65535], [2, 3]])
def test_engines_of_any_index(client_and_engines, indexes):
    """The index is the two-byte identity; pins follow it."""
    client, engines = client_and_engines(indexes=indexes)
    assert sorted(engine.engine_index for engine in client.engines) == sorted(indexes)
    for engine in engines:
        assert answer_one(client, engine).engine_index == engine.index


def test_registration_is_shown(client_and_engines):
    """What the engine registered with, under neutral names."""
    client, _ = client_and_engines(
        engine={
            "max_model_len": 131072,
            "num_gpu_blocks": 6661,
            "data_parallel_size": 4,
            "data_parallel_rank": 2,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": -1,
            "kv_cache_size_tokens": 426240,
            "something_new": [1, 2],
        }
    )
    [info] = client.engines
    assert (info.engine_index, info.alive) == (0, True)
    assert (info.max_model_len, info.num_gpu_blocks, info.block_size) == (131072, 6661, 64)
    assert (info.dtype, info.engine_version) == ("bfloat16", "tokenspeed-0.1.1")
    assert (info.data_parallel_size, info.data_parallel_rank) == (4, 2)
    assert (info.max_num_seqs, info.kv_cache_size_tokens) == (1024, 426240)
    with pytest.raises(AttributeError):
        info.alive = False


def test_both_spellings_of_the_block_size(client_and_engines):
    """Older engines say block_size, newer ones prefix_granularity."""
    old = {"prefix_granularity": ..., "multimodal_encoder_dtype": ..., "block_size": 32}
    client, _ = client_and_engines(engine=old)
    assert client.engines[0].block_size == 32
    client, _ = client_and_engines(engine={"prefix_granularity": 16})
    assert client.engines[0].block_size == 16


# --- strangers -----------------------------------------------------------------------------


def test_strangers_on_the_handshake_socket(client_and_engines, stranger):
    """Scrapers, scanners and junk are ignored, before and between the engines' messages."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=1)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect)
    engine = client_and_engines.engine(address)

    def disturb():
        scraper = stranger(zmq.DEALER, address, b"scrape")
        scraper.send_multipart([b"scrape", b"a", b"b"])
        scraper.send(b"")
        scraper.send(b"\xff" * 1_000_000)
        unknown = stranger(zmq.DEALER, address, b"\x09\x00")
        ready = MockEngine(address, 9)
        ready.say("READY")  # of an engine that never said HELLO
        ready.close(flush=True)
        unknown.send(b"\xc1")
        unknown.send_multipart([b"", b"\x80"])
        stranger(zmq.DEALER, address).send(b"\x81\xa6status\xa5HELLO")
        stranger(zmq.DEALER, address, b"abc").send(b"\x81\xa6status\xa5HELLO")
        stranger(zmq.REQ, address).send(b"hello")
        host, _, port = address.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port)), 5) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    disturb()
    engine.hello()
    engine.wait_init()
    disturb()
    engine.ready()
    disturb()
    stays_true(lambda: not call.done(), 0.2)
    engine.register()
    client = call.result(PATIENCE)
    assert [info.engine_index for info in client.engines] == [0]
    disturb()
    answer_one(client, engine)
    client.close()


def test_strangers_on_the_input_socket(client_and_engines, stranger):
    """Junk where registrations come, before and after them."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=1)
    call = in_thread(bound.connect)
    engine = client_and_engines.engine(bound.endpoints.handshake).hello()
    address = engine.wait_init()["addresses"]["inputs"][0]
    for identity in (b"scrape", b"\x07\x00", None):
        junk = stranger(zmq.DEALER, address, identity)
        junk.send(b"")
        junk.send(b"\xc1")
        junk.send_multipart([b"a", b"b", b"c"])
        junk.send(b"\xff" * 100_000)
    engine.ready()
    stays_true(lambda: not call.done(), 0.2)
    engine.register()
    client = call.result(PATIENCE)
    assert [info.engine_index for info in client.engines] == [0]
    stranger(zmq.DEALER, address, b"late").send_multipart([b"x"] * 3)
    answer_one(client, engine)
    client.close()


# --- engines that do not come --------------------------------------------------------------


def test_timeout_names_who_never_said_hello(client_and_engines):
    """Stage, number and indexes of the missing; the address is free again."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=3)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect, 1.5 * UNIT)
    for index in (0, 1):
        client_and_engines.engine(address, index).connect()
    with pytest.raises(tszmq.HandshakeTimeout) as caught:
        call.result(PATIENCE)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, tszmq.ConnectError)
    message = str(caught.value)
    assert "hello" in message.lower()
    assert "1 of 3 engines missing" in message
    assert re.search(r"\b2\b", message.partition("missing")[2])
    assert message.endswith("start those anew that served an earlier client.")
    check_bindable(address)


def test_timeout_names_who_did_not_register(client_and_engines):
    """An engine that got INIT and then was never heard of again."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=2)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect, 1.5 * UNIT)
    client_and_engines.engine(address, 0).connect()
    client_and_engines.engine(address, 41).hello().wait_init()
    with pytest.raises(tszmq.HandshakeTimeout, match=r"\b41\b") as caught:
        call.result(PATIENCE)
    assert re.search(r"regist|ready", str(caught.value).lower())
    check_bindable(address)


def test_constructor_times_out_and_releases(short_dir):
    """connect_timeout; ipc files are gone and the address can be bound at once."""
    address = f"ipc://{short_dir}/handshake.sock"
    started = time.monotonic()
    with pytest.raises(tszmq.HandshakeTimeout):
        Client(address, connect_timeout=0.3)
    assert 0.28 <= time.monotonic() - started < PATIENCE
    assert os.listdir(short_dir) == []
    check_bindable(address)


def test_connect_uses_the_timeout_it_was_bound_with():
    """connect() without an argument."""
    bound = Client.bind(LOOPBACK, connect_timeout=0.3)
    started = time.monotonic()
    with pytest.raises(tszmq.HandshakeTimeout):
        bound.connect()
    assert 0.28 <= time.monotonic() - started < PATIENCE


def test_close_from_another_thread_ends_the_wait():
    """ClientClosed within half a second; the address is free."""
    bound = Client.bind(LOOPBACK)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect)
    stays_true(lambda: not call.done(), 0.2)
    started = time.monotonic()
    bound.close()
    with pytest.raises(tszmq.ClientClosed):
        call.result(PATIENCE)
    assert time.monotonic() - started < PATIENCE
    check_bindable(address)
    bound.close()


def test_connect_after_close():
    """A closed one does not wait."""
    bound = Client.bind(LOOPBACK)
    bound.close()
    with pytest.raises(tszmq.ClientClosed):
        bound.connect()


def test_bound_client_that_is_never_connected():
    """Closing it, or leaving its block, frees everything."""
    threads = threading.active_count()
    with Client.bind(LOOPBACK) as bound:
        address = bound.endpoints.handshake
        directory = os.path.dirname(ipc_path(bound.endpoints.input))
        assert os.path.isdir(directory)
    assert not os.path.exists(directory)
    check_bindable(address)
    eventually(lambda: threading.active_count() <= threads)


def test_ctrl_c_ends_the_wait(short_dir):
    """KeyboardInterrupt soon, and everything bound is released."""
    address = f"ipc://{short_dir}/handshake.sock"
    main = threading.main_thread().ident
    assert main is not None
    previous = signal.getsignal(signal.SIGINT)

    def interrupt():
        eventually(lambda: os.path.exists(f"{short_dir}/handshake.sock"))
        threading.Event().wait(0.2)
        signal.pthread_kill(main, signal.SIGINT)
        return time.monotonic()

    call = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        Client(address, connect_timeout=10)
    assert time.monotonic() - call.result(PATIENCE) < PATIENCE
    assert signal.getsignal(signal.SIGINT) is previous
    assert os.listdir(short_dir) == []
    check_bindable(address)


# --- the same index twice ------------------------------------------------------------------


def test_second_hello_of_a_living_engine_waits(client_and_engines, caplog):
    """Neither is hurt; when the first dies the second is served."""
    client, [first] = client_and_engines()
    second = client_and_engines.engine(client.endpoints.handshake, 0)
    with caplog.at_level(logging.WARNING, "tszmq"):
        second.hello()
        eventually(lambda: any("index 0, which is taken" in r.message for r in caplog.records))
    stays_true(lambda: not second.has_init(), 0.3)
    answer_one(client, first)
    with client.stream([1]) as stream:
        first.recv_add()
        first.close()
        with pytest.raises(tszmq.EngineDead):
            next(stream)
    second.finish_connect()
    eventually(lambda: client.engines[0].alive)
    assert answer_one(client, second).engine_index == 0


def test_a_log_line_holds_only_so_much_of_a_registration(client_and_engines, caplog):
    """And is one line, whatever the engine says."""
    with caplog.at_level(logging.INFO, "tszmq"):
        client, _ = client_and_engines(engine={"vllm_version": "1\nERROR forged" + "x" * 100_000})
        # It is logged after whoever waits for the engine has been woken.
        eventually(lambda: any("registered" in r.getMessage() for r in caplog.records))
    [line] = [r.getMessage() for r in caplog.records if "registered" in r.getMessage()]
    assert "engine 0 registered (version '1\\nERROR" in line
    assert len(line) < 200
    assert len(client.engines[0].engine_version) > 100_000


def test_an_engine_too_many_is_said_to_be_one(client_and_engines, caplog):
    client, [first] = client_and_engines()
    other = client_and_engines.engine(client.endpoints.handshake, 7)
    with caplog.at_level(logging.WARNING, "tszmq"):
        other.hello()
        eventually(lambda: any("larger engine_count" in r.message for r in caplog.records))
    assert "index 7, one more than the 1 expected" in caplog.text
    stays_true(lambda: not other.has_init(), 0.1)
    answer_one(client, first)


def test_second_hello_during_start_up_waits(client_and_engines):
    """It does not count as the missing engine, and gets its turn later."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=2)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect)
    first = client_and_engines.engine(address, 0).hello()
    first.wait_init()
    second = client_and_engines.engine(address, 0).hello()
    stays_true(lambda: not second.has_init() and not call.done(), 0.3)
    first.ready()
    first.register()
    stays_true(lambda: not second.has_init() and not call.done(), 0.2)
    other = client_and_engines.engine(address, 1).connect()
    client = call.result(PATIENCE)
    for engine in (first, other):
        answer_one(client, engine)
    first.close()
    second.finish_connect()
    eventually(lambda: all(info.alive for info in client.engines))
    for engine in (second, other):
        answer_one(client, engine)
    client.close()


@pytest.mark.parametrize("stage", ["after HELLO", "after INIT", "after READY", "registered"])
def test_engine_that_dies_during_start_up_is_replaced(client_and_engines, stage):
    """Its successor says HELLO with the same index, and the start-up completes."""
    bound = client_and_engines.bind(LOOPBACK, engine_count=2)
    address = bound.endpoints.handshake
    call = in_thread(bound.connect)
    first = client_and_engines.engine(address, 0).hello()
    if stage != "after HELLO":
        first.wait_init()
    if stage in ("after READY", "registered"):
        first.ready()
    if stage == "registered":
        first.register()
    first.close(flush=True)
    second = client_and_engines.engine(address, 0).connect()
    other = client_and_engines.engine(address, 1).connect()
    client = call.result(PATIENCE)
    for engine in (second, other):
        answer_one(client, engine)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["after HELLO", "after INIT", "registered"])
def test_successor_that_comes_as_its_predecessor_goes(client_and_engines, stage):
    """Descriptors are reused at once: the end of one connection must not be taken for the
    end of the next. Each round hits that moment only sometimes."""
    for _ in range(20):
        bound = client_and_engines.bind(LOOPBACK, engine_count=2)
        address = bound.endpoints.handshake
        call = in_thread(bound.connect)
        first = client_and_engines.engine(address, 0).hello()
        if stage != "after HELLO":
            first.wait_init()
        if stage == "registered":
            first.ready()
            first.register()
        first.close(flush=True)
        engines = [client_and_engines.engine(address, n).hello() for n in range(2)]
        for engine in engines:
            engine.finish_connect()
        client = call.result(PATIENCE)
        eventually(partial(all_alive, client))
        for engine in engines:
            answer_one(client, engine)
        client.close()


@pytest.mark.slow
def test_engines_that_come_as_strangers_go(client_and_engines):
    """The same with connections that were nobody's."""
    for _ in range(20):
        bound = client_and_engines.bind(LOOPBACK, engine_count=2)
        address = bound.endpoints.handshake
        host, _, port = address.removeprefix("tcp://").partition(":")
        call = in_thread(bound.connect)
        engines = []
        for index in range(2):
            junk = MockEngine(address, 100)
            junk.say("junk")
            plain = socket.create_connection((host, int(port)), 5)
            junk.close(flush=True)
            plain.close()
            engines.append(client_and_engines.engine(address, index).hello())
        for engine in engines:
            engine.finish_connect()
        client = call.result(PATIENCE)
        for engine in engines:
            answer_one(client, engine)
        client.close()


@pytest.mark.slow
def test_engines_that_register_as_strangers_go(client_and_engines):
    """And the same on the data sockets: an engine is not dead because a scanner hung up."""
    for _ in range(20):
        bound = client_and_engines.bind(
            Endpoints(handshake=LOOPBACK, input=LOOPBACK, output=LOOPBACK), engine_count=2
        )
        call = in_thread(bound.connect)
        address = bound.endpoints.handshake
        engines = [client_and_engines.engine(address, n).hello() for n in range(2)]
        for engine in engines:
            engine.wait_init()
        scanners = []
        for number in range(8):
            context = zmq.Context()  # one each: ending it waits until the connection is closed
            scanner = context.socket(zmq.DEALER)
            scanner.connect(bound.endpoints.output if number % 2 else bound.endpoints.input)
            scanners.append((context, scanner))
        threading.Event().wait(0.02)  # for them to be accepted

        def hang_up(scanners=scanners):
            for context, scanner in scanners:
                scanner.close(linger=0)
                context.term()

        hanging_up = in_thread(hang_up)
        for engine in engines:
            engine.ready()
            engine.register()
        client = call.result(PATIENCE)
        hanging_up.result(PATIENCE)
        stays_true(partial(all_alive, client), 0.1)
        for engine in engines:
            answer_one(client, engine)
        client.close()


# --- addresses: ipc ------------------------------------------------------------------------


def test_ipc_path_of_the_longest_length(client_and_engines, short_dir):
    """107 bytes work."""
    path = f"{short_dir}/".ljust(107, "x")
    assert len(os.fsencode(path)) == 107
    client, [engine] = client_and_engines(endpoints=f"ipc://{path}")
    answer_one(client, engine)


@pytest.mark.parametrize("which", ["handshake", "input", "output"])
def test_ipc_path_that_is_too_long(short_dir, which):
    """Said with the limit, before anything is bound."""
    paths = {name: f"{short_dir}/{name}" for name in ("handshake", "input", "output")}
    paths[which] = f"{short_dir}/".ljust(108, "x")
    with pytest.raises((tszmq.TszmqError, ValueError), match="107"):
        Client.bind(Endpoints(**{name: f"ipc://{path}" for name, path in paths.items()}))
    assert os.listdir(short_dir) == []


def test_ipc_path_length_counts_bytes(short_dir):
    """Sixty characters of three bytes each."""
    name = "\u8bf7" * 60
    with pytest.raises((tszmq.TszmqError, ValueError), match="107"):
        Client.bind(f"ipc://{short_dir}/{name}")
    assert os.listdir(short_dir) == []


def test_left_over_socket_file_is_replaced(client_and_engines, short_dir):
    """A dead one of an earlier run."""
    path = short_dir / "handshake.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    client, [engine] = client_and_engines(endpoints=f"ipc://{path}")
    answer_one(client, engine)
    client.close()
    assert not path.exists()


def test_regular_file_is_left_alone(short_dir):
    """An error, and the file is as it was."""
    path = short_dir / "handshake.sock"
    path.write_text("precious")
    with pytest.raises(tszmq.TszmqError):
        Client.bind(f"ipc://{path}")
    assert path.read_text() == "precious"


def test_symbolic_link_is_not_followed_to_a_removal(short_dir):
    """What a link at the address points to stays."""
    precious = short_dir / "precious"
    precious.write_text("precious")
    (short_dir / "handshake.sock").symlink_to(precious)
    with pytest.raises(tszmq.TszmqError):
        Client.bind(f"ipc://{short_dir}/handshake.sock")
    assert precious.read_text() == "precious"


def test_directory_that_anybody_can_write_to_is_refused(short_dir):
    """Anyone could put their own socket there."""
    open_dir = short_dir / "open"
    open_dir.mkdir()
    open_dir.chmod(0o777)
    with pytest.raises(tszmq.TszmqError):
        Client.bind(f"ipc://{open_dir}/handshake.sock")
    assert os.listdir(open_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused(short_dir):
    """Its owner could replace our sockets."""
    foreign = short_dir / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 65534, 65534)
    with pytest.raises(tszmq.TszmqError):
        Client.bind(f"ipc://{foreign}/handshake.sock")
    assert os.listdir(foreign) == []


def test_directory_that_does_not_exist(short_dir):
    """It may be made, but then for this user only; what cannot be made is an error."""
    missing = short_dir / "no" / "such"
    with contextlib.suppress(tszmq.TszmqError), Client.bind(f"ipc://{missing}/handshake.sock"):
        assert stat.S_IMODE(missing.stat().st_mode) == 0o700
    (short_dir / "file").write_text("precious")
    with pytest.raises(tszmq.TszmqError):
        Client.bind(f"ipc://{short_dir}/file/handshake.sock")
    assert (short_dir / "file").read_text() == "precious"


def test_live_ipc_path_is_never_taken_over(client_and_engines, short_dir):
    """The second client fails at once; the first goes on, its handshake included."""
    address = f"ipc://{short_dir}/handshake.sock"
    client, [engine] = client_and_engines(endpoints=address)
    started = time.monotonic()
    with pytest.raises(tszmq.ConnectError):
        Client(address)
    assert time.monotonic() - started < PATIENCE
    answer_one(client, engine)
    engine.close()
    successor = client_and_engines.engine(address, 0)
    successor.connect()
    eventually(lambda: client.engines[0].alive)
    answer_one(client, successor)


def test_live_data_socket_is_never_taken_over(client_and_engines, short_dir):
    """The same for addresses of the data sockets."""
    client, [engine] = client_and_engines(
        endpoints=Endpoints(
            handshake=f"ipc://{short_dir}/h",
            input=f"ipc://{short_dir}/i",
            output=f"ipc://{short_dir}/o",
        )
    )
    for taken in ("i", "o"):
        with pytest.raises(tszmq.ConnectError):
            Client.bind(
                Endpoints(handshake=f"ipc://{short_dir}/h2", input=f"ipc://{short_dir}/{taken}")
            )
        assert sorted(os.listdir(short_dir)) == ["h", "i", "o"]
    answer_one(client, engine)
    client.close()
    assert os.listdir(short_dir) == []


def test_data_sockets_are_in_a_private_directory(client_and_engines):
    """Mode 0700, fresh, and gone after close; loopback tcp included."""
    client, [engine] = client_and_engines()
    endpoints = client.endpoints
    directories = {os.path.dirname(ipc_path(a)) for a in (endpoints.input, endpoints.output)}
    for directory in directories:
        status = os.stat(directory)
        assert stat.S_IMODE(status.st_mode) == 0o700
        assert status.st_uid == os.geteuid()
    other, _ = client_and_engines()
    assert os.path.dirname(ipc_path(other.endpoints.input)) not in directories
    answer_one(client, engine)
    client.close()
    assert not any(os.path.exists(directory) for directory in directories)


def test_close_removes_only_what_is_the_clients(client_and_engines, short_dir):
    """The caller's directory and other files in it stay."""
    (short_dir / "other").write_text("x")
    client, _ = client_and_engines(endpoints=f"ipc://{short_dir}/handshake.sock")
    assert (short_dir / "handshake.sock").exists()
    client.close()
    assert os.listdir(short_dir) == ["other"]


# --- addresses: tcp ------------------------------------------------------------------------


def test_free_port_is_told(client_and_engines):
    """``*`` becomes the port that was bound, before and after connecting."""
    client, [engine] = client_and_engines(endpoints=LOOPBACK)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", client.endpoints.handshake)
    assert engine.init["addresses"]["inputs"] == [client.endpoints.input]
    assert engine.init["addresses"]["outputs"] == [client.endpoints.output]


def test_given_data_sockets_are_used(client_and_engines, short_dir):
    """All three addresses as the caller wants them; INIT says so."""
    client, [engine] = client_and_engines(
        endpoints=Endpoints(
            handshake=LOOPBACK, input=LOOPBACK, output=f"ipc://{short_dir}/output.sock"
        )
    )
    assert client.endpoints.input.startswith("tcp://127.0.0.1:")
    assert not client.endpoints.input.endswith((":*", ":0"))
    assert client.endpoints.output == f"ipc://{short_dir}/output.sock"
    assert engine.init["addresses"]["inputs"] == [client.endpoints.input]
    assert engine.init["addresses"]["outputs"] == [client.endpoints.output]
    answer_one(client, engine)


def test_relative_addresses_are_told_absolute(client_and_engines, short_dir, monkeypatch):
    """To engines that were started in another directory."""
    monkeypatch.chdir(short_dir)
    bound = client_and_engines.bind(Endpoints("ipc://h", "ipc://./i", "ipc://o"))
    monkeypatch.chdir("/")
    call = in_thread(bound.connect)
    engine = client_and_engines.engine(bound.endpoints.handshake).connect()
    client = call.result(PATIENCE)
    here = os.path.realpath(short_dir)
    assert client.endpoints == Endpoints(f"ipc://{here}/h", f"ipc://{here}/i", f"ipc://{here}/o")
    assert engine.init["addresses"]["inputs"] == [f"ipc://{here}/i"]
    assert engine.init["addresses"]["outputs"] == [f"ipc://{here}/o"]
    answer_one(client, engine)
    client.close()
    assert os.listdir(short_dir) == []


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"])
def test_other_hosts_have_to_be_allowed(address):
    """The wire has no authentication: opening it to the network needs to be said."""
    with pytest.raises(tszmq.TszmqError, match="allow_remote"):
        Client.bind(address)
    with pytest.raises(tszmq.TszmqError, match="allow_remote"):
        Client.bind(Endpoints(handshake=LOOPBACK, input=address))
    with pytest.raises(tszmq.TszmqError, match="allow_remote"):
        Client.bind(Endpoints(handshake=LOOPBACK, output=address))


def test_other_hosts_can_be_allowed():
    """And then data sockets are tcp as well."""
    with Client.bind("tcp://0.0.0.0:*", allow_remote=True) as bound:
        for address in (
            bound.endpoints.handshake,
            bound.endpoints.input,
            bound.endpoints.output,
        ):
            assert re.fullmatch(r"tcp://.+:[1-9]\d*", str(address))


def test_port_in_use():
    """A ConnectError at once, from the constructor too; nothing stays bound."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for attempt in (Client, Client.bind):
            started = time.monotonic()
            with pytest.raises(tszmq.ConnectError):
                attempt(address)
            assert time.monotonic() - started < PATIENCE


def test_port_of_another_client(client_and_engines):
    """The first one goes on."""
    client, [engine] = client_and_engines()
    with pytest.raises(tszmq.ConnectError):
        Client(client.endpoints.handshake)
    answer_one(client, engine)


def test_failed_bind_releases_what_it_had(short_dir):
    """The handshake is bound first; when a data socket fails it must be let go."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        handshake = f"ipc://{short_dir}/handshake.sock"
        with pytest.raises(tszmq.ConnectError):
            Client.bind(Endpoints(handshake=handshake, output=address))
    assert os.listdir(short_dir) == []
    check_bindable(handshake)


# --- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoints",
    ["", "nonsense", "foo://x", "tcp://127.0.0.1", "tcp://127.0.0.1:port", "ipc://", 5, None, b"x"],
)
def test_bad_addresses(endpoints):
    """Said at once, by the constructor as well."""
    for attempt in (Client.bind, Client):
        with pytest.raises((tszmq.TszmqError, TypeError)):
            attempt(endpoints)


@pytest.mark.parametrize(
    "options",
    [
        {"engine_count": 0},
        {"engine_count": -1},
        {"engine_count": True},
        {"engine_count": 1.0},
        {"engine_count": "1"},
        {"engine_count": 65537},
        {"protocol": "nonsense"},
        {"protocol": None},
        {"connect_timeout": -1},
        {"connect_timeout": "1"},
        {"connect_timeout": float("nan")},
        {"max_inflight": 0},
        {"max_inflight": -1},
        {"max_inflight": True},
        {"max_inflight": 1.5},
        {"silence_timeout": 0},
        {"silence_timeout": -1},
        {"silence_timeout": "1"},
        {"silence_timeout": float("nan")},
    ],
    ids=repr,
)
def test_bad_options(options):
    """InvalidRequest or TypeError before anything is bound."""
    with pytest.raises((tszmq.InvalidRequest, TypeError)):
        Client.bind(LOOPBACK, **options)


FEW_DESCRIPTORS = """
import os, resource, sys
import tszmq

path = sys.argv[1]
tszmq.Client.bind(f"ipc://{path}/first.sock").close()
used = max(map(int, os.listdir("/proc/self/fd"))) + 1
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for spare in (0, 3, 6, 12, 26):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        tszmq.Client.bind(f"ipc://{path}/second.sock").close()
    except tszmq.ConnectError as error:
        print("refused", "descriptors" in str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, hard))
tszmq.Client.bind(f"ipc://{path}/second.sock").close()
print("bound")
"""


EXHAUSTED = """
import logging, os, resource, sys, threading, time
import tszmq
from tszmq.sim import Fleet

logging.basicConfig(format="%(message)s")
bound = tszmq.Client.bind("tcp://127.0.0.1:*")
fleet = Fleet(1)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
used = max(map(int, os.listdir("/proc/self/fd"))) + 1
fleet.start(bound.endpoints.handshake)
left = len(os.listdir("/proc/self/fd")) + 2
resource.setrlimit(resource.RLIMIT_NOFILE, (left, hard))
held = threading.Timer(float(sys.argv[1]), resource.setrlimit,
                       (resource.RLIMIT_NOFILE, (used + 200, hard)))
held.start()
with bound.connect(timeout=30) as client:
    print(client.generate([1]).finish_reason)
fleet.terminate()
"""


def test_an_engine_waits_for_descriptors(run_script):
    """Its connections to ipc addresses would end the process inside libzmq."""
    result = run_script(EXHAUSTED, str(1.5 * UNIT))
    assert result.output.splitlines() == ["length"], result
    assert "hardly a file descriptor is free" in result.errors, result


def test_few_descriptors_are_a_clear_error(run_script, short_dir):
    """And do not end the process, as they would inside libzmq."""
    result = run_script(FEW_DESCRIPTORS, str(short_dir))
    assert result.output.splitlines() == ["refused True"] * 5 + ["bound"], result


def test_a_signal_anywhere_in_connect_leaves_the_claim():
    """The next call is not told that another is connecting."""
    code = BoundClient.connect.__code__
    lines = 0
    while True:
        lines += 1
        left = lines

        def trace(frame, event, argument):
            nonlocal left
            if event == "line" and frame.f_code is code:
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        with Client.bind(LOOPBACK) as bound:
            sys.settrace(trace)
            try:
                bound.connect(0)
            except (KeyboardInterrupt, tszmq.HandshakeTimeout):
                pass
            finally:
                sys.settrace(None)
            with pytest.raises((tszmq.HandshakeTimeout, tszmq.ClientClosed)):
                bound.connect(0)
        if left > 0:
            break
    assert lines > 5


def test_somebody_who_waits_is_told_once_that_it_takes_long(monkeypatch, caplog):
    """Where nothing configures logging, only warnings are seen."""
    caplog.set_level(logging.INFO, "tszmq")
    monkeypatch.setattr(tszmq.bound, "_FIRST_PROGRESS", 0.01)
    monkeypatch.setattr(tszmq.bound, "_PROGRESS_SECONDS", 0.05)
    with pytest.raises(tszmq.HandshakeTimeout):
        Client(LOOPBACK, connect_timeout=0.5)
    levels = [each.levelno for each in caplog.records if "waiting at" in each.getMessage()]
    assert levels[0] == logging.INFO
    assert levels.count(logging.WARNING) == 1
    assert len(levels) > 3


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_engines_that_come_over_ipv6():
    """By an address, or by a name that has no other."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        with Client.bind("tcp://[::1]:*") as bound, Fleet(1) as engines:
            engines.start(bound.endpoints.handshake)
            with bound.connect(PATIENCE) as client:
                assert client.generate([1]).finish_reason == "length"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([socket.AF_INET6], True),
        ([socket.AF_INET, socket.AF_INET6], False),
        ([socket.AF_INET], False),
        (socket.gaierror("no such name"), False),
        (UnicodeError("label empty or too long"), False),
    ],
)
def test_a_name_without_an_ipv4_address(monkeypatch, found, expected):
    def look_up(host, port):
        if isinstance(found, Exception):
            raise found
        return [(family, 1, 6, "", ()) for family in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert has_only_ipv6("name") is expected


def test_a_restarted_engine_is_another_one():
    with Client.embedded(2) as client:
        first = client.engines
        client.fleet.restart(1)
        eventually(lambda: client.engines[1].incarnation != first[1].incarnation)
        eventually(lambda: all_alive(client))
        assert client.engines[0] == first[0]
        assert client.engines[1] != first[1]


def test_an_engine_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(tszmq.ConnectError, match="cannot be started"):
        Client.embedded(1)
