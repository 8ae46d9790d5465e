"""Utility calls and lockstep groups, over simulator engines that speak vLLM's wire."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from types import MappingProxyType

import pytest

import tszmq
from tests.mock_engine import PATIENCE
from tszmq import Client, SamplingParams
from tszmq.calls import EngineCalls
from tszmq.codec import unpack
from tszmq.net import mailbox as mail
from tszmq.sim import expected_tokens


@pytest.fixture(scope="module")
def client():
    with Client.embedded(2, protocol="vllm") as client:
        yield client


def test_one_engine_or_all_of_them(client):
    """One gives its answer, all give a mapping."""
    assert client.is_sleeping(engine_index=1) is False
    assert client.is_sleeping() == {0: False, 1: False}


def test_sleep_and_wake_up(client):
    """An engine's state is its own; requests go on afterwards."""
    client.sleep(1, engine_index=0)
    assert client.is_sleeping() == {0: True, 1: False}
    client.wake_up(engine_index=0)
    assert client.is_sleeping() == {0: False, 1: False}
    assert client.generate([1, 2], data_parallel_rank=0).token_ids == expected_tokens([1, 2], 16)


def test_paused_engines_refuse_in_a_way_of_their_own(client):
    """EnginePaused says that trying again later can help."""
    client.pause()
    with pytest.raises(tszmq.EnginePaused) as caught:
        client.generate([1])
    assert caught.value.retryable
    assert caught.value.code == "engine_paused"
    client.resume()
    assert client.generate([1]).finish_reason == "length"
    assert [client.inflight(0), client.inflight(1)] == [0, 0]


def test_results_tell_which_weights_made_which_tokens():
    """Where they change under a running request."""
    params = SamplingParams(max_tokens=400)
    with Client.embedded(1, protocol="vllm", step_ms=2) as own, own.stream([1], params) as stream:
        next(stream)
        own.utility("set_weight_version", "step-8")
        done = stream.result()
        again = own.generate([1])
    before, after = done.weight_versions
    assert before[:2] == ("default", 0)
    assert after == ("step-8", before[2], 400)
    assert again.weight_versions == [("step-8", 0, 16)]


def test_a_failed_call_is_an_exception(client):
    """With the engine's words; the engine lives on."""
    with pytest.raises(tszmq.RequestRejected, match="no_such_method"):
        client.utility("no_such_method", engine_index=0)
    assert client.reset_prefix_cache() == {0: True, 1: True}


def test_arguments_are_checked_before_anything_is_sent(client):
    """Engines, names and values."""
    with pytest.raises(tszmq.InvalidRank, match="0, 1"):
        client.utility("is_sleeping", engine_index=7)
    with pytest.raises(TypeError):
        client.utility("is_sleeping", engine_index=True)
    with pytest.raises((TypeError, tszmq.InvalidRequest)):
        client.utility(5)
    with pytest.raises((TypeError, tszmq.InvalidRequest)):
        client.utility("collective_rpc", object())
    assert client.is_sleeping() == {0: False, 1: False}


LORA = {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}


@pytest.mark.parametrize(
    ("name", "args", "method", "sent"),
    [
        ("sleep", (), "sleep", [1, "abort"]),
        ("wake_up", (("weights",),), "wake_up", [["weights"]]),
        ("is_sleeping", (), "is_sleeping", []),
        ("pause", ("keep", False), "pause_generation", ["keep", False]),
        ("is_paused", (), "is_scheduler_paused", []),
        ("resume", (), "resume_scheduler", []),
        ("reset_prefix_cache", (True,), "reset_prefix_cache", [True, False]),
        ("add_lora", (LORA,), "add_lora", [LORA]),
        ("remove_lora", (1,), "remove_lora", [1]),
        ("list_loras", (), "list_loras", []),
        ("collective_rpc", ("echo",), "collective_rpc", ["echo", PATIENCE, [], None]),
        (
            "init_weight_transfer",
            (MappingProxyType({"master_port": 1}),),
            "collective_rpc",
            ["init_weight_transfer_engine", None, [{"master_port": 1}], None],
        ),
        (
            "update_weights",
            ({"names": ["w"]},),
            "collective_rpc",
            ["update_weights", None, [{"names": ["w"]}], None],
        ),
    ],
)
def test_what_is_sent(client, monkeypatch, name, args, method, sent):
    """The engine's name of each call and its arguments, to the engine that was named."""
    posted: list[mail.Call] = []
    original = mail.Mailbox.post

    def post(mailbox: mail.Mailbox, item: object) -> None:
        if isinstance(item, mail.Call):
            posted.append(item)
        original(mailbox, item)

    monkeypatch.setattr(mail.Mailbox, "post", post)
    call = getattr(client, name)
    if "lora" in name:  # the simulator has no adapters
        with pytest.raises(tszmq.RequestRejected, match=f"engine 1, {method}: "):
            call(*args, engine_index=1, timeout=PATIENCE)
    else:
        call(*args, engine_index=1, timeout=PATIENCE)
        client.wake_up()
        client.resume()
    [first, *_] = posted
    assert first.engine_index == 1
    kind, body = first.frames
    assert kind == b"\x03"
    assert unpack(body)[2:] == [method, sent]
    # Both options of every call are its own, and reach the wait.
    with pytest.raises(TypeError, match="timeout must be a number"):
        call(*args, timeout="x")
    with pytest.raises(tszmq.InvalidRank):
        call(*args, engine_index=7)
    with pytest.raises(TypeError, match="engine_indx"):
        call(*args, engine_indx=0)


