"""Bytes of every kind on every socket of a live client: nobody is hurt, nothing grows."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import socket
import sys
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tszmq
from tests.client_fixtures import answer_one
from tests.mock_engine import (
    PATIENCE,
    UNIT,
    Load,
    Row,
    encode_batch,
    eventually,
    identity,
    in_thread,
    predicted,
    stays_true,
)
from tszmq import SamplingParams
from tszmq.net.control import _Own
from tszmq.net.mailbox import Run
from tszmq.net.monitors import Monitor
from tszmq.net.orders import Joined
from tszmq.net.peers import CLOSED, Attribution, inode
from tszmq.net.sockets import WAKE, source_fd

pytestmark = pytest.mark.timeout(60)

GROWTH = 32 << 20
LONG = SamplingParams(max_tokens=8000)
LOOPBACK = "tcp://127.0.0.1:*"
FUZZ = settings(
    max_examples=250,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture
def log_lines():
    """What the client logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tszmq").addHandler(handler)
    yield lines
    logging.getLogger("tszmq").removeHandler(handler)


@pytest.fixture
def peers():
    """Sockets of strangers, in a context of their own."""
    context = zmq.Context()
    opened = []

    def make(kind, address, identity=b"", wait=False):
        made = context.socket(kind)
        opened.append(made)
        made.linger = 200
        if identity:
            made.setsockopt(zmq.IDENTITY, identity)
        monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) if wait else None
        made.connect(address)
        if monitor is not None:
            assert monitor.poll(PATIENCE * 1000)
            made.disable_monitor()
            monitor.close(0)
        return made

    yield make
    context.destroy(linger=0)


_MALLINFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Allocated(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


_MALLINFO = ctypes.CDLL(None).mallinfo2
_MALLINFO.restype = _Allocated


def allocated() -> int:
    """Bytes in use, on the heaps of all threads.

    Not the resident set: the strangers' own queues are in this process too, and what was freed
    need not go back to the system.
    """
    info = _MALLINFO()
    return info.uordblks + info.hblkhd + sys.getallocatedblocks() * 64


class Work:
    """Callers that go on all the while, each result checked."""

    def __init__(self, client) -> None:
        self._client = client
        self._stop = threading.Event()
        self.done = 0
        self._threads = [in_thread(self._generate, rank) for rank in (0, 1)]
        self._threads.append(in_thread(self._read))

    def _generate(self, rank) -> None:
        params = SamplingParams(max_tokens=20)
        for number in range(1, 1_000_000):
            done = self._client.generate([number, rank], params, data_parallel_rank=rank)
            assert done.token_ids == predicted([number, rank], 20)
            self.done += 1
            if self._stop.is_set():
                return

    def _read(self) -> None:
        while not self._stop.is_set():
            with self._client.stream([7], SamplingParams(max_tokens=50)) as stream:
                tokens = [token for chunk in stream for token in chunk.token_ids]
            assert tokens == predicted([7], 50)

    def end(self) -> None:
        before = self.done
        eventually(lambda: self.done > before + 4)
        self._stop.set()
        for thread in self._threads:
            thread.result(PATIENCE)


@pytest.fixture
def live(client_and_engines, log_lines):
    """A client with engines at work, and a check that none of it was hurt."""
    client, _ = client_and_engines(
        2, auto=True, engine={"step_delay": 0.001}, max_message_bytes=1 << 20
    )
    work = Work(client)
    eventually(lambda: work.done > 4)
    before, started = allocated(), time.monotonic()
    yield client
    work.end()
    assert [info.alive for info in client.engines] == [True, True]
    assert all(thread.is_alive() for thread in client._session._threads)
    assert all(each.first_error is None for each in client.health().values())
    eventually(lambda: allocated() - before < GROWTH)
    assert time.monotonic() - started < PATIENCE
    assert len(log_lines) < 200, log_lines[-5:]
    assert all(len(line) < 1000 for line in log_lines)
    results = client.generate_many([[n] for n in range(1, 50)], SamplingParams(max_tokens=4))
    assert [done.token_ids for done in results] == [predicted([n], 4) for n in range(1, 50)]


# --- the output socket -------------------------------------------------------------------------

BATCH = encode_batch([Row("0123456789abcdef", [1, 2], "", 1, 2)], Load(2), 0)
LONG_BATCH = encode_batch([Row(f"nobody's {n}", [n], "", 1, 1) for n in range(40)], Load(1), 1)
SEEDS = [BATCH, LONG_BATCH, b"ENGINE_CORE_DEAD", b"tszmq-wake", b"\x91\x01", b""]
BOMBS = [
    b"\xdd\xff\xff\xff\xff" + bytes(10),
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff" * 1000,
    b"\x91" * 100_000,
    b"\xc0" * 500_000,
]


@st.composite
def mangled(draw, seeds=tuple(SEEDS)):
    """A message with some bytes changed, cut out or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del data[at : at + draw(st.integers(1, 20))]
        else:
            data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)


FRAMES = st.lists(
    st.one_of(st.binary(max_size=60), mangled(), st.sampled_from(BOMBS)), min_size=1, max_size=4
)


def test_any_bytes_on_the_output_socket(live, peers):
    """Of a stranger, who says what he likes and as often as he likes."""
    junk = peers(zmq.PUSH, live.endpoints.output)

    @FUZZ
    @given(FRAMES, st.integers(1, 20))
    def fuzz(frames, times):
        for _ in range(times):
            junk.send_multipart(frames)

    fuzz()
    junk.send_multipart([b"x"] * 10_000)
    junk.send_multipart([BATCH, *[b"x" * 100] * 5000])


def test_strangers_that_come_and_go_on_the_output_socket(live, peers):
    """Each says something unreadable, and the next one comes."""
    chance = random.Random(1)
    for _ in range(100):
        junk = peers(zmq.PUSH, live.endpoints.output)
        for _ in range(chance.randrange(1, 8)):
            junk.send(chance.choice([b"\xc1", b"ENGINE_CORE_DEAD", BATCH[:-1], BATCH]))
        junk.close(linger=chance.choice([0, 200]))


TCP = tszmq.Endpoints(handshake=LOOPBACK, input=LOOPBACK, output=LOOPBACK)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_batch_without_rows_proves_nothing(
    client_and_engines, peers, log_lines, monkeypatch, kind
):
    """Anybody can name an engine, such as one of an earlier client that is idle: neither is its
    load believed, nor is the engine hurt when that connection closes. A process that has several
    engines is believed, and does not tell by that which of its connections is whose."""
    monkeypatch.setattr("tszmq.net.losses._GRACE", 0.0)
    closed: list[int] = []
    notice = Attribution.closed

    def note(sources, fd, *args):
        gone = inode(fd) is None
        index = notice(sources, fd, *args)
        if gone:  # else it is looked at again
            closed.append(fd)
        return index

    monkeypatch.setattr(Attribution, "closed", note)
    client, [engine, _] = client_and_engines(2, endpoints=TCP if kind == "tcp" else LOOPBACK)
    stream = client.stream([1], LONG, data_parallel_rank=0)
    rid = engine.recv_add().rid
    stranger = peers(zmq.PUSH, client.endpoints.output, wait=True)
    stranger.send(encode_batch([], Load(7, 3), 0))
    stranger.send(b"\xc1")
    eventually(lambda: [line for line in log_lines if "dropped" in line])  # both have been read
    assert waiting_at(client) == (None if kind == "tcp" else 3)
    stranger.close()
    eventually(lambda: closed)
    stays_true(lambda: not stream.finished, 0.2)
    answer_one(client, engine)
    engine.tokens(rid, [5], "stop")
    assert stream.result(PATIENCE).token_ids == [5]


@pytest.mark.parametrize("known_by", ["its rows", "its process"])
def test_a_batch_without_rows_tells_the_load_of_a_known_engine(client_and_engines, known_by):
    """On its own connection, whatever tells that it is."""
    client, [engine] = client_and_engines(endpoints=TCP if known_by == "its rows" else LOOPBACK)
    with client.stream([1], LONG):
        rid = engine.recv_add().rid
        if known_by == "its rows":
            engine.tokens(rid, [5])
        engine.send_batch([], Load(7, 3))
        eventually(lambda: waiting_at(client) == 3)
        engine.send_batch([], Load(7, 4))
        eventually(lambda: waiting_at(client) == 4)


def waiting_at(client: tszmq.Client) -> int | None:
    """What the engine said of its queue."""
    load = client.load(0)
    return None if load is None else load.num_waiting


def test_an_engine_that_is_now_and_then_unreadable_fills_no_log(client_and_engines, log_lines):
    """One bad message is dropped and said; ten thousand are not said ten thousand times."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], LONG)
    rid = engine.recv_add().rid
    for token in range(5000):
        engine.send_raw([b"\xc1" * 100])
        engine.tokens(rid, [token])
    engine.tokens(rid, [], "stop")
    assert stream.result(20).token_ids == list(range(5000))
    assert client.is_alive
    assert 1 <= len([line for line in log_lines if "dropped" in line]) < 200


# --- the handshake and the input socket --------------------------------------------------------

STATUS = st.sampled_from(["HELLO", "READY", "FAILED", "", "x" * 5000, "\ud7ff"])
HANDSHAKES = st.builds(
    lambda status, more: [msgspec.msgpack.encode({"status": status, **more})],
    STATUS,
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)
    .map(lambda given: {k: v for k, v in given.items() if k != "status"})
    .filter(lambda given: all(not isinstance(v, int) or abs(v) < 2**63 for v in given.values())),
)
# Not those of the living engines: whoever connects with one of those has that engine's place.
IDENTITIES = st.one_of(
    st.just(b""),
    st.integers(2, 65535).map(lambda index: index.to_bytes(2, "little")),
    st.binary(min_size=3, max_size=255).filter(lambda raw: raw[0] != 0),
    st.binary(min_size=1, max_size=1).filter(lambda raw: raw != b"\0"),
)


