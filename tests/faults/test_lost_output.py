"""An engine loses its output connection and lives: what it said meanwhile is gone."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import Any, cast

import pytest
import zmq

import tszmq
from tests.client_fixtures import answer_after_aborts, answer_one, can_be_chosen, inflight
from tests.mock_engine import PATIENCE, eventually, in_thread, stays_true
from tszmq.net.losses import Losses
from tszmq.net.mailbox import Learnt
from tszmq.net.monitors import Connection
from tszmq.net.outputs import Outputs

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
    monkeypatch.setattr("tszmq.net.losses._MOST_LOOKS", 8)
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


def test_one_of_several_silent_engines_is_found_out(client_and_engines, monkeypatch):
    """Once the other has been heard, which had its connection all the time."""
    monkeypatch.setattr("tszmq.net.losses._GRACE_OF_SEVERAL", 1.0)
    client, engines = client_and_engines(2, endpoints=TCP)
    calls = [in_thread(client.generate, [1], data_parallel_rank=rank) for rank in (0, 1)]
    rids = [engine.recv_add().rid for engine in engines]
    engines[0].output.close()
    engines[1].tokens(rids[1], [7], "stop")
    assert calls[1].result(PATIENCE).token_ids == [7]
    with pytest.raises(tszmq.DecodeError, match="engine 0 was lost"):
        calls[0].result(PATIENCE)
    eventually(lambda: not can_be_chosen(client, 0))
    assert can_be_chosen(client, 1)
    dial_again(engines[0])
    eventually(lambda: can_be_chosen(client, 0))


def test_all_that_may_have_lost_output_are_told_where_nothing_tells_whose_it_was(
    client_and_engines, monkeypatch
):
    """One of them would wait for ever."""
    monkeypatch.setattr("tszmq.net.losses._GRACE_OF_SEVERAL", 0.5)
    client, engines = client_and_engines(2, endpoints=TCP)
    calls = [in_thread(client.generate, [1], data_parallel_rank=rank) for rank in (0, 1)]
    for engine in engines:
        engine.recv_add()
    engines[0].output.close()
    for call in calls:
        with pytest.raises(tszmq.DecodeError):
            call.result(PATIENCE)
    dial_again(engines[0])
    for engine in engines:
        engine.recv_abort()
        answer_one_of(client, engine)
    assert [info.alive for info in client.engines] == [True, True]


def test_silent_engines_outlive_one_that_ends_bit_by_bit(client_and_engines, monkeypatch):
    """Its output connection closes first, and might have been any of theirs."""
    monkeypatch.setattr("tszmq.net.losses._GRACE_OF_SEVERAL", 1.0)
    seen = []
    note = Losses._note

    def noting(losses, suspects, *args, **options):
        seen.append(suspects)
        note(losses, suspects, *args, **options)

    monkeypatch.setattr(Losses, "_note", noting)
    client, engines = client_and_engines(3, endpoints=TCP)
    calls = [in_thread(client.generate, [1], data_parallel_rank=rank) for rank in range(3)]
    rids = [engine.recv_add().rid for engine in engines]
    engines[2].output.close()
    eventually(lambda: seen == [[0, 1, 2]])
    engines[2].close()
    with pytest.raises(tszmq.EngineDead):
        calls[2].result(PATIENCE)
    stays_true(lambda: not any(call.done() for call in calls[:2]), 1.5)
    for rank in (0, 1):
        engines[rank].tokens(rids[rank], [7], "stop")
        assert calls[rank].result(PATIENCE).token_ids == [7]


def test_what_may_be_short_is_doubted_at_once(client_and_engines, endpoints):
    """Before the engine has dialled in again and ended it as if nothing were missing."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    stream = client.stream([1], LONG)
    engine.recv_add()
    engine.output.close()
    with client._session.shared.state as flights:
        (request,) = flights.requests.values()
    eventually(lambda: request.doubt)
    assert not stream.finished
    stream.close()


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


# -- whose a connection may have been -----------------------------------------------------------


