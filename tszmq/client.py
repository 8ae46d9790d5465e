"""The client: ``Client(endpoints).generate(...)`` from any thread."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from tszmq.bound import CLOSE_SECONDS, BoundClient
from tszmq.calls import EngineCalls
from tszmq.checks import engines_listed, shown, whole_number
from tszmq.core.endings import deadline_passed
from tszmq.core.flights import Flights
from tszmq.core.policy import Policy
from tszmq.core.request import ABORTED, Request
from tszmq.errors import InvalidRank, InvalidRequest
from tszmq.many import BulkCalls
from tszmq.net.addresses import check_endpoints
from tszmq.net.control import Settings
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Run
from tszmq.net.session import Session
from tszmq.net.shared import wake_all
from tszmq.net.submit import expire_at, submit, withdraw, withdraw_all
from tszmq.ownership import Mutex, holds_a_lock
from tszmq.prepare import Preparer, check_timeout
from tszmq.stream import RequestStream
from tszmq.types import (
    Completion,
    Endpoints,
    EngineHealth,
    EngineInfo,
    EngineLoad,
    SamplingParams,
    TokenIds,
)
from tszmq.wire import find_protocol
from tszmq.wire.startup import encode_init

if TYPE_CHECKING:
    from tszmq.sim import Fleet

__all__ = ["Client"]


class Client(BulkCalls, EngineCalls):
    """A client of engines that dial in: binds, waits for them, and serves any thread.

    Args:
        endpoints: The handshake address, such as ``"tcp://127.0.0.1:30500"`` or
            ``"ipc:///run/ts/handshake.sock"``, or ``Endpoints``.
        engine_count: How many engines will dial in.
        protocol: ``"tokenspeed"`` or ``"vllm"``.
        connect_timeout: Seconds to wait for them; ``math.inf``: for ever.
        max_inflight: Bound on unfinished requests; at the bound calls wait. None: no bound.
        silence_timeout: Seconds after which an engine that holds requests and sends nothing
            counts as dead. None: never.
        silence_warning: Seconds after which it is logged. None: never.
        send_timeout: Seconds after which an engine that reads nothing of what is sent to it,
            once its connection has no room for more (some 2,000 requests), counts as dead.
            TokenSpeed reads between two steps only: longer than its longest one.
        max_message_bytes: What no message of an engine may exceed. One that does is dropped, and
            what waits for output of that engine fails with ``DecodeError``.
        max_request_tokens: What the engines' ``max_model_len`` is taken as where they register
            more: a longer prompt is refused. For TokenSpeed's with speculative decoding or a
            hybrid model, which take less than they register and end over more. None: as they
            register.
        allow_remote: Bind tcp to other than loopback. The wire has no authentication.
        policy: How engines are chosen: ``LeastLoaded()``, the default, ``RoundRobin()``,
            ``RandomOfTwo()`` of ``tszmq.core.policy``, or one of the caller's.
        parallel_config: For the engines' INIT: vLLM lockstep groups whose ranks were launched
            separately need ``data_parallel_master_ip``, ``data_parallel_master_port``,
            ``_data_parallel_master_port_list``, ``_coord_store_port`` and
            ``data_parallel_size``.
        eos_token_id: The model's end token or tokens (vLLM, whose engine knows none unless told;
            without any a request goes on to ``max_tokens``).
        model: A directory of the model on this machine to read them from (vLLM).

    Raises:
        HandshakeTimeout: Not every engine came in time; everything is released.
        ConnectError: An address cannot be bound, a thread not be started, or an engine failed to
            start.
        InvalidRequest, TypeError: An argument cannot be served.
    """

    fleet: Fleet | None = None
    """The simulator engines of ``Client.embedded``; None otherwise."""

    def __init__(
        self,
        endpoints: str | Endpoints,
        *,
        engine_count: int = 1,
        protocol: str = "tokenspeed",
        connect_timeout: float = 600.0,
        max_inflight: int | None = None,
        silence_timeout: float | None = None,
        silence_warning: float | None = 60.0,
        send_timeout: float = 60.0,
        max_message_bytes: int = 64 << 20,
        max_request_tokens: int | None = None,
        allow_remote: bool = False,
        policy: Policy | None = None,
        parallel_config: Mapping[str, Any] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        model: str | os.PathLike[str] | None = None,
    ) -> None:
        bound = Client.bind(
            endpoints,
            engine_count=engine_count,
            protocol=protocol,
            connect_timeout=connect_timeout,
            max_inflight=max_inflight,
            silence_timeout=silence_timeout,
            silence_warning=silence_warning,
            send_timeout=send_timeout,
            max_message_bytes=max_message_bytes,
            max_request_tokens=max_request_tokens,
            allow_remote=allow_remote,
            policy=policy,
            parallel_config=parallel_config,
            eos_token_id=eos_token_id,
            model=model,
        )
        bound._wait(None)
        self._adopt(bound._session)

    def _adopt(self, session: Session) -> None:
        self._session = session
        session.claimed = True
        self._preparer = Preparer(session.ids, session.shared)

    @classmethod
    def _connected(cls, session: Session) -> Self:
        client = cls.__new__(cls)
        client._adopt(session)
        return client

    @classmethod
    def bind(
        cls,
        endpoints: str | Endpoints,
        *,
        engine_count: int = 1,
        protocol: str = "tokenspeed",
        connect_timeout: float = 600.0,
        max_inflight: int | None = None,
        silence_timeout: float | None = None,
        silence_warning: float | None = 60.0,
        send_timeout: float = 60.0,
        max_message_bytes: int = 64 << 20,
        max_request_tokens: int | None = None,
        allow_remote: bool = False,
        policy: Policy | None = None,
        parallel_config: Mapping[str, Any] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        model: str | os.PathLike[str] | None = None,
        _on_closed: Sequence[Callable[[], object]] = (),
    ) -> BoundClient:
        """Bind the addresses and return at once; arguments and errors as ``Client``.

        For callers who start the engines themselves: give them ``bound.endpoints.handshake``,
        then call ``bound.connect()``.
        """
        if not isinstance(allow_remote, bool):
            raise TypeError(f"allow_remote must be True or False, got {shown(allow_remote)}")
        checked = check_endpoints(endpoints, allow_remote)
        _check_policy(policy)
        if parallel_config is not None and not isinstance(parallel_config, Mapping):
            raise TypeError(f"parallel_config must be a mapping, got {shown(parallel_config)}")
        encode_init("", "", parallel_config)  # refuses what cannot be sent
        engine_count = _check_count(engine_count, "engine_count", 65536)
        if max_inflight is not None:
            max_inflight = _check_count(max_inflight, "max_inflight", None)
        max_message_bytes = _check_count(max_message_bytes, "max_message_bytes", 2**62)
        if max_request_tokens is not None:
            max_request_tokens = _check_count(max_request_tokens, "max_request_tokens", None)
        settings = Settings(
            silence_timeout=_check_optional(silence_timeout, "silence_timeout"),
            silence_warning=_check_optional(silence_warning, "silence_warning"),
            send_timeout=_check_limit(send_timeout, "send_timeout"),
            max_request_tokens=max_request_tokens,
            parallel_config=dict(parallel_config or {}),
        )
        connect_timeout = check_timeout(connect_timeout, "connect_timeout", optional=False)
        session = Session(
            checked,
            find_protocol(protocol, eos_token_id=eos_token_id, model=model),
            engine_count,
            settings,
            policy=policy,
            max_inflight=max_inflight,
            max_message_bytes=max_message_bytes,
            on_closed=list(_on_closed),
        )
        return BoundClient(session, connect_timeout, cls)

    @classmethod
    def embedded(cls, engine_count: int = 1, **options: Any) -> Self:
        """A client connected to simulator engines in child processes of its own.

        Args:
            engine_count: How many.
            options: Those of ``Client``, and those of ``tszmq.sim.Fleet`` (``step_ms``,
                ``max_num_seqs``, ``kv_pages``, ...). The children end with the client.
        """
        from tszmq.embedded import start_embedded

        return cast("Self", start_embedded(cls, engine_count, options))

    # -- requests

    def generate(
        self,
        ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        data_parallel_rank: int | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Completion:
        """Generate the whole completion of one prompt; blocks. Any thread.

        Args:
            ids: The prompt's token ids: a sequence or array-like of ints.
            sampling_params: How to sample; None for the defaults.
            request_id: A label of the caller's, repeated on the result; needs not be unique.
            data_parallel_rank: Pin to the engine with that index.
            timeout: Seconds of wall time in total.
            priority: Scheduling priority, where the protocol has one (vLLM): lower is earlier,
                None is 0; at engines started with ``--scheduling-policy priority``.

        Raises:
            InvalidRequest, TypeError: Nothing was sent.
            DeadlineExceeded: With ``partial``; the request was aborted.
            QueueFull, EngineDead, RequestRejected, TokensLost, ClientClosed, ForkedClient.
        """
        deadline = _deadline(timeout, time.monotonic())
        session, gate = self._session, Gate()
        session.check_caller()
        # Chunks nobody reads are not asked for, but what a deadline cuts off is.
        prepared = self._preparer.prepare(
            ids,
            sampling_params,
            label=request_id,
            rank=data_parallel_rank,
            priority=priority,
            gate=gate,
            chunks=timeout is not None,
        )
        request = prepared.request
        try:
            submit(session, prepared, deadline)
            del prepared  # it has the prompt
            if not gate.wait(lambda: request.end is not None, deadline):
                assert timeout is not None
                withdraw(session, request, deadline_passed(timeout))
        except BaseException:
            withdraw(session, request, ABORTED)
            raise
        return request.result()

    def stream(
        self,
        ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        data_parallel_rank: int | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> RequestStream:
        """Submit a prompt and return an iterator of its ``TokenChunk``. Any thread.

        Arguments and errors as ``generate``. Use it in a ``with`` block, which aborts what is
        unfinished when it is left.
        """
        deadline = _deadline(timeout, time.monotonic())
        session, gate = self._session, Gate()
        session.check_caller()
        prepared = self._preparer.prepare(
            ids,
            sampling_params,
            label=request_id,
            rank=data_parallel_rank,
            priority=priority,
            gate=gate,
            chunks=True,
            streaming=True,
        )
        request = prepared.request
        try:
            submit(session, prepared, deadline)
            if deadline is not None and timeout is not None:
                expire_at(session, request, deadline, timeout)
            return RequestStream(session, request, gate)
        except BaseException:
            withdraw(session, request, ABORTED)
            raise

    def abort(self, request_id: str) -> None:
        """Abort every unfinished request with that label, those that wait for a place included.
        Any thread; does not wait."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        self._abort_where(lambda request: request.label == request_id)

    def abort_all(self) -> None:
        """Abort every unfinished request, those that wait for a place and the prompts that a
        batch call has and did not send yet included; what an iterator of prompts yields later is
        sent. Any thread; does not wait."""
        self._abort_where(lambda _: True, batches=True)

    def _abort_where(self, chosen: Callable[[Request], bool], batches: bool = False) -> None:
        self._session.check_process()
        if holds_a_lock():
            # A finalizer of the caller's, run by the collector inside a guarded block.
            self._session.shared.mailbox.post(Run(partial(self._abort_where, chosen, batches)))
            return
        with self._session.shared.state as flights:
            flights.batch_aborts += batches
            requests = list(flights.requests.values())
            waiting = list(flights.places.waiting.values())
        mine, early = ([each for each in some if chosen(each)] for some in (requests, waiting))
        with self._session.shared.state as flights:
            tickets = flights.abort_waiting(set(early), time.monotonic())
        wake_all(tickets)
        # Those who waited may have got their place just now.
        withdraw_all(self._session, mine + early, ABORTED)

    # -- engines

    @property
    def endpoints(self) -> Endpoints:
        """The addresses actually bound."""
        return self._session.endpoints

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """Every engine with its registration, by index."""
        self._session.check_process()
        with self._session.shared.state as flights:
            return tuple(flights.infos())

    @property
    def is_alive(self) -> bool:
        """Whether the client is open and at least one engine alive."""
        self._session.check_process()
        with self._session.shared.state as flights:
            return flights.closed is None and bool(flights.alive_indices())

    def health(self) -> dict[int, EngineHealth]:
        """How each engine is doing, by index; no engine is asked."""
        self._session.check_process()
        with self._session.shared.state as flights:
            return flights.health(time.monotonic())

    def load(self, engine_index: int) -> EngineLoad | None:
        """The stored load report of an engine, or None when it made none.

        Raises:
            InvalidRank: No engine has that index.
        """
        with self._state_of(engine_index) as flights:
            return flights.routing.load(engine_index)

    def inflight(self, engine_index: int) -> int:
        """Our unfinished requests at an engine.

        Raises:
            InvalidRank: No engine has that index.
        """
        with self._state_of(engine_index) as flights:
            return flights.routing.inflight(engine_index)

    def _state_of(self, engine_index: int) -> Mutex[Flights]:
        self._session.check_process()
        engine_index = whole_number(engine_index, "engine_index")
        state = self._session.shared.state
        with state as flights:
            indices = sorted(flights.engines)
        if engine_index not in indices:
            raise InvalidRank(
                f"no engine has the index {shown(engine_index)}; {engines_listed(indices)}"
            )
        return state

    # -- the end

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Abort what is unfinished, wake every waiter, free the addresses.

        Any thread, any number of times. A call that waits elsewhere raises ClientClosed.

        Args:
            timeout: Seconds to wait for the threads; they go on ending after that.
        """
        self._session.close(check_timeout(timeout, "timeout", optional=False))

    def __enter__(self) -> Self:
        if not self._session.is_foreign():  # there, leaving the block does nothing
            self._session.raise_if_closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        session = self._session
        closed = ", closed" if session.shared.ended.is_set() else ""
        count = session.engine_count
        return f"<tszmq.Client at {session.endpoints.handshake}, engines: {count}{closed}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client cannot be copied or pickled: it owns sockets and threads. Send its "
            "arguments to the other process, and make a client there"
        )


def _deadline(timeout: float | None, now: float) -> float | None:
    return None if timeout is None else now + check_timeout(timeout, "timeout")


def _check_policy(policy: object) -> None:
    if policy is None:
        return
    wanted = ("score", "pick", "uses_request")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in wanted):
        raise TypeError(
            "policy must be an object such as tszmq.core.policy.RoundRobin(), with "
            f"{', '.join(wanted)}; got {shown(policy)}"
        )


def _check_count(value: object, what: str, most: int | None) -> int:
    count = whole_number(value, what)
    if count < 1 or (most is not None and count > most):
        limit = "at least 1" if most is None else f"in [1, {most}]"
        raise InvalidRequest(f"{what} must be {limit}, got {shown(value)}")
    return count


def _check_optional(value: object, what: str) -> float | None:
    return None if value is None else _check_limit(value, what, optional=True)


def _check_limit(value: object, what: str, *, optional: bool = False) -> float:
    seconds = check_timeout(value, what, optional=optional)
    if seconds == 0 or math.isinf(seconds):
        or_none = ", or None" if optional else ""
        raise InvalidRequest(f"{what} must be positive and finite{or_none}; got {shown(value)}")
    return seconds
