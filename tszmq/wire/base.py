"""The seam between the client and an engine's wire protocol.

A protocol turns a validated request into frames and an output message into an
``EngineBatch``. It keeps no state of the client's, owns no socket and takes no lock.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import attrs

from tszmq.types import EngineInfo, EngineLoad, SamplingParams

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""One raw frame, not msgpack: the sender is going down. Both engines use the same bytes."""

NONE_ENDS: Mapping[int, str] = MappingProxyType({})
"""Of a batch all requests of which go on."""


Ranking: TypeAlias = "tuple[tuple[int, float], ...]"
"""Tokens and their logprobs, at one place: the token that is there, then the most likely ones in
order, of which it may be one."""


@attrs.define(eq=False, slots=True)
class RowDetail:
    """What a row carries beyond the columns; few rows have any.

    Attributes:
        stop_reason: The stop token id, or the engine's word for it.
        top_logprobs: One a token of the row. It can hold more than the request asked for:
            engines fill a batch up to its widest request.
        prompt_logprobs: None for the prompt's first token, then one mapping a token.
        cached_tokens: Prompt tokens found in the prefix cache, where the wire says it once a
            request and has no column for it.
        kv_transfer_params: Where another engine finds the request's KV cache.
        error_code, error_message, retryable: Why the engine refused the request.
    """

    stop_reason: int | str | None = None
    top_logprobs: list[Ranking] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error_code: str | None = None
    error_message: str | None = None
    retryable: bool = False


@attrs.frozen
class WaveComplete:
    """A lockstep group has nothing left to do and parks after this wave."""

    wave: int


@attrs.frozen
class StartWave:
    """An engine of a lockstep group asks for its peers to be woken for this wave."""

    wave: int


@attrs.frozen
class UtilityResult:
    """The answer to a utility call.

    Attributes:
        call_id: As it was sent.
        failure: Why it failed, or None.
        value: What it returned, as plain values.
    """

    call_id: int
    failure: str | None
    value: Any


@lru_cache(64)
def ones(rows: int, width: int = 4) -> int:
    """A one for each row, so many bytes wide."""
    return int.from_bytes((1).to_bytes(width, "big") * rows, "big")


@attrs.define(eq=False, slots=True)
class Counts:
    """``completion_tokens`` of a batch.

    Attributes:
        column: One a row.
        number: All of them, as 32 bits each in the order of this machine.
    """

    column: list[int]
    number: int

    @classmethod
    def of(cls, column: list[int], packed: array[int] | None = None) -> Counts:
        """Of ints in [0, 2**32), which may have been put into an array."""
        return cls(column, int.from_bytes(packed or array("I", column), sys.byteorder))


@attrs.define(eq=False, slots=True)
class OneEach:
    """A batch in which every row has exactly one new token.

    Attributes:
        tokens: ``array("I")``, one a row.
        logprobs: ``array("d")``, one a row; None when no row has any.
        counts: ``completion_tokens`` of this batch, or of an earlier one with the same rows.
        ahead: How many batches earlier: each row counts as many more now.
    """

    tokens: array[int]
    logprobs: array[float] | None
    counts: Counts
    ahead: int = 0

    def completion_tokens(self) -> list[int]:
        """One a row."""
        ahead = self.ahead
        return [count + ahead for count in self.counts.column]

    def number(self) -> int:
        """The same as one integer, 32 bits a row, which compares all rows at once."""
        return self.counts.number + self.ahead * ones(len(self.tokens))


@attrs.define(eq=False, slots=True)
class EngineBatch:
    """One output message of one scheduler step, as typed columns of equal length.

    The decoder has checked every column. The arrays that tokens are stored into refuse what is
    no int in [0, 2**32) all the same; ``core.flights`` rejects the whole batch then.

    Attributes:
        engine_index: The engine the message names, or None where its sender names none.
        request_ids: Wire ids, one a row.
        token_ids: New token ids, one list a row; empty where ``one_each`` has them.
        finished: Row number to why its request ended, in order; the others go on.
        completion_tokens: Tokens generated so far, one a row; None where the wire has none, or
            ``one_each`` has them.
        cached_tokens: Prompt tokens that needed no computing, one a row, or None where the wire has
            none.
        logprobs: A list of floats a row (empty or as long as its ``token_ids``), or None when
            no row has any, or ``one_each`` has them.
        one_each: Where every row has one new token, they, their logprobs and counts in a form that
            can be stored at once. None where not so, or where a decoder does not bother.
        load: The engine's load, or None when the message carries none.
        details: Row number to what else that row carries.
        signals: Protocol events that are not rows: ``WaveComplete``, ``StartWave``,
            ``UtilityResult``.
        weight_version: Of the weights that made its tokens, where the wire tells; ``one_each``
            is None then.
    """

    engine_index: int | None
    request_ids: list[str]
    token_ids: list[list[int]]
    finished: Mapping[int, str] = NONE_ENDS
    completion_tokens: list[int] | None = None
    cached_tokens: list[int] | None = None
    logprobs: list[list[float]] | None = None
    one_each: OneEach | None = None
    load: EngineLoad | None = None
    details: Mapping[int, RowDetail] | None = None
    signals: Sequence[WaveComplete | StartWave | UtilityResult] = ()
    weight_version: str | None = None

    def num_tokens(self) -> int:
        """New tokens of all rows together."""
        step = self.one_each
        return sum(map(len, self.token_ids)) if step is None else len(step.tokens)

    def tokens_in(self, row: int) -> int:
        """How many new tokens a row has."""
        return 1 if self.one_each is not None else len(self.token_ids[row])

    def rows_of_tokens(self) -> list[list[int]]:
        """``token_ids``, wherever they are."""
        if self.one_each is None:
            return self.token_ids
        return [[token] for token in self.one_each.tokens]

    def rows_of_counts(self) -> list[int] | None:
        """``completion_tokens``, wherever they are."""
        step = self.one_each
        return self.completion_tokens if step is None else step.completion_tokens()

    def rows_of_logprobs(self) -> list[list[float]] | None:
        """``logprobs``, wherever they are."""
        if self.one_each is None or self.one_each.logprobs is None:
            return self.logprobs
        return [[value] for value in self.one_each.logprobs]


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
        arrival_time: When the caller asked, in wall-clock seconds: engines that schedule by
            priority take equals in this order.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stream: bool
    priority: int | None
    engine: EngineInfo
    arrival_time: float = 0.0


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

    def runs_at_most(self, engine: EngineInfo) -> int:
        """Requests that an engine runs at once, by its registration."""

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

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> list[bytes]:
        """The frames that call a method of the engine; a ``UtilityResult`` answers.

        Args:
            call_id: In [0, 2**64); not that of an unanswered call.
            method: Its name.
            args: Plain values.

        Raises:
            TypeError, InvalidRequest: An argument that the engine would die of or never answer.
            UnsupportedField: The wire has no such calls.
        """

    def encode_start_wave(self, wave: int) -> list[bytes]:
        """The frames that wake an engine of a lockstep group, for this wave.

        Raises:
            UnsupportedField: The wire has no waves.
        """

    def decoder(self) -> BatchDecoder:
        """A decoder of this protocol's output messages."""
