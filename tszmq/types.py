"""The values that callers give and get: frozen, validated when made, the same for every engine.

Neutral names (``max_tokens``, ``prompt_token_ids``) end at this module; each engine's own
spellings stay in its module under ``tszmq.wire``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import attrs

from tszmq.checks import (
    MAX_SEED,
    MAX_TOKEN_ID,
    bias_map,
    boolean,
    extra_map,
    int_or_none,
    integer,
    number,
    plain_bool,
    plain_float,
    plain_int,
    schema_text,
    text,
    token_id_list,
    token_tuple,
)
from tszmq.errors import InvalidRequest

__all__ = [
    "MAX_TOKEN_ID",
    "Completion",
    "Endpoints",
    "EngineHealth",
    "EngineInfo",
    "EngineLoad",
    "SamplingParams",
    "TokenChunk",
    "TokenIds",
    "token_id_list",
]


class _ArrayLike(Protocol):
    """A numpy array, a torch tensor and the like."""

    def tolist(self) -> Any: ...


TokenIds: TypeAlias = Sequence[SupportsIndex] | _ArrayLike
"""A prompt for type checkers: a sequence of ints, numpy's among them, or an array of them.

More than is served: ``bytes`` is a sequence of ints too. ``token_id_list`` says what is.
"""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to sample: one neutral set of names for every engine.

    Wrong types raise ``TypeError`` and values out of range ``InvalidRequest``, when the object
    is made. What an engine's wire cannot carry raises ``UnsupportedField`` when it is sent.

    Args:
        max_tokens: Tokens to generate at the most, at least 1. None: as many as the context
            holds.
        temperature: 0 is greedy.
        top_p: In (0, 1].
        top_k: -1 (off) or at least 1.
        min_p: In [0, 1].
        frequency_penalty: In [-2, 2].
        presence_penalty: In [-2, 2].
        repetition_penalty: In (0, 2]; 1 is off.
        min_tokens: No stop before this many tokens, where the engine heeds it.
        stop_token_ids: Generation ends after any of these; it is part of the output.
        ignore_eos: Go on after the model's end-of-sequence token.
        seed: In [0, 2**63), or None.
        logprobs: Return the sampled tokens' log-probabilities.
        top_logprobs: Also those of this many most likely tokens (vLLM).
        prompt_logprobs: Log-probabilities of the prompt's tokens, with this many most likely
            ones beside each (vLLM).
        json_schema: Constrain the output to a JSON schema: its text, or the mapping itself.
        regex: Constrain the output to a regular expression.
        ebnf: Constrain the output to a grammar.
        structural_tag: Constrain the output to a structural tag.
        logit_bias: From token id to what is added to its logit.
        extra: Further fields of the protocol, by their name on its wire.
    """

    max_tokens: int | None = attrs.field(
        default=16, converter=int_or_none, validator=integer(1, optional=True)
    )
    temperature: float = attrs.field(default=1.0, converter=plain_float, validator=number(0.0))
    top_p: float = attrs.field(
        default=1.0, converter=plain_float, validator=number(0.0, 1.0, above_low=True)
    )
    top_k: int = attrs.field(default=-1, converter=plain_int, validator=integer(-1))
    min_p: float = attrs.field(default=0.0, converter=plain_float, validator=number(0.0, 1.0))
    frequency_penalty: float = attrs.field(
        default=0.0, converter=plain_float, validator=number(-2.0, 2.0)
    )
    presence_penalty: float = attrs.field(
        default=0.0, converter=plain_float, validator=number(-2.0, 2.0)
    )
    repetition_penalty: float = attrs.field(
        default=1.0, converter=plain_float, validator=number(0.0, 2.0, above_low=True)
    )
    min_tokens: int = attrs.field(default=0, converter=plain_int, validator=integer(0))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=token_tuple)
    ignore_eos: bool = attrs.field(default=False, converter=plain_bool, validator=boolean)
    seed: int | None = attrs.field(
        default=None, converter=int_or_none, validator=integer(0, MAX_SEED, optional=True)
    )
    logprobs: bool = attrs.field(default=False, converter=plain_bool, validator=boolean)
    top_logprobs: int = attrs.field(default=0, converter=plain_int, validator=integer(0))
    prompt_logprobs: int | None = attrs.field(
        default=None, converter=int_or_none, validator=integer(0, optional=True)
    )
    json_schema: str | None = attrs.field(default=None, converter=schema_text, validator=text)
    regex: str | None = attrs.field(default=None, validator=text)
    ebnf: str | None = attrs.field(default=None, validator=text)
    structural_tag: str | None = attrs.field(default=None, validator=text)
    # Equal ones hash alike without these, which are mappings.
    logit_bias: Mapping[int, float] | None = attrs.field(
        default=None, converter=bias_map, hash=False
    )
    extra: Mapping[str, Any] = attrs.field(factory=dict, converter=extra_map, hash=False)

    def __attrs_post_init__(self) -> None:
        if self.top_k == 0:
            raise InvalidRequest("top_k must be -1 (off) or at least 1, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )
        grammars = [
            name
            for name in ("json_schema", "regex", "ebnf", "structural_tag")
            if getattr(self, name) is not None
        ]
        if len(grammars) > 1:
            raise InvalidRequest(f"only one grammar can be set, got {' and '.join(grammars)}")


@attrs.frozen
class TokenChunk:
    """What came for one request since the last chunk.

    Attributes:
        request_id: The caller's label, or None.
        token_ids: The new token ids.
        finish_reason: None while running; then ``"stop"``, ``"length"``, ``"abort"``,
            ``"repetition"`` or another word of the engine's.
        logprobs: One float a token of ``token_ids``, or None when not asked for. NaN and
            infinities are passed on as the engine sent them.
        prompt_tokens: Length of the prompt.
        completion_tokens: Tokens generated so far, these included.
        cached_tokens: Prompt tokens that the engine found in its prefix cache.
        top_logprobs: One mapping from token id to log-probability a token, or None (vLLM).
        stop_reason: With the finish reason: the stop token id, or the engine's word for it, where
            its wire says (vLLM).
    """

    request_id: str | None
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[float] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    top_logprobs: list[dict[int, float]] | None = None
    stop_reason: int | str | None = None


@attrs.frozen
class Completion:
    """A whole result.

    Attributes:
        request_id: The caller's label, or None.
        token_ids: Every token generated.
        finish_reason: Why it ended; None in the ``partial`` of an error.
        logprobs: One float a token, or None when not asked for.
        prompt_tokens: Length of the prompt.
        completion_tokens: Tokens generated.
        cached_tokens: Prompt tokens that the engine found in its prefix cache.
        engine_index: The engine that served it.
        queued: Seconds that the call waited for a free place before the request was sent.
        first_token: Seconds from sending to the first token, or None when none came.
        finished: Seconds from sending to the end.
        stop_reason: The stop token id, or the engine's word for it, where its wire says (vLLM).
        top_logprobs: One mapping from token id to log-probability a token, or None (vLLM).
        prompt_logprobs: None for the prompt's first token, then one such mapping each (vLLM).
        weight_versions: Which version of the weights made which tokens, where the engine says
            (vLLM; see its ``set_weight_version``): the version, the first token's index, and the
            index behind the last one's, for each version in order; or None.
        kv_transfer_params: Where another engine finds this request's KV cache, to be passed to it
            with ``extra={"extra_args": {"kv_transfer_params": ...}}``; or None (vLLM with a KV
            connector).
    """

    request_id: str | None
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[float] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    engine_index: int
    queued: float
    first_token: float | None
    finished: float
    stop_reason: int | str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    weight_versions: list[tuple[str, int, int]] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@attrs.frozen
class EngineLoad:
    """An engine's last report of its load, as the engine said it.

    Attributes:
        num_running: Requests it calls running.
        num_waiting: Requests in its queue.
        kv_cache_usage: Share of its KV cache in use, 0.0 to 1.0.
        num_requests: Distinct requests in the report. Engines count differently (TokenSpeed's
            ``num_running`` includes the waiting ones, vLLM's does not), so that each protocol
            fills this in.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_requests: int

    def idle(self) -> EngineLoad:
        """The same report with empty queues: what is true once nothing is in flight."""
        return EngineLoad(0, 0, self.kv_cache_usage, 0)


@attrs.frozen
class EngineInfo:
    """An engine and what it registered with.

    Attributes:
        engine_index: The number in its ZMQ identity; what ``data_parallel_rank`` pins to.
        alive: Whether it serves requests.
        max_model_len: Longest prompt and output together, tokens.
        num_gpu_blocks: KV cache blocks (pages).
        block_size: Tokens in a block.
        dtype: Of the model, such as ``"bfloat16"``.
        engine_version: What the engine calls its version.
        world_size, data_parallel_size, data_parallel_rank, tensor_parallel_size,
        pipeline_parallel_size: The engine's place in its group.
        max_num_seqs: Requests it runs at once (TokenSpeed: of the whole group).
        max_num_batched_tokens: Tokens in one step; 0 or less where unlimited.
        instance_id: The model's name, or the instance's.
        kv_cache_size_tokens: Tokens that the KV cache holds, or None when not said.
        registration: Every key of the registration, as it came.
        lockstep: It steps together with the other ranks of its group, and dies with them.
        incarnation: Counts the registrations of a client's engines: another number is another
            process, which has neither the weights nor the pause or sleep of the one before.
    """

    engine_index: int
    alive: bool
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    engine_version: str
    world_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    instance_id: str = ""
    kv_cache_size_tokens: int | None = None
    # Equal ones hash alike without this, which is a mapping.
    registration: Mapping[str, Any] = attrs.field(factory=dict, repr=False, hash=False)
    lockstep: bool = False
    incarnation: int = 0


@attrs.frozen
class EngineHealth:
    """How one engine is doing, seen from this client.

    Attributes:
        engine_index: The engine.
        connected: Registered, not known to be dead, and gets requests: not one that has lost its
            output connection and may make another.
        inflight: Our unfinished requests there.
        last_output: Seconds since its last readable output (since its registration, before
            the first).
        first_error: What went wrong with it first, or None.
    """

    engine_index: int
    connected: bool
    inflight: int
    last_output: float
    first_error: str | None


@attrs.frozen
class Endpoints:
    """Addresses to bind, or those that were bound.

    Args:
        handshake: Where engines say HELLO, such as ``"tcp://127.0.0.1:30500"``.
        input: Where engines take requests from; None lets the client choose. Better so: engines
            of an earlier client cannot know an address that is new each time, while one that
            stays the same is waited at for a moment, so that they come before those that serve.
        output: Where engines send tokens to; None lets the client choose.
    """

    handshake: str
    input: str | None = None
    output: str | None = None
