"""A scripted engine for tests: the engine side of TokenSpeed's wire on raw pyzmq and msgspec.

``MockEngine`` does one thing at a time, when the test says so, in the test's own thread.
``AutoEngine`` is a thread that serves whatever comes until it is closed. Both read requests as
strictly as the real engine and note in ``malformed`` what it would lose in silence or die of.

Nothing here imports tszmq, so that both sides of the wire are read independently.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import attrs
import msgspec
import zmq

T = TypeVar("T")

SENTINEL = b"ENGINE_CORE_DEAD"
VOCABULARY = 32000
UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
"""Seconds that count as one; more on a slow machine."""
PATIENCE = 10.0 * UNIT
"""Seconds after which a wait for something that must happen is a failure."""


# --- small things that every suite needs ---------------------------------------------------


def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
    """Run a call in a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test-call", daemon=True).start()
    return future


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE, what: str = "") -> Any:
    """Wait until ``condition()`` is true, and fail when it never is."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, what or f"not true within {seconds} s"
        pause.wait(0.002)


def stays_true(condition: Callable[[], Any], seconds: float, what: str = "") -> None:
    """Fail as soon as ``condition()`` is not true during that time."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < deadline:
        assert condition(), what or f"no longer true within {seconds} s"
        pause.wait(0.005)