@pytest.mark.parametrize("where", ["handshake", "input"])
def test_any_bytes_on_a_router(live, peers, where):
    """Of peers with any identity: they are no engines, whatever they say."""
    address = getattr(live.endpoints, where)

    @settings(FUZZ, max_examples=120)
    @given(IDENTITIES, st.lists(HANDSHAKES | FRAMES, min_size=1, max_size=5))
    def fuzz(identity, messages):
        stranger = peers(zmq.DEALER, address, identity)
        for frames in messages:
            stranger.send_multipart(frames)
        stranger.close()

    fuzz()
    flood = peers(zmq.DEALER, address, b"\x00\x01" if where == "input" else b"\x00\x00")
    hello = msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": True})
    for _ in range(5000):
        flood.send(hello)


@pytest.mark.parametrize("where", ["handshake", "input", "output"])
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_bytes_below_the_protocol(client_and_engines, log_lines, where, kind):
    """Scanners, browsers and half a greeting: connections that never become messages."""
    at = LOOPBACK if kind == "ipc" else tszmq.Endpoints(LOOPBACK, LOOPBACK, LOOPBACK)
    client, engines = client_and_engines(2, endpoints=at)
    for engine in engines:
        answer_one(client, engine)
    address = getattr(client.endpoints, where)
    chance = random.Random(where)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    before = len(os.listdir("/proc/self/fd"))
    half_open = []
    for number in range(60):
        scheme, _, target = address.partition("://")
        family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.settimeout(2)
        made.connect(target if scheme == "ipc" else ("127.0.0.1", int(target.rpartition(":")[2])))
        data = chance.choice(
            [
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"",
                greeting[: chance.randrange(len(greeting))],
                greeting + b"\x04\x26\x05READY" + bytes(chance.randrange(40)),
                greeting + b"\x06" + b"\xff" * 8,
                chance.randbytes(200),
            ]
        )
        with contextlib.suppress(OSError):  # it may be refused before all of it is sent
            made.sendall(data)
        if number % 3:
            made.close()
        else:
            half_open.append(made)
    for engine in engines:
        answer_one(client, engine)
    for made in half_open:
        made.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert [info.alive for info in client.engines] == [True, True]
    assert len(log_lines) < 100
    for engine in engines:
        answer_one(client, engine)


# --- engines that were given up, and live on ---------------------------------------------------


