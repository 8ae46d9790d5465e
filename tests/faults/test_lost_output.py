"""An engine loses its output connection and lives: what it said meanwhile is gone."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import zmq

import tszmq
from tests.client_fixtures import answer_after_aborts, answer_one, can_be_chosen, inflight
from tests.mock_engine import PATIENCE, eventually, in_thread, stays_true
from tszmq.net.peers import Attribution, Departure

TCP = tszmq.Endpoints(*["tcp://127.0.0.1:*"] * 3)
SOCKETS = {"tcp": TCP, "ipc": tszmq.Endpoints("tcp://127.0.0.1:*")}
LONG = tszmq.SamplingParams(max_tokens=1000)


@pytest.fixture(params=SOCKETS)
def endpoints(request: pytest.FixtureRequest) -> tszmq.Endpoints:
    return SOCKETS[request.param]


def dial_again(engine: Any) -> None:
    engine.output = engine._socket(zmq.PUSH)
    engine.output.connect(engine.init["addresses"]["outputs"][0])


def test_before_the_engine_was_heard(client_and_engines, endpoints):
    """Over tcp nothing tells whose the connection was, but that nobody else can have lost it."""
    client, engines = client_and_engines(2, endpoints=endpoints)
    answer_one_of(client, engines[1])
    call = in_thread(client.generate, [1], data_parallel_rank=0)
    engines[0].recv_add()
    engines[0].output.close()
    with pytest.raises(tszmq.DecodeError, match="engine 0 was lost"):
        call.result(PATIENCE)
    dial_again(engines[0])
    eventually(lambda: can_be_chosen(client, 0))
    answer_after_aborts(client, engines[0])
    assert [info.alive for info in client.engines] == [True, True]


def answer_one_of(client: tszmq.Client, engine: Any) -> None:
    call = in_thread(client.generate, [1], data_parallel_rank=engine.index)
    engine.tokens(engine.recv_add().rid, [3], "stop")
    assert call.result(PATIENCE).token_ids == [3]


def test_again_before_it_was_heard_again(client_and_engines, endpoints):
    """Its second connection is as little known as the first was."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    answer_one(client, engine)
    for _ in range(2):
        call = in_thread(client.generate, [1])
        engine.recv_add(skip_aborts=True)
        engine.output.close()
        with pytest.raises(tszmq.DecodeError):
            call.result(PATIENCE)
        dial_again(engine)
        eventually(lambda: can_be_chosen(client, 0))
    answer_after_aborts(client, engine)


def test_an_engine_that_never_dials_in_again_is_dead(client_and_engines, endpoints, monkeypatch):
    """It can answer nobody: its requests would wait for ever, and more would come."""
    monkeypatch.setattr("tszmq.net.losses._MUTE_SECONDS", 1.0)
    client, engines = client_and_engines(2, endpoints=endpoints)
    for engine in engines:
        answer_one_of(client, engine)
    engines[0].output.close()
    calls = [in_thread(client.generate, [1], data_parallel_rank=0) for _ in range(3)]
    for call in calls:
        with pytest.raises(tszmq.EngineDead):
            call.result(PATIENCE)
    eventually(lambda: not client.engines[0].alive)
    with pytest.raises(tszmq.EngineDead):
        client.generate([1], data_parallel_rank=0)
    assert inflight(client) == [0, 0]
    answer_one_of(client, engines[1])
    # Restarted, it is served again.
    engines[0].close()
    again = client_and_engines.engine(client.endpoints.handshake, 0).connect()
    eventually(lambda: client.engines[0].alive)
    answer_one_of(client, again)


def test_an_engine_that_cannot_answer_gets_nothing_until_it_can(client_and_engines, endpoints):
    client, engines = client_and_engines(2, endpoints=endpoints)
    for engine in engines:
        answer_one_of(client, engine)
    held = in_thread(client.generate, [1], data_parallel_rank=0)
    engines[0].recv_add()
    engines[0].output.close()
    with pytest.raises(tszmq.DecodeError):
        held.result(PATIENCE)
    for _ in range(4):
        answer_one(client, engines[1])
    with pytest.raises(tszmq.EngineDead, match="dead"):
        client.generate([1], data_parallel_rank=0)
    dial_again(engines[0])
    eventually(lambda: can_be_chosen(client, 0))
    engines[0].drain()
    answer_one_of(client, engines[0])
    assert {answer_either(client, engines) for _ in range(2)} == {0, 1}