def predicted(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that ``AutoEngine`` answers a prompt with."""
    start = sum(prompt) * 31 + len(prompt)
    return [(start + 7 * k) % VOCABULARY for k in range(count)]


def predicted_logprob(k: int) -> float:
    """The log-probability that ``AutoEngine`` gives to token ``k``."""
    return -0.5 - 0.001 * k


# --- what comes in -------------------------------------------------------------------------


class SamplingBlock(msgspec.Struct, array_like=True):
    """The nested array of a request, by position."""

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: int | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


class _AddBody(msgspec.Struct, array_like=True, tag="TokenizedGenerateReqInput"):
    rid: str
    http_worker_ipc: str | None
    input_text: str | None
    input_ids: list[int]
    sampling_params: SamplingBlock
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False


@attrs.frozen
class Add:
    """A request, as the engine reads it."""

    rid: str
    prompt: list[int]
    sampling: SamplingBlock
    stream: bool
    return_logprob: bool


@attrs.frozen
class Abort:
    """An abort message: the ids it names."""

    rids: list[str]


_add_decoder = msgspec.msgpack.Decoder(_AddBody)
_abort_decoder = msgspec.msgpack.Decoder(list[str])


def decode_input(frames: Sequence[bytes]) -> Add | Abort:
    """One message from the input socket. Raises ValueError or msgspec's for what is dropped."""
    if len(frames) != 2 or frames[0] not in (b"\x00", b"\x01"):
        raise ValueError(f"not a request: {[bytes(frame[:40]) for frame in frames]}")
    if frames[0] == b"\x01":
        return Abort(_abort_decoder.decode(frames[1]))
    body = _add_decoder.decode(frames[1])
    return Add(body.rid, body.input_ids, body.sampling_params, body.stream, body.return_logprob)


# --- what goes out -------------------------------------------------------------------------


class Load(NamedTuple):
    """The tail of a batch. ``num_running`` includes those that wait, as TokenSpeed's does."""

    num_running: int
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 1000


NO_LOAD = Load(0, 0, 0, 0)


@attrs.frozen
class Row:
    """One request's share of a batch."""

    rid: str
    ids: Sequence[int]
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: Sequence[float] = ()


def encode_batch(
    rows: Sequence[Row],
    load: Load | None,
    engine_index: int,
    era: int = 14,
    extra: Iterable[Any] = (),
) -> bytes:
    """A batch with 14, 10 (no load) or 9 (no engine index either) elements."""
    fields: list[Any] = [
        "BatchTokenIDOutSlim",
        [row.rid for row in rows],
        [list(row.ids) for row in rows],
        [row.finish for row in rows],
        [row.prompt_tokens for row in rows],
        [row.completion_tokens for row in rows],
        [row.cached_tokens for row in rows],
        [list(row.logprobs) for row in rows],
        [list(row.ids) if row.logprobs else [] for row in rows],
        engine_index,
        *(load or NO_LOAD),
    ]
    return msgspec.msgpack.encode(fields[:era] + list(extra))


REGISTRATION: dict[str, Any] = {
    "max_model_len": 8192,
    "num_gpu_blocks": 1000,
    "prefix_granularity": 64,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "multimodal_encoder_dtype": None,
    "vllm_version": "tokenspeed-0.1.1",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "instance_id": "some-org/some-model",
    "kv_cache_size_tokens": 64000,
    "kv_cache_max_concurrency": None,
    "kv_events_config": None,
}


def identity(index: int) -> bytes:
    """The two bytes that an engine introduces itself with."""
    return index.to_bytes(2, "little")


class MockEngine:
    """One engine, driven step by step from one thread.

    It has a ZMQ context of its own, so that closing it looks like a death from outside.

    Args:
        handshake_address: Where the client listens.
        index: The engine index.
        max_model_len: What it registers with.
        era: Elements in its batches: 14, 10 or 9.
        auto: Connect at once.
        **registration: Keys of the registration to change; ``...`` leaves one out.
    """

    def __init__(
        self,
        handshake_address: str,
        index: int = 0,
        *,
        max_model_len: int = 8192,
        era: int = 14,
        auto: bool = False,
        **registration: Any,
    ) -> None:
        self.index = index
        self.era = era
        self.registration = {**REGISTRATION, "max_model_len": max_model_len, **registration}
        self.registration = {k: v for k, v in self.registration.items() if v is not ...}
        self.requests: dict[str, Add] = {}
        self.aborts: list[str] = []
        self.abort_messages: list[Abort] = []
        self.malformed: list[str] = []
        self.unfinished: set[str] = set()
        self.closed = False
        self.init: dict[str, Any] = {}
        self._sent: dict[str, int] = {}
        self._context = zmq.Context()
        self._handshake = self._socket(zmq.DEALER)
        self._handshake.connect(handshake_address)
        self.input: zmq.Socket[bytes] | None = None
        self.output: zmq.Socket[bytes] | None = None
        if auto:
            self.connect()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, identity(self.index))
        return socket

    # --- start-up ---

    def hello(self) -> MockEngine:
        """Say HELLO, as engines do once."""
        self.say("HELLO")
        return self

    def say(self, status: str) -> None:
        """Send a message of that status on the handshake socket."""
        self._handshake.send(
            msgspec.msgpack.encode(
                {"status": status, "local": True, "headless": True, "parallel_config_hash": None}
            )
        )

    def wait_init(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """INIT, which names the data sockets."""
        ready = self._handshake.poll(round(timeout * 1000))
        assert ready, f"engine {self.index}: no INIT within {timeout} s"
        frames = self._handshake.recv_multipart()
        assert len(frames) == 1, f"INIT of {len(frames)} frames"
        self.init = msgspec.msgpack.decode(frames[0])
        return self.init

    def has_init(self) -> bool:
        """Whether INIT has come; does not take it."""
        return bool(self._handshake.poll(0))

    def ready(self) -> None:
        """Say READY. The handshake socket has done its work then."""
        self.say("READY")
        self._handshake.close(linger=1000)

    def register(self) -> None:
        """Connect to the data sockets and send the registration."""
        addresses = self.init["addresses"]
        self.input = self._socket(zmq.DEALER)
        self.input.connect(addresses["inputs"][0])
        self.output = self._socket(zmq.PUSH)
        self.output.connect(addresses["outputs"][0])
        self.input.send(msgspec.msgpack.encode(self.registration))

    def connect(self, timeout: float = PATIENCE) -> MockEngine:
        """The whole start-up."""
        self.hello()
        self.finish_connect(timeout)
        return self

    def finish_connect(self, timeout: float = PATIENCE) -> None:
        """What comes after HELLO."""
        self.wait_init(timeout)
        self.ready()
        self.register()

    # --- in ---

    def recv(self, timeout: float = PATIENCE) -> Add | Abort:
        """The next message, which has to come and has to be right."""
        assert self.input is not None
        ready = self.input.poll(round(timeout * 1000))
        assert ready, f"engine {self.index}: nothing came within {timeout} s"
        message = self._take()
        assert message is not None, self.malformed[-1]
        return message

    def _take(self) -> Add | Abort | None:
        assert self.input is not None
        try:
            message = decode_input(self.input.recv_multipart())
        except (ValueError, msgspec.MsgspecError) as error:
            self.malformed.append(f"would be dropped: {error}")
            return None
        if isinstance(message, Abort):
            self.abort_messages.append(message)
            self.aborts += message.rids
            self.unfinished.difference_update(message.rids)
            return message
        self._note_what_kills(message)
        self.requests[message.rid] = message
        self.unfinished.add(message.rid)
        self._sent[message.rid] = 0
        return message

    def _note_what_kills(self, add: Add) -> None:
        """What the real engine accepts and then dies of."""
        limit = self.registration["max_model_len"] - 2
        if add.rid in self.requests:
            self.malformed.append(f"would kill: the id {add.rid} was used before")
        if not 0 < len(add.prompt) <= limit:
            self.malformed.append(f"would kill: {len(add.prompt)} prompt tokens")
        elif min(add.prompt) < 0 or max(add.prompt) >= 2**31:
            self.malformed.append("would kill: a token outside int32")
        if add.sampling.stream_interval == 0:
            self.malformed.append("would kill: stream_interval 0")

    def recv_add(self, timeout: float = PATIENCE, *, skip_aborts: bool = False) -> Add:
        """The next message, which has to be a request (or, if wanted, aborts and then one)."""
        message = self.recv(timeout)
        while skip_aborts and isinstance(message, Abort):
            message = self.recv(timeout)
        assert isinstance(message, Add), f"engine {self.index}: a request was due, got {message}"
        return message

    def recv_adds(self, count: int, timeout: float = PATIENCE) -> list[Add]:
        """The next messages, all requests."""
        return [self.recv_add(timeout) for _ in range(count)]

    def recv_abort(self, timeout: float = PATIENCE) -> list[str]:
        """The ids of the next message, which has to be an abort."""
        message = self.recv(timeout)
        assert isinstance(message, Abort), f"engine {self.index}: an abort was due, got {message}"
        assert message.rids, "an abort of nothing"
        return message.rids

    def recv_aborts_of(self, rids: Iterable[str], timeout: float = PATIENCE) -> None:
        """Aborts until each of these ids, and no other, was named exactly once."""
        wanted = sorted(rids)
        got: list[str] = []
        while len(got) < len(wanted):
            got += self.recv_abort(timeout)
        assert sorted(got) == wanted

    def expect_nothing(self, seconds: float = 0.1) -> None:
        """No message may come during that time."""
        assert self.input is not None
        if self.input.poll(round(seconds * 1000)):
            raise AssertionError(f"engine {self.index}: not expected: {self._take()}")

    def drain(self) -> list[Add | Abort]:
        """What has come by now."""
        assert self.input is not None
        messages = []
        while self.input.poll(0):
            message = self._take()
            if message is not None:
                messages.append(message)
        return messages

    # --- out ---

    def row(
        self,
        rid: str,
        ids: Sequence[int],
        finish: str = "",
        *,
        logprobs: Sequence[float] | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int = 0,
    ) -> Row:
        """A row with its counts right (unless told otherwise)."""
        self._sent[rid] = self._sent.get(rid, 0) + len(ids)
        if finish:
            self.unfinished.discard(rid)
        add = self.requests.get(rid)
        return Row(
            rid,
            ids,
            finish,
            len(add.prompt) if add else 0,
            self._sent[rid] if completion_tokens is None else completion_tokens,
            cached_tokens,
            logprobs or (),
        )

    def tokens(
        self,
        rid: str,
        ids: Sequence[int],
        finish: str = "",
        logprobs: Sequence[float] | None = None,
        completion_tokens: int | None = None,
        *,
        cached_tokens: int = 0,
        load: Load | None = None,
    ) -> None:
        """A batch of one row."""
        row = self.row(
            rid,
            ids,
            finish,
            logprobs=logprobs,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
        )
        self.send_batch([row], load)

    def send_batch(
        self,
        rows: Sequence[Row],
        load: Load | None = None,
        engine_index: int | None = None,
        era: int | None = None,
        extra: Iterable[Any] = (),
    ) -> None:
        """One output message; a load of None is a tail of zeros: not known."""
        index = self.index if engine_index is None else engine_index
        self.send_raw([encode_batch(rows, load, index, era or self.era, extra)])

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Any frames on the output socket."""
        assert self.output is not None
        self.output.send_multipart(frames)

    def sentinel(self) -> None:
        """The farewell of an engine that goes down in good order."""
        self.send_raw([SENTINEL])

    # --- end ---

    def close(self, *, flush: bool = False) -> None:
        """Be gone, as after a kill: what was not handed to the kernel is lost.

        Args:
            flush: Hand over everything sent so far first.
        """
        if self.closed:
            return
        self.closed = True
        for socket in (self._handshake, self.output, self.input):
            if socket is not None and not socket.closed:
                socket.close(linger=5000 if flush else 0)
        self._context.term()

    def check(self) -> None:
        """What holds at the end of every test."""
        assert self.malformed == []
        assert all(rid.isascii() and rid for rid in self.requests)
        assert len({len(rid) for rid in self.requests}) <= 1, "wire ids differ in length"
        assert len(self.aborts) == len(set(self.aborts)), "an id was aborted twice"
        assert all(message.rids for message in self.abort_messages), "an abort of nothing"


class AutoEngine:
    """A thread that serves every request with the predicted tokens until it is closed.

    ``stream=False`` rows come as the real engine sends them: token 1, every 50th, the rest.

    Args:
        handshake_address: Where the client listens.
        index: The engine index.
        step_delay: Seconds between two steps.
        load: ``"honest"``, None for a tail of zeros, a ``Load``, or a callable that makes one.
        refuse: Which requests get an abort without tokens.
        **engine: As for ``MockEngine``.
    """

    def __init__(
        self,
        handshake_address: str,
        index: int = 0,
        *,
        step_delay: float = 0.0,
        load: str | Load | Callable[[], Load] | None = "honest",
        refuse: Callable[[Add], bool] = lambda add: False,
        **engine: Any,
    ) -> None:
        self.index = index
        self.step_delay = step_delay
        self.load = load
        self.refuse = refuse
        self.served: list[Add] = []
        self.aborts: list[str] = []
        self.most_at_once = 0
        self.connected = threading.Event()
        self.error: BaseException | None = None
        self.malformed: list[str] = []
        self._arguments = (handshake_address, index, engine)
        self._running: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._stalled = threading.Event()
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="auto-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many requests it works on."""
        return len(self._running)

    def stall(self) -> None:
        """Take requests and answer none."""
        self._stalled.set()
        os.write(self._wake_write, b"s")

    def resume(self) -> None:
        """Work again."""
        self._stalled.clear()
        os.write(self._wake_write, b"r")

    def wait_connected(self) -> None:
        """Until it has registered."""
        eventually(lambda: self.connected.is_set() or self.error, what="the engine did not start")
        assert self.error is None, self.error

    def close(self) -> None:
        """Stop as after a kill."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake_write, b"c")
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def check(self) -> None:
        """What holds at the end of every test."""
        assert self.error is None, self.error
        assert self.malformed == []
        assert len({len(add.rid) for add in self.served}) <= 1, "wire ids differ in length"
        assert len(self.aborts) == len(set(self.aborts)), "an id was aborted twice"

    def _run(self) -> None:
        address, index, options = self._arguments
        engine = MockEngine(address, index, **options)
        try:
            engine.hello()
            while not engine.has_init():
                if self._closing.wait(0.002):
                    return
            engine.finish_connect()
            self.connected.set()
            self._serve(engine)
        except BaseException as error:
            self.error = error
        finally:
            self.malformed = engine.malformed
            engine.close()

    def _serve(self, engine: MockEngine) -> None:
        poller = zmq.Poller()
        poller.register(engine.input, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_step = time.monotonic()
        while not self._closing.is_set():
            working = self._running and not self._stalled.is_set()
            pause = max(0.0, next_step - time.monotonic()) if working else None
            events = dict(poller.poll(None if pause is None else round(pause * 1000)))
            if self._wake_read in events:
                os.read(self._wake_read, 100)
            for message in engine.drain():
                self._take(engine, message)
            if working and time.monotonic() >= next_step:
                self._step(engine)
                next_step = time.monotonic() + self.step_delay

    def _take(self, engine: MockEngine, message: Add | Abort) -> None:
        if isinstance(message, Abort):
            self.aborts += message.rids
            for rid in message.rids:
                self._running.pop(rid, None)
        elif self.refuse(message):
            self.served.append(message)
            engine.tokens(message.rid, [], "abort")
        else:
            self.served.append(message)
            self._running[message.rid] = self._reported[message.rid] = 0
            self.most_at_once = max(self.most_at_once, len(self._running))

    def _step(self, engine: MockEngine) -> None:
        load = self._sample_load()
        rows = []
        for rid in list(self._running):
            add = engine.requests[rid]
            self._running[rid] = count = self._running[rid] + 1
            tokens = predicted(add.prompt, count)
            finish = self._finish(add, tokens)
            if not (finish or add.stream or count == 1 or count % 50 == 0):
                continue
            start, self._reported[rid] = self._reported[rid], count
            logprobs = [predicted_logprob(k) for k in range(start, count)]
            rows.append(
                engine.row(
                    rid, tokens[start:], finish, logprobs=logprobs if add.return_logprob else None
                )
            )
            if finish:
                del self._running[rid], self._reported[rid]
        if rows:
            engine.send_batch(rows, load)

    @staticmethod
    def _finish(add: Add, tokens: list[int]) -> str:
        limit = add.sampling.max_new_tokens
        if not add.sampling.ignore_eos and tokens[-1] in (add.sampling.stop_token_ids or ()):
            return "stop"
        return "length" if len(tokens) >= (16 if limit is None else limit) else ""

    def _sample_load(self) -> Load | None:
        if self.load == "honest":
            return Load(len(self._running), 0, min(999, 10 * len(self._running)), 1000)
        if callable(self.load):
            return self.load()
        return self.load if isinstance(self.load, Load) else None