def test_whose_a_connection_is_stays_known(client_and_engines, peers, monkeypatch):
    """The receiver may be told that an engine joined after it has read that engine's first
    batch: a stranger's garbage would be taken for the engine's from then on."""
    order = _Own.order
    owners = []

    def unheard(own, what):
        if isinstance(what, Joined):
            own.orders.append(what)  # as always; what would wake the receiver comes later
            owners.append(own)
        else:
            order(own, what)

    monkeypatch.setattr(_Own, "order", unheard)
    client, engines = client_and_engines(2)
    streams = [client.stream([1], data_parallel_rank=rank) for rank in (0, 1)]
    rids = [engine.recv_add().rid for engine in engines]
    for engine, rid, stream in zip(engines, rids, streams, strict=True):
        engine.tokens(rid, [5])
        assert next(stream).token_ids == [5]
    own = owners[0]
    client._session.shared.mailbox.post(Run(lambda: own.push.send(WAKE)))
    eventually(lambda: not own.orders)
    engines[1].tokens(rids[1], [6])
    assert next(streams[1]).token_ids == [6]
    stranger = peers(zmq.PUSH, client.endpoints.output, wait=True)
    for _ in range(5):
        stranger.send(b"\xc1")
    stays_true(lambda: all(info.alive for info in client.engines), 0.3)
    for engine, rid, stream in zip(engines, rids, streams, strict=True):
        engine.tokens(rid, [7], "stop")
        assert stream.result(PATIENCE).token_ids[-1] == 7


def test_a_stopped_engine_that_was_replaced_goes_on(client_and_engines):
    """It still has the connections and the identity: it takes nothing from its successor."""
    client, [old] = client_and_engines(process=True, silence_timeout=1.5 * UNIT)
    doomed = in_thread(client.generate, [1])
    rid = old.recv_add().rid
    old.stop()
    with pytest.raises(tszmq.EngineDead):
        doomed.result(PATIENCE)
    new = client_and_engines.engine(client.endpoints.handshake, 0, process=True)
    new.connect()
    eventually(lambda: client.engines[0].alive)
    old.resume()
    with client.stream([1]) as stream:
        mine = new.recv_add().rid
        for token in range(20):
            old.tokens(rid, [token])
            old.tokens(mine + "x", [token])
            new.tokens(mine, [token])
        old.sentinel()
        new.tokens(mine, [20], "stop")
        assert stream.result(PATIENCE).token_ids == list(range(21))
    for _ in range(20):
        answer_one(client, new)
    assert client.is_alive


def test_an_engine_of_an_earlier_client_dials_on(client_and_engines, short_dir):
    """On all of its connections, and with the identity that the new engine has."""
    endpoints = tszmq.Endpoints(*(f"ipc://{short_dir}/{name}" for name in "hio"))
    client, [old] = client_and_engines(process=True, endpoints=endpoints)
    stream = client.stream([1])
    rid = old.recv_add().rid
    client.close()
    assert stream.finished
    client, [new] = client_and_engines(process=True, endpoints=endpoints)
    for turn in range(20):
        old.tokens(rid, [turn])
        answer_one(client, new)
    old.kill()
    for _ in range(5):
        answer_one(client, new)
    assert client.is_alive


