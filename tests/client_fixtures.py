"""Fixtures of the black-box suites: a client with scripted engines behind it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import tszmq
from tests.mock_engine import PATIENCE, UNIT, AutoEngine, MockEngine, eventually, in_thread
from tests.mock_process import ProcessMock

ROOT = Path(__file__).resolve().parent.parent


class ClientAndEngines:
    """Opens clients with engines, and closes everything at the end of the test.

    Calling it returns ``(client, engines)``. Engines are ``MockEngine`` objects that this very
    thread drives; ``auto=True`` makes them ``AutoEngine`` and ``process=True`` ``ProcessMock``.
    """

    def __init__(self) -> None:
        self._clients: list[Any] = []
        self._engines: list[Any] = []

    def __call__(
        self,
        count: int = 1,
        *,
        indexes: Sequence[int] | None = None,
        auto: bool = False,
        process: bool = False,
        endpoints: Any = "tcp://127.0.0.1:*",
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[tszmq.Client, list[Any]]:
        indexes = range(count) if indexes is None else indexes
        bound = self.bind(endpoints, engine_count=len(indexes), **options)
        connecting = in_thread(bound.connect, PATIENCE * 2)
        address = bound.endpoints.handshake
        engines = [
            self.engine(address, index, auto=auto, process=process, **(engine or {}))
            for index in indexes
        ]
        if not auto:
            for each in engines:
                each.hello()
            if not process:  # nobody's connections are older than somebody's INIT
                for each in engines:
                    eventually(each.has_init)
            for each in engines:
                each.finish_connect()
        client = connecting.result(PATIENCE)
        self.forget(bound)
        self._clients.append(client)
        return client, engines

    def bind(self, endpoints: Any = "tcp://127.0.0.1:*", **options: Any) -> Any:
        """A client that waits for its engines; closed at the end."""
        bound = tszmq.Client.bind(endpoints, **options)
        self._clients.append(bound)
        return bound

    def engine(
        self,
        address: str,
        index: int = 0,
        *,
        auto: bool = False,
        process: bool = False,
        **options: Any,
    ) -> Any:
        """An engine that has not said anything yet (an automatic one connects by itself)."""
        made: Any
        if process:
            made = ProcessMock(address, index, auto=auto, **options)
        else:
            made = (AutoEngine if auto else MockEngine)(address, index, **options)
        self._engines.append(made)
        return made

    def forget(self, client: object) -> None:
        """Do not keep that client alive."""
        self._clients = [each for each in self._clients if each is not client]

    def close(self) -> None:
        started = time.monotonic()
        for each in reversed(self._clients):
            each.close()
        self._clients.clear()
        took = time.monotonic() - started
        for each in self._engines:
            each.close()
        for each in self._engines:
            each.check()
        assert took < 5 * UNIT, f"closing took {took:.1f} s"


@pytest.fixture
def client_and_engines() -> Iterator[ClientAndEngines]:
    """Makes a client and its engines; see ``ClientAndEngines``."""
    opened = ClientAndEngines()
    yield opened
    opened.close()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory whose path leaves room for socket names."""
    path = tempfile.mkdtemp(prefix="tz-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@attrs.frozen
class ScriptResult:
    """How a script ended."""

    exit_code: int
    output: str
    errors: str
    leaving: float | None
    """Seconds from its line "leaving" to its end."""


@pytest.fixture
def run_script() -> Callable[..., ScriptResult]:
    """Runs Python source in a process of its own, with tszmq and the test helpers importable."""
    return _run_script


def _run_script(source: str, *arguments: str, seconds: float = 3 * PATIENCE) -> ScriptResult:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""},
    )
    assert process.stdout is not None
    errors = in_thread(process.stderr.read)  # type: ignore[union-attr]
    lines: list[str] = []
    left: list[float] = []

    def read() -> None:
        for line in process.stdout:  # type: ignore[union-attr]
            if line == "leaving\n":
                left.append(time.monotonic())
            lines.append(line)

    reading = in_thread(read)
    try:
        exit_code = process.wait(seconds)
        ended = time.monotonic()
        reading.result(PATIENCE)
        return ScriptResult(
            exit_code, "".join(lines), errors.result(PATIENCE), ended - left[0] if left else None
        )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()  # type: ignore[union-attr]


def answer_one(client: tszmq.Client, engine: Any, ids: Sequence[int] = (1,)) -> tszmq.Completion:
    """One whole request on that engine.

    Fails when anything else came to the engine before; and when it returns, the client has
    read everything that the engine sent before.
    """
    call = in_thread(client.generate, [9, 9], data_parallel_rank=engine.index)
    engine.tokens(engine.recv_add().rid, list(ids), "stop")
    done = call.result(PATIENCE)
    assert list(done.token_ids) == list(ids)
    return done


def answer_after_aborts(client: tszmq.Client, engine: Any) -> None:
    """As ``answer_one``, when requests are on their way to that engine that were all aborted."""
    call = in_thread(client.generate, [9, 9], data_parallel_rank=engine.index)
    add = engine.recv_add(skip_aborts=True)
    while add.prompt != [9, 9]:
        add = engine.recv_add(skip_aborts=True)
    engine.tokens(add.rid, [1], "stop")
    assert call.result(PATIENCE).token_ids == [1]
    eventually(lambda: engine.drain() is not None and not engine.unfinished)


def inflight(client: tszmq.Client) -> list[int]:
    """Unfinished requests of every engine."""
    return [client.inflight(engine.engine_index) for engine in client.engines]


def can_be_chosen(client: tszmq.Client, index: int) -> bool:
    """Whether that engine gets new requests."""
    with client._session.shared.state as flights:
        return flights.routing.is_alive(index)


def waiting_for_a_place(client: tszmq.Client) -> int:
    """How many queue for one, or were granted one that they have not taken."""
    with client._session.shared.state as flights:
        return len(flights.places.everyone())


def partial_of(error: Any) -> tszmq.Completion:
    """What had come before that error."""
    partial = error.partial
    assert isinstance(partial, tszmq.Completion)
    return partial
