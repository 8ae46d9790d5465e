"""The seam between the client and an engine's wire protocol.

A protocol turns a validated request into frames and an output message into an
``EngineBatch``. It keeps no state of the client's, owns no socket and takes no lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from tszmq.types import EngineInfo, EngineLoad, SamplingParams

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""One raw frame, not msgpack: the sender is going down. Both engines use the same bytes."""

RUNNING = ""
"""The finish reason of a row whose request goes on."""


@attrs.define(eq=False, slots=True)
class RowDetail:
    """What a row carries beyond the columns; few rows have any."""

    stop_reason: int | str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error_code: str | None = None
    error_message: str | None = None
    retryable: bool = False


@attrs.define(eq=False, slots=True)
class EngineBatch:
    """One output message of one scheduler step, as typed columns of equal length.

    The decoder has checked every column but one: whether the innermost items of ``token_ids``
    are ints is proven by the arrays they are stored into, which refuse anything else
    (``core.flights`` rejects the whole batch then).

    Attributes:
        engine_index: The engine the message names, or None where its sender names none.
        request_ids: Wire ids, one a row.
        token_ids: New token ids, one list a row.
        finish_reasons: ``RUNNING`` or why the request ended, one a row.
        num_finished: How many rows end their request.
        completion_tokens: Tokens generated so far, one a row; None where the wire has none.
        prompt_tokens, cached_tokens: One a row, or None where the wire has none.
        logprobs: A list of floats a row (empty or as long as its ``token_ids``), or None when
            no row has any.
        load: The engine's load, or None when the message carries none.
        details: Row number to what else that row carries.
        signals: Protocol events that are not rows (waves, utility results).
    """

    engine_index: int | None
    request_ids: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    num_finished: int = 0
    completion_tokens: list[int] | None = None
    prompt_tokens: list[int] | None = None
    cached_tokens: list[int] | None = None
    logprobs: list[list[float]] | None = None
    load: EngineLoad | None = None
    details: Mapping[int, RowDetail] | None = None
    signals: Sequence[Any] = ()


@attrs.frozen
class AddRequest:
    """A request as the protocols see it: validated by ``WireProtocol.check`` before it exists.

    Attributes:
        request_id: The wire id.
        prompt_token_ids: Plain ints in int32.
        sampling_params: The neutral parameters.
        stream: Whether somebody reads chunks; False lets an engine send fewer, larger rows.
        priority: Scheduling priority, or None; lower is earlier where the wire has it.
        engine: The registration of the engine that it was validated against.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stream: bool
    priority: int | None
    engine: EngineInfo


class BatchDecoder(Protocol):
    """Reads output messages. One thread uses it; it may remember the last message."""

    def decode(self, frames: Sequence[bytes]) -> EngineBatch:
        """One message, its aux frames included.

        Raises:
            DecodeError: Whatever is wrong with the bytes; never another exception. Its text
                is bounded, however large the message.
        """


class WireProtocol(Protocol):
    """What a third engine would have to write."""

    @property
    def name(self) -> str:
        """As given to ``Client(protocol=...)``."""

    def read_registration(self, engine_index: int, frames: Sequence[bytes]) -> EngineInfo:
        """The first message of an engine on the input socket.

        Raises:
            DecodeError: It is not a registration.
        """

    def check(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int | None,
        engine: EngineInfo,
    ) -> None:
        """Refuse what the engine would refuse, lose in silence or die of.

        Raises:
            InvalidRequest: With what is wrong, its value and what to do.
            UnsupportedField: The wire has no such field.
        """

    def encode_add(self, request: AddRequest) -> list[bytes]:
        """The frames of an add, without the identity frame."""

    def encode_abort(self, request_ids: list[str]) -> list[bytes]:
        """The frames of an abort; ``request_ids`` is not empty."""

    def decoder(self) -> BatchDecoder:
        """A decoder of this protocol's output messages."""