class Connections:
    """Stands for the monitor of the output socket."""

    def __init__(self) -> None:
        self.open: list[Connection] = []
        self.accepted = 0

    def dial(self, pid: int | None = None) -> Connection:
        self.accepted += 1
        made = Connection(self.accepted, self.accepted, float(self.accepted), pid)
        self.open.append(made)
        return made

    def at(self, fd: int) -> Connection | None:
        return next((each for each in self.open if each.fd == fd), None)

    def is_open(self, fd: int) -> bool:
        return self.at(fd) is not None

    def connections(self) -> list[Connection]:
        return self.open

    def num_accepted(self) -> int:
        return self.accepted


class Table:
    """Engines, each with its connection."""

    def __init__(self, engines: int = 2, pids: Sequence[int | None] = (None, None)) -> None:
        self.monitor = Connections()
        self.outputs = Outputs(cast(Any, self.monitor))
        self.alive = list(range(engines))
        self.its: list[Connection] = []
        for index in self.alive:
            self.outputs.invite(index)
        for index in self.alive:
            self.its.append(self.monitor.dial(pids[index]))
            self.outputs.join(index, pids[index])

    def hear(self, index: int) -> None:
        self.outputs.learn(Learnt(index, self.its[index].fd))

    def close(self, connection: Connection) -> list[int]:
        self.monitor.open.remove(connection)
        return self.outputs.suspects(connection, self.alive)

    def since(self, index: int) -> float:
        return self.outputs.reachable_since(index, self.alive)


def test_one_that_was_heard_is_known():
    table = Table()
    table.hear(0)
    assert table.close(table.its[0]) == [0]
    assert table.since(0) == math.inf
    again = table.monitor.dial()
    assert table.since(0) == again.since


def test_one_that_was_not_heard_is_one_of_those_that_have_no_other():
    table = Table()
    assert table.close(table.its[0]) == [0, 1]
    table = Table()
    table.hear(1)
    assert table.close(table.its[0]) == [0]
    table = Table()
    table.alive = [1]
    table.hear(1)
    assert table.close(table.its[0]) == []


def test_a_strangers_is_nobodys():
    table = Table()
    stranger = table.monitor.dial()
    assert table.close(stranger) == []


def test_who_never_spoke_the_protocol_is_no_engine():
    """One of which is known by nothing, and has not dialled in."""
    for speaks in (True, False):
        table = Table(1)
        table.monitor.open.clear()
        stranger = table.monitor.dial()
        stranger.speaks = speaks
        assert table.close(stranger) == ([0] if speaks else [])


def test_what_is_older_than_an_engines_invitation_is_not_its():
    """An engine of an earlier client takes its leave; or stays, while an engine's closes."""
    table = Table(0)
    stale = table.monitor.dial()
    table.outputs.invite(0)
    table.outputs.join(0, None)
    table.alive = [0]
    assert table.outputs.suspects(stale, table.alive) == []
    its = table.monitor.dial()
    assert table.since(0) == its.since
    assert table.close(its) == [0]
    assert table.since(0) == math.inf


def test_one_that_dialled_in_again_before_the_end_was_seen():
    table = Table()
    table.hear(0)
    table.hear(1)
    again = table.monitor.dial()
    assert table.close(table.its[0]) == [0]
    assert table.since(0) == again.since
    table.outputs.learn(Learnt(0, again.fd))
    assert table.since(0) == again.since


def test_a_half_open_connection_that_closes_late():
    """The engine was heard on its new one before."""
    table = Table()
    table.hear(0)
    again = table.monitor.dial()
    table.outputs.learn(Learnt(0, again.fd))
    assert table.close(table.its[0]) == []


def test_processes_tell_who_it_may_have_been():
    table = Table(pids=(100, 101))
    assert table.close(table.its[0]) == [0]
    assert table.since(0) == math.inf
    table.monitor.dial(101)
    assert table.since(0) == math.inf
    again = table.monitor.dial(100)
    assert table.since(0) == again.since
    stranger = table.monitor.dial(102)
    assert table.close(stranger) == []