def answer_either(client: tszmq.Client, engines: list[Any]) -> int:
    call = in_thread(client.generate, [1])
    engine = eventually(lambda: next((each for each in engines if each.input.poll(0)), None))
    engine.tokens(engine.recv_add().rid, [3], "stop")
    index: int = call.result(PATIENCE).engine_index
    return index


def test_what_was_sent_before_it_dialled_in_again_is_lost_too(client_and_engines):
    """An engine may notice late, and say until then what nobody hears."""
    client, [engine] = client_and_engines(endpoints=TCP)
    answer_one(client, engine)
    first = in_thread(client.generate, [1])
    engine.recv_add()
    engine.output.close()
    second = in_thread(client.generate, [2])
    engine.recv_add()
    dial_again(engine)
    for call in (first, second):
        with pytest.raises(tszmq.DecodeError):
            call.result(PATIENCE)
    eventually(lambda: can_be_chosen(client, 0))
    answer_after_aborts(client, engine)
    assert client.is_alive


def test_silent_engines_outlive_one_that_dies(client_and_engines):
    """Its output connection is one that might have been theirs."""
    client, engines = client_and_engines(4, endpoints=TCP)
    calls = [in_thread(client.generate, [1], data_parallel_rank=rank) for rank in range(4)]
    rids = [engine.recv_add().rid for engine in engines]
    engines[2].close()
    with pytest.raises(tszmq.EngineDead):
        calls[2].result(PATIENCE)
    others = [0, 1, 3]
    stays_true(lambda: not any(calls[rank].done() for rank in others), 1.0)
    for rank in others:
        engines[rank].tokens(rids[rank], [7], "stop")
        assert calls[rank].result(PATIENCE).token_ids == [7]


@pytest.mark.parametrize("who", ["a port scanner", "an engine of an earlier client"])
def test_strangers_that_come_and_go_hurt_no_silent_engine(client_and_engines, who):
    client, [engine] = client_and_engines(endpoints=TCP)
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    port = int(client.endpoints.output.rpartition(":")[2])
    for _ in range(3):
        if who == "a port scanner":
            socket.create_connection(("127.0.0.1", port)).close()
        else:
            with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
                monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                peer.connect(client.endpoints.output)
                assert monitor.poll(PATIENCE * 1000)
                peer.disable_monitor()
                monitor.close(0)
    stays_true(lambda: not call.done(), 1.0)
    engine.tokens(rid, [7], "stop")
    assert call.result(PATIENCE).token_ids == [7]


# -- what is known of connections ---------------------------------------------------------------


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Attribution:
    """Engines 0 and 1 over tcp: no process is known; descriptors are their own inodes."""
    monkeypatch.setattr("tszmq.net.peers.peer_pid", lambda fd: None)
    monkeypatch.setattr("tszmq.net.peers.inode", lambda fd: fd)
    made = Attribution()
    made.join(0, None)
    made.join(1, None)
    return made


def gone(*others: int, pid: int | None = None) -> Departure:
    return Departure(pid, dict.fromkeys(others), 9)


def test_one_of_those_that_have_no_other(sources):
    assert sources.closed(10, gone(11), [0, 1]) == [0, 1]
    assert sources.closed(10, gone(11, 12), [0, 1]) == []  # a stranger's: both have one
    sources.learn(1, 11)
    assert sources.closed(10, gone(11), [0, 1]) == [0]
    assert sources.closed(10, gone(11, 12), [0, 1]) == []
    assert sources.closed(10, gone(11), [1]) == []
    assert sources.closed(10, None, [0, 1]) == []
    assert sources.closed(10, Departure(None, None, 9), [0, 1]) == []


def test_one_that_has_dialled_in_again_meanwhile(sources):
    """It is known by a connection that was not there when the other closed."""
    sources.learn(0, 12)
    sources.learn(1, 11)
    assert sources.closed(10, gone(11), [0, 1]) == [0]
    assert sources.knows(0)


def test_a_known_one_whose_descriptor_is_not_closed_yet(sources):
    """Told once."""
    sources.learn(0, 10)
    assert sources.closed(10, gone(11), [0, 1]) == [0]  # 1 has said nothing yet
    assert not sources.knows(0)
    assert sources.closed(10) == []


def test_processes_tell_who_it_may_have_been(sources):
    sources.join(0, 100)
    sources.join(1, 101)
    assert sources.closed(10, gone(11, pid=100), [0, 1]) == []  # 11 may be its own
    assert sources.closed(10, Departure(100, {11: 101}, 9), [0, 1]) == [0]
    assert sources.closed(10, Departure(100, {11: 100}, 9), [0, 1]) == []
    assert sources.closed(10, gone(pid=102), [0, 1]) == []
