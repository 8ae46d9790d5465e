"""Lockstep groups: who is woken when. The engines are mocks that step when the test says so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.mock_engine import PATIENCE, UNIT, MockEngine, eventually, in_thread
from tszmq import Client, EngineDead, SamplingParams
from tszmq.net import lockstep

WAVE = b"\x02"
ADD = b"\x00"
UTILITY = b"\x03"
PARAMS = SamplingParams(max_tokens=100)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence alone wakes nobody, however slow the test; some want it otherwise."""
    monkeypatch.setattr(lockstep, "_SILENCE", 3600.0)


@pytest.fixture
def group(client_and_engines: Any) -> tuple[Client, list[MockEngine]]:
    client, engines = client_and_engines(2, protocol="vllm", engine={"data_parallel_size": 2})
    assert all(info.lockstep for info in client.engines)
    # The last one to register has been looked after by then.
    assert all(silent(engine, 0.1) for engine in engines)
    return client, engines


def hear(engine: MockEngine) -> tuple[bytes, Any]:
    """Its next message: the type, and what it holds."""
    assert engine.input is not None
    assert engine.input.poll(round(PATIENCE * 1000)), f"nothing comes to engine {engine.index}"
    kind, body = engine.input.recv_multipart()
    return kind, msgspec.msgpack.decode(body)


def hear_wave(engine: MockEngine) -> int:
    kind, (wave, excluded) = hear(engine)
    assert (kind, excluded) == (WAVE, None)
    return int(wave)


def park(engine: MockEngine, wave: int) -> None:
    """It and its peers found that nobody has work."""
    done = [engine.index, [], None, 1.0, None, None, wave, None, None, None]
    engine.send_raw([msgspec.msgpack.encode(done)])


def finish(engine: MockEngine, rid: str) -> None:
    """The one token of a request, which ends with it."""
    row = [rid, [7], None, None, None, 1]  # "length"
    done = [engine.index, [row], None, 1.0, None, None, None, None, None, None]
    engine.send_raw([msgspec.msgpack.encode(done)])


def silent(engine: MockEngine, seconds: float) -> bool:
    assert engine.input is not None
    return not engine.input.poll(round(seconds * 1000))


@pytest.mark.parametrize("parked", [(0,), (0, 1)])
def test_a_rank_that_parks_while_another_has_work_is_woken_again(group, parked) -> None:
    """It read the wake-up just before it parked, and ignored it: the one with the request, which
    had parked before, steps alone and waits for it."""
    client, engines = group
    asked = in_thread(client.generate, [1], PARAMS, data_parallel_rank=1)
    kind, add = hear(engines[1])
    assert kind == ADD
    first = [hear_wave(engine) for engine in engines]
    assert first[0] == first[1]
    for index in parked:
        park(engines[index], first[0])
    again = [hear_wave(engine) for engine in engines]
    assert again[0] == again[1] > first[0]
    assert all(silent(engine, 0.1) for engine in engines), "once for all that parked"
    finish(engines[1], add[0])
    assert asked.result(PATIENCE).token_ids == [7]


def test_a_group_without_work_is_left_to_sleep(group) -> None:
    client, engines = group
    asked = in_thread(client.generate, [1], PARAMS, data_parallel_rank=1)
    _, add = hear(engines[1])
    wave, _ = (hear_wave(engine) for engine in engines)
    finish(engines[1], add[0])
    assert asked.result(PATIENCE).token_ids == [7]
    for engine in engines:
        park(engine, wave)
    assert all(silent(engine, 0.2) for engine in engines)
    # The next one finds it, whatever it calls its own wave by now.
    again = in_thread(client.generate, [2], PARAMS, data_parallel_rank=0)
    _, add = hear(engines[0])
    assert min(hear_wave(engine) for engine in engines) > wave
    finish(engines[0], add[0])
    assert again.result(PATIENCE).token_ids == [7]
    eventually(lambda: client.inflight(0) == 0)


def ask(client: Client, engines: list[MockEngine], rank: int) -> tuple[Any, str, int]:
    """A request that its rank has, for which every rank was woken: the call, its id, the wave."""
    asked = in_thread(client.generate, [1], PARAMS, data_parallel_rank=rank)
    kind, add = hear(engines[rank])
    assert kind == ADD
    waves = {hear_wave(engine) for engine in engines}
    assert len(waves) == 1
    return asked, add[0], waves.pop()


def hear_more(engines: list[MockEngine], wave: int) -> int:
    """Every rank is woken again, with a higher number."""
    waves = {hear_wave(engine) for engine in engines}
    assert len(waves) == 1
    assert min(waves) > wave
    return waves.pop()


def test_a_rank_that_parks_again_and_again_is_not_woken_for_ever(group) -> None:
    """It lost a request: silence tells, and not how often it parks."""
    client, engines = group
    asked, rid, wave = ask(client, engines, 1)
    park(engines[0], wave)
    wave = hear_more(engines, wave)
    for _ in range(5):
        park(engines[0], wave)
        assert all(silent(engine, 0.05) for engine in engines)
    # Output, and it may have been the race again.
    silence = client.health()[1].last_output
    token = [1, [[rid, [7]]], None, 1.0, None, None, None, None, None, None]
    engines[1].send_raw([msgspec.msgpack.encode(token)])
    eventually(lambda: client.health()[1].last_output < silence)
    park(engines[0], wave)
    hear_more(engines, wave)
    finish(engines[1], rid)
    assert asked.result(PATIENCE).token_ids == [7, 7]