@pytest.mark.parametrize("says", ["sentinel", "nonsense"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_an_engine_of_an_earlier_client_takes_its_leave_late(
    client_and_engines, short_dir, kind, count, says, log_lines
):
    """On a connection beside those of the engines that are here."""
    addresses = [f"ipc://{short_dir}/{name}" for name in "hio"]
    if kind == "tcp":
        addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(3)]
    endpoints = tszmq.Endpoints(*addresses)
    client, [old] = client_and_engines(endpoints=endpoints)
    client.close()
    client, engines = client_and_engines(count, endpoints=endpoints)
    streams = [client.stream([1], data_parallel_rank=rank) for rank in range(count)]
    rids = [engine.recv_add().rid for engine in engines]
    for _ in range(4):
        if says == "sentinel":
            old.sentinel()
        else:
            old.send_raw([b"\xc1"])
    eventually(lambda: [line for line in log_lines if "no living engine" in line])
    stays_true(lambda: all(info.alive for info in client.engines), 1.0)
    for engine, rid, stream in zip(engines, rids, streams, strict=True):
        engine.tokens(rid, [7], "stop")
        assert stream.result(PATIENCE).token_ids == [7]
    # One of those that are here is still believed.
    engines[-1].sentinel()
    eventually(lambda: not client.engines[-1].alive)


def test_last_words_are_believed_whose_connection_is_gone(client_and_engines, monkeypatch):
    """By the time that the control thread has had its say."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    engine.recv_add()
    looks = []

    def gone_at_the_second_look(fd):
        looks.append(fd)
        return os.getpid() if len(looks) == 1 else CLOSED

    monkeypatch.setattr("tszmq.net.peers.peer_pid", gone_at_the_second_look)
    engine.sentinel()
    with pytest.raises(tszmq.EngineDead, match="ENGINE_CORE_DEAD"):
        call.result(PATIENCE)
    assert looks


def test_what_is_known_of_connections():
    with zmq.Context() as context:
        pull = context.socket(zmq.PULL)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        monitor = Monitor(pull, asks_who=True)

        def dial() -> tuple[zmq.Socket[bytes], int]:
            push = context.socket(zmq.PUSH)
            push.connect(f"tcp://127.0.0.1:{port}")
            push.send(b"")
            fd = source_fd(pull.recv(copy=False))
            eventually(lambda: monitor.is_open(fd))
            return push, fd

        try:
            (first, one), (second, two) = dial(), dial()
            assert [(each.fd, each.number) for each in monitor.connections()] == [
                (one, 1),
                (two, 2),
            ]
            first.close(0)
            eventually(lambda: not monitor.is_open(one))
            (gone,) = monitor.closed()
            assert (gone.fd, gone.number, gone.speaks, gone.pid) == (one, 1, True, None)
            assert monitor.at(one) is gone
            assert monitor.num_accepted() == 2
            # Somebody who looks whether the port is open.
            with socket.create_connection(("127.0.0.1", port)):
                eventually(lambda: monitor.num_accepted() == 3)
            (gone,) = eventually(monitor.closed)
            assert (gone.number, gone.speaks) == (3, False)
            second.close(0)
        finally:
            pull.disable_monitor()
            monitor.close()
            pull.close(0)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def test_nobody_takes_the_place_of_an_engine_by_its_name(client_and_engines, peers):
    """Such as an engine of an earlier client, which dials in when it can."""
    client, engines = client_and_engines(2)
    for turn in range(4):
        peers(zmq.DEALER, client.endpoints.input, identity(turn % 2), wait=True)
        for engine in engines:
            answer_one(client, engine)
    assert [info.alive for info in client.engines] == [True, True]
    # A restarted engine is not kept out by those who wait for its place.
    engines[0].close()
    eventually(lambda: not client.engines[0].alive)
    again = client_and_engines.engine(client.endpoints.handshake, 0)
    again.connect()
    eventually(lambda: client.engines[0].alive)
    for engine in (again, engines[1]):
        answer_one(client, engine)


@pytest.mark.parametrize("how", ["says so", "dies"])
def test_a_start_up_that_fails_lets_nobody_in(client_and_engines, peers, how):
    """While an engine starts, its identity may be taken over: not any longer than that."""
    client, engines = client_and_engines(2)
    engines[1].close()
    eventually(lambda: not client.engines[1].alive)
    again = client_and_engines.engine(client.endpoints.handshake, 1)
    again.hello()
    again.wait_init()
    if how == "says so":
        again.say("FAILED")
    again.close()
    # Greeted once more means that the failure has been understood.
    third = client_and_engines.engine(client.endpoints.handshake, 1)
    third.hello()
    third.wait_init()
    eventually(lambda: "engine 1 " in client._session.shared.readiness.text)
    third.say("FAILED")  # its place is closed to others from then on, not from the first failure on
    eventually(lambda: "engine 1 " not in client._session.shared.readiness.text)
    assert client._session.shared.readiness.failed
    peers(zmq.DEALER, client.endpoints.input, identity(0), wait=True)
    answer_one(client, engines[0])