def test_calls_show_their_options():
    """To whoever asks for help, and to type checkers."""
    calls = [name for name in vars(EngineCalls) if not name.startswith("_")]
    assert len(calls) == 14
    for name in calls:
        parameters = inspect.signature(getattr(Client, name)).parameters
        assert {"engine_index", "timeout"} <= set(parameters), name
        assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values()), name


def test_many_threads_get_their_own_answers(client):
    """Answers are told apart by number, whatever their order."""
    wrong = []

    def call(number: int) -> None:
        for _ in range(20):
            answer = client.collective_rpc("echo", args=[number], engine_index=number % 2)
            if answer != [{"method": "echo", "args": [number], "kwargs": {}}]:
                wrong.append(answer)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []


def test_tokenspeed_has_none():
    """UnsupportedField, and nothing is sent."""
    with Client.embedded(1) as other:
        with pytest.raises(tszmq.UnsupportedField):
            other.utility("reset_prefix_cache")
        assert other.generate([1]).finish_reason == "length"


def test_a_call_ends_with_its_engine_and_with_the_client():
    """Nobody waits for an answer that cannot come."""
    with Client.embedded(2, protocol="vllm") as own:
        pids = own.fleet.pids
        os.kill(pids[0], signal.SIGSTOP)
        text = "engine 0 has not answered is_sleeping within the timeout of 0.2 s"
        with pytest.raises(tszmq.DeadlineExceeded, match=text):
            own.utility("is_sleeping", engine_index=0, timeout=0.2)
        caught: list[BaseException] = []

        def call(index: int) -> None:
            try:
                own.utility("is_sleeping", engine_index=index)
            except tszmq.TszmqError as error:
                caught.append(error)

        first = threading.Thread(target=call, args=(0,))
        first.start()
        os.kill(pids[0], signal.SIGKILL)
        first.join(PATIENCE)
        assert not first.is_alive()
        assert isinstance(caught[0], tszmq.EngineDead)
        assert caught[0].engine_index == 0
        with pytest.raises(tszmq.EngineDead):
            own.utility("is_sleeping", engine_index=0)
        assert own.is_sleeping() == {1: False}
        os.kill(pids[1], signal.SIGSTOP)
        second = threading.Thread(target=call, args=(1,))
        second.start()
        own.close()
        second.join(PATIENCE)
        assert not second.is_alive()
        assert isinstance(caught[1], (tszmq.ClientClosed, tszmq.EngineDead))


def test_a_lockstep_group_is_woken_for_every_request():
    """Idle, then asked: no rank sleeps through it."""
    with Client.embedded(2, protocol="vllm", lockstep=True) as group:
        assert all(info.lockstep for info in group.engines)
        for number in range(20):
            done = group.generate([number], SamplingParams(max_tokens=3), timeout=10)
            assert done.token_ids == expected_tokens([number], 3)
        many = group.generate_many([[i, 1] for i in range(100)], SamplingParams(max_tokens=5))
        assert [done.token_ids for done in many] == [expected_tokens([i, 1], 5) for i in range(100)]


def test_a_lockstep_group_dies_as_a_whole():
    """The survivor cannot step: its requests are told so, too."""
    with Client.embedded(2, protocol="vllm", lockstep=True, step_ms=2) as group:
        params = SamplingParams(max_tokens=4000)
        streams = [group.stream([1], params, data_parallel_rank=rank) for rank in (0, 1)]
        for stream in streams:
            next(stream)
        started = time.monotonic()
        os.kill(group.fleet.pids[1], signal.SIGKILL)
        for rank, stream in enumerate(streams):
            with pytest.raises(tszmq.EngineDead) as caught:
                stream.result(PATIENCE)
            assert caught.value.engine_index == rank
        assert "lockstep group" in str(caught.value) or "lockstep" in group.health()[0].first_error
        assert time.monotonic() - started < PATIENCE
        assert not group.is_alive


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("wake_up", ("weights",), "tags must be a sequence, got 'weights'"),
        ("wake_up", (5,), "tags must be a sequence, got 5"),
        ("collective_rpc", ("echo", None, "abc"), "args must be a sequence, got 'abc'"),
        ("collective_rpc", ("echo", None, (), ["ab"]), "kwargs must be a mapping"),
        ("collective_rpc", (5,), "method must be a str, got 5"),
        ("collective_rpc", ("",), "method is empty"),
        ("update_weights", (["ab"],), "update_info must be a mapping"),
        ("init_weight_transfer", (5,), "init_info must be a mapping, got 5"),
    ],
)
def test_a_text_is_no_sequence_of_arguments(client, method, arguments, error):
    """It would be sent letter by letter."""
    with pytest.raises((TypeError, tszmq.InvalidRequest), match=error):
        getattr(client, method)(*arguments)