def test_parking_is_no_sign_of_life(client_and_engines) -> None:
    """A rank that parks with a request in flight is given up after its ``silence_timeout``."""
    client, engines = client_and_engines(
        2, protocol="vllm", engine={"data_parallel_size": 2}, silence_timeout=0.5 * UNIT
    )
    asked = in_thread(client.generate, [1], PARAMS, data_parallel_rank=1)

    def is_over() -> bool:
        park(engines[1], 1)
        return asked.done()

    eventually(is_over)
    with pytest.raises(EngineDead, match="sent nothing"):
        asked.result()


def test_a_group_that_dies_bit_by_bit_takes_no_successor_with_it(client_and_engines) -> None:
    """The first rank was restarted, and registered, before the last of the old ones was buried."""
    client, engines = client_and_engines(2, protocol="vllm", engine={"data_parallel_size": 2})
    address = client.endpoints.handshake
    assert all(silent(engine, 0.1) for engine in engines)
    asked, rid, _ = ask(client, engines, 1)
    finish(engines[1], rid)
    assert asked.result(PATIENCE).token_ids == [7]
    assert engines[1].input is not None
    engines[1].input.close(0)  # its output, on which it was heard, is open: more may come there
    eventually(lambda: not client.engines[1].alive)
    engines[0].close()
    eventually(lambda: not client.engines[0].alive)
    client_and_engines.engine(address, 0, data_parallel_size=2).connect()
    eventually(lambda: client.engines[0].alive)
    assert not is_buried(client, 1)
    eventually(lambda: is_buried(client, 1))
    client_and_engines.engine(address, 1, data_parallel_size=2).connect()
    eventually(lambda: client.engines[1].alive)
    assert client.engines[0].alive


def is_buried(client: Client, index: int) -> bool:
    with client._session.shared.state as flights:
        return flights.engines[index].dropped


def test_a_rank_that_registers_late_is_woken_for_what_the_others_hold(client_and_engines) -> None:
    """After a restart of the group: the first rank is asked before the last one is there."""
    client, engines = client_and_engines(2, protocol="vllm", engine={"data_parallel_size": 2})
    for engine in engines:
        engine.close()
    eventually(lambda: not client.is_alive)
    address = client.endpoints.handshake
    first = client_and_engines.engine(address, 0, data_parallel_size=2).connect()
    eventually(lambda: client.engines[0].alive)
    assert silent(first, 0.1)  # it has been looked after by then
    asked, rid, wave = ask(client, [first], 0)
    late = client_and_engines.engine(address, 1, data_parallel_size=2).connect()
    hear_more([first, late], wave)
    finish(first, rid)
    assert asked.result(PATIENCE).token_ids == [7]


def test_a_group_is_woken_when_a_call_was_answered(group) -> None:
    """Ranks that are paused ignore wake-ups; whether they are no more, they alone know."""
    client, engines = group
    asked, rid, wave = ask(client, engines, 0)
    call = in_thread(client.resume, engine_index=1)
    kind, body = hear(engines[1])
    assert kind == UTILITY
    answer = [1, [], None, 1.0, [body[1], None, [None, None]], None, None, None, None, None]
    engines[1].send_raw([msgspec.msgpack.encode(answer)])
    call.result(PATIENCE)
    hear_more(engines, wave)
    finish(engines[0], rid)
    assert asked.result(PATIENCE).token_ids == [7]


def test_a_group_that_holds_requests_and_is_silent_is_woken_again_and_again(
    group, monkeypatch
) -> None:
    """Whatever it was that it missed."""
    monkeypatch.setattr(lockstep, "_SILENCE", 0.05)
    client, engines = group
    asked, rid, wave = ask(client, engines, 0)
    for _ in range(3):
        wave = hear_more(engines, wave)
    finish(engines[0], rid)
    assert asked.result(PATIENCE).token_ids == [7]
    for engine in engines:
        while not silent(engine, 0.2):
            hear_wave(engine)
    assert all(silent(engine, 0.3) for engine in engines)
    # The next request starts it anew.
    asked, rid, wave = ask(client, engines, 1)
    hear_more(engines, wave)
    finish(engines[1], rid)
    assert asked.result(PATIENCE).token_ids == [7]


def test_a_group_that_speaks_is_left_alone(group, monkeypatch) -> None:
    monkeypatch.setattr(lockstep, "_SILENCE", 0.5)
    client, engines = group
    asked, rid, _ = ask(client, engines, 0)
    for _ in range(10):
        token = [0, [[rid, [7]]], None, 1.0, None, None, None, None, None, None]
        engines[0].send_raw([msgspec.msgpack.encode(token)])
        assert all(silent(engine, 0.05) for engine in engines)
    finish(engines[0], rid)
    assert asked.result(PATIENCE).token_ids == [7] * 11
