"""Calls of an engine's own methods: pausing, sleeping, adapters, weights (vLLM).

TokenSpeed's wire has none of this: every call raises ``UnsupportedField`` there. What a method
does, and what the server must have been started with, is vLLM's affair; the names and arguments
are those of ``EngineCore`` and ``Worker`` in 0.33.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, overload

from tszmq.checks import engines_listed, shown, whole_number
from tszmq.core.calls import Call
from tszmq.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRank,
    InvalidRequest,
    RequestRejected,
)
from tszmq.net import mailbox as mail
from tszmq.net.gate import Gate
from tszmq.net.session import Session
from tszmq.prepare import check_timeout

__all__ = ["EngineCalls"]


class EngineCalls:
    """The part of a ``Client`` that calls engines; any thread may call any method."""

    _session: Session

    @overload
    def utility(
        self,
        method: str,
        *args: object,
        engine_index: None = None,
        timeout: float | None = None,
    ) -> dict[int, Any]: ...
    @overload
    def utility(
        self, method: str, *args: object, engine_index: int, timeout: float | None = None
    ) -> Any: ...
    def utility(
        self,
        method: str,
        *args: object,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Call a method of the engines and wait for the answers.

        Args:
            method: A public method of the engine, such as ``"reset_prefix_cache"``.
            args: Plain values.
            engine_index: The engine; None: every living one.
            timeout: Seconds to wait in total.

        Returns:
            What the engine returned; for all of them, a mapping from engine index to that.

        Raises:
            UnsupportedField: The protocol has no such calls.
            RequestRejected: The method failed; the message is the engine's.
            EngineDead: An engine is dead, or died before it answered.
            DeadlineExceeded: No answer in time; the engine may still carry the call out.
            InvalidRequest, TypeError, ClientClosed, ForkedClient.
        """
        session = self._session
        session.check_caller()
        if engine_index is not None:
            engine_index = whole_number(engine_index, "engine_index", or_none=True)
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + check_timeout(timeout, "timeout")
        # Refused before anything is registered; the number is replaced below.
        session.shared.protocol.encode_utility(0, method, args)
        calls = self._register_calls(engine_index)
        try:
            for call in calls:
                frames = session.shared.protocol.encode_utility(call.call_id, method, args)
                session.shared.mailbox.post(mail.Call(call.engine_index, frames))
            answers = {
                call.engine_index: _answer(call, method, timeout, deadline) for call in calls
            }
        finally:
            with session.shared.state as flights:
                for call in calls:
                    flights.calls.forget(call)
            session.shared.mailbox.post(mail.Answered())
        return answers if engine_index is None else answers[engine_index]

    def _register_calls(self, engine_index: int | None) -> list[Call]:
        with self._session.shared.state as flights:
            if flights.closed is not None:
                raise flights.closed()
            alive = flights.routing.alive_indices()
            known = flights.routing.indices()
            chosen = alive if engine_index is None else [engine_index]
            calls = (
                [flights.calls.add(index, Gate()) for index in chosen]
                if chosen and set(chosen) <= set(alive)
                else []
            )
        if calls:
            return calls
        if engine_index is not None and engine_index not in known:
            raise InvalidRank(
                f"no engine has the index {shown(engine_index)}; {engines_listed(known)}"
            )
        who = "every engine is" if engine_index is None else f"engine {engine_index} is"
        raise EngineDead(
            f"{who} dead, or has lost its output connection: restart it, or close this client",
            engine_index,
        )

    # -- the calls that people ask for; all take ``engine_index`` and ``timeout`` and give and
    # raise what ``utility`` does

    def sleep(
        self,
        level: int = 1,
        mode: str = "abort",
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Free the engines' memory: level 1 moves weights to the CPU, 2 discards them.

        Needs ``--enable-sleep-mode``. ``mode`` says what becomes of running requests
        (``"abort"``, ``"wait"``, ``"keep"``).
        """
        return self.utility("sleep", level, mode, engine_index=engine_index, timeout=timeout)

    def wake_up(
        self,
        tags: Sequence[str] | None = None,
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Undo ``sleep``; ``tags`` (``"weights"``, ``"kv_cache"``) wakes parts."""
        parts = None if tags is None else _items(tags, "tags")
        return self.utility("wake_up", parts, engine_index=engine_index, timeout=timeout)

    @overload
    def is_sleeping(
        self, *, engine_index: None = None, timeout: float | None = None
    ) -> dict[int, bool]: ...
    @overload
    def is_sleeping(self, *, engine_index: int, timeout: float | None = None) -> bool: ...
    def is_sleeping(self, *, engine_index: int | None = None, timeout: float | None = None) -> Any:
        """Whether the engines sleep."""
        return self.utility("is_sleeping", engine_index=engine_index, timeout=timeout)

    def pause(
        self,
        mode: str = "abort",
        clear_cache: bool = True,
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take no requests for a weight update: what comes meanwhile is ``EnginePaused``.

        ``mode``: what becomes of running requests (``"abort"``, ``"wait"``, ``"keep"``). A rank of
        a lockstep group pauses when all do: a call for it alone waits. Engines before 0.33 have
        ``utility("pause_scheduler", mode, clear_cache)`` instead, and keep what comes meanwhile
        until ``resume``.
        """
        return self.utility(
            "pause_generation", mode, clear_cache, engine_index=engine_index, timeout=timeout
        )

    def resume(self, *, engine_index: int | None = None, timeout: float | None = None) -> Any:
        """Undo ``pause``."""
        return self.utility("resume_scheduler", engine_index=engine_index, timeout=timeout)

    @overload
    def is_paused(
        self, *, engine_index: None = None, timeout: float | None = None
    ) -> dict[int, bool]: ...
    @overload
    def is_paused(self, *, engine_index: int, timeout: float | None = None) -> bool: ...
    def is_paused(self, *, engine_index: int | None = None, timeout: float | None = None) -> Any:
        """Whether the engines are paused."""
        return self.utility("is_scheduler_paused", engine_index=engine_index, timeout=timeout)

    def reset_prefix_cache(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Forget cached prefixes; False from an engine that is using them."""
        return self.utility(
            "reset_prefix_cache",
            reset_running_requests,
            reset_connector,
            engine_index=engine_index,
            timeout=timeout,
        )

    def add_lora(
        self,
        lora_request: object,
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Load an adapter; ``lora_request`` as on the wire. Needs ``--enable-lora``."""
        return self.utility("add_lora", lora_request, engine_index=engine_index, timeout=timeout)

    def remove_lora(
        self, lora_id: int, *, engine_index: int | None = None, timeout: float | None = None
    ) -> Any:
        """Unload an adapter."""
        return self.utility("remove_lora", lora_id, engine_index=engine_index, timeout=timeout)

    def list_loras(self, *, engine_index: int | None = None, timeout: float | None = None) -> Any:
        """The ids of the loaded adapters."""
        return self.utility("list_loras", engine_index=engine_index, timeout=timeout)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        engine_index: int | None = None,
    ) -> Any:
        """Call a method of every worker of the engines; a list of their results each.

        ``timeout`` bounds both the engine's waiting and ours.
        """
        if not isinstance(method, str):
            raise TypeError(f"method must be a str, got {shown(method)}")
        if not method:
            raise InvalidRequest("method is empty: name a method of the workers")
        keywords = None if kwargs is None else _mapping(kwargs, "kwargs")
        call = (method, timeout, _items(args, "args"), keywords)
        return self.utility("collective_rpc", *call, engine_index=engine_index, timeout=timeout)

    def init_weight_transfer(
        self,
        init_info: Mapping[str, object],
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Prepare the workers for weights from a trainer (``--weight-transfer-config``)."""
        call = ("init_weight_transfer_engine", None, [_mapping(init_info, "init_info")], None)
        return self.utility("collective_rpc", *call, engine_index=engine_index, timeout=timeout)

    def update_weights(
        self,
        update_info: Mapping[str, object],
        *,
        engine_index: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take new weights from the trainer; ``pause`` first."""
        call = ("update_weights", None, [_mapping(update_info, "update_info")], None)
        return self.utility("collective_rpc", *call, engine_index=engine_index, timeout=timeout)


def _items(value: object, what: str) -> list[object]:
    """A sequence of the caller's as the wire has it; a text is one too, and never meant."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{what} must be a sequence, got {shown(value)}")
    return list(value)


def _mapping(value: object, what: str) -> dict[Any, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping, got {shown(value)}")
    return dict(value)


def _answer(call: Call, method: str, timeout: float | None, deadline: float | None) -> Any:
    gate = call.gate
    assert isinstance(gate, Gate)
    if not gate.wait(call.ended, deadline):
        raise DeadlineExceeded(
            f"engine {call.engine_index} has not answered {method:.100} within the timeout of "
            f"{timeout} s; it may still do it"
        )
    if call.error is not None:
        raise call.error()
    result = call.result
    assert result is not None
    if result.failure is not None:
        raise RequestRejected(f"engine {call.engine_index}, {method:.100}: {result.failure:.500}")
    return result.value
