"""TokenSpeed's wire: requests out. Its output messages are read by ``tokenspeed_decoder``.

A request is one positional array, its sampling parameters another inside it. Facts are those of
TokenSpeed 0.1.1. The engine's receiver is strict and silent: a message with one wrong type is
logged and dropped, a request with a value out of range comes back as an "abort" without a
reason, and some values end the scheduler process. So everything is checked here, before it is
sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tszmq.checks import shown
from tszmq.codec import pack
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import EngineInfo, SamplingParams
from tszmq.wire import startup
from tszmq.wire.base import AddRequest
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder
from tszmq.wire.tokenspeed_extra import check_extra, place_extra

__all__ = ["TokenSpeed"]

_ADD = b"\x00"
_ABORT = b"\x01"
_REQUEST_TAG = "TokenizedGenerateReqInput"

# The engine's fused sampling kernel takes top_k below this (or -1 for "off").
_TOP_K_LIMIT = 128
# Below this temperature the engine takes the most likely token.
_GREEDY = 1e-6
# Every request's budget is clamped to what the context leaves, less this many tokens.
_CONTEXT_RESERVE = 2


class TokenSpeed:
    """The ``WireProtocol`` of TokenSpeed."""

    @property
    def name(self) -> str:
        """``"tokenspeed"``."""
        return "tokenspeed"

    def read_registration(self, engine_index: int, frames: Sequence[bytes]) -> EngineInfo:
        """The engine's ready response.

        Raises:
            DecodeError: It is none.
        """
        return startup.read_registration(engine_index, frames)

    def runs_at_most(self, engine: EngineInfo) -> int:
        """Its share: an engine registers what its whole group runs."""
        return -(-engine.max_num_seqs // max(1, engine.data_parallel_size))

    def check(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int | None,
        engine: EngineInfo,
    ) -> None:
        """Refuse what the engine would refuse, lose in silence or die of.

        Not checked, because the registration does not say: the vocabulary (``logit_bias`` keys
        and prompt ids beyond it), whether the server returns logprobs, whether a grammar
        compiles. The engine aborts such a request (prompt ids: it computes nonsense). A grammar
        that compiles and allows no token at all ends an engine that has no NVIDIA device.

        ``min_p``, the penalties and ``logit_bias`` pass: whether they have an effect depends on
        the server's sampling backend. ``min_tokens`` passes and has none in 0.1.1.

        Raises:
            InvalidRequest: With what is wrong, its value and what to do.
            UnsupportedField: The wire has no such field.
        """
        _check_prompt(prompt_token_ids, engine)
        _check_unsupported(params, priority)
        _check_sampling(params)
        if params.extra:
            check_extra(params.extra)

    def encode_add(self, request: AddRequest) -> list[bytes]:
        """The frames of an add: the type, then the request array.

        11 elements, through ``stream``; longer only when ``extra`` names a later field.
        """
        params = request.sampling_params
        sampling = _sampling_array(params)
        values: list[Any] = [
            _REQUEST_TAG,
            request.request_id,
            None,  # http_worker_ipc
            None,  # input_text
            request.prompt_token_ids,
            sampling,
            params.logprobs,  # return_logprob
            -1,  # logprob_start_len: output tokens only
            0,  # top_logprobs_num
            None,  # token_ids_logprob
            request.stream,
        ]
        if params.extra:
            place_extra(params.extra, sampling, values)
        return [_ADD, pack(values)]

    def encode_abort(self, request_ids: list[str]) -> list[bytes]:
        """The frames of an abort: the type, then an array of ids, without a tag."""
        return [_ABORT, pack(request_ids)]

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> list[bytes]:
        """There are none: the engine's control messages are not answered on this wire.

        Raises:
            UnsupportedField: Always.
        """
        raise UnsupportedField(
            f"utility call {shown(method)} is not carried by TokenSpeed's wire: an engine behind "
            "it can only be restarted"
        )

    def encode_start_wave(self, wave: int) -> list[bytes]:
        """There is none: TokenSpeed's engines step on their own.

        Raises:
            UnsupportedField: Always.
        """
        raise UnsupportedField("TokenSpeed's wire has no waves: its engines need no waking")

    def decoder(self) -> TokenSpeedDecoder:
        """A decoder of ``BatchTokenIDOutSlim`` messages."""
        return TokenSpeedDecoder()


def _check_prompt(prompt: list[int], engine: EngineInfo) -> None:
    """The scheduler process dies of an empty prompt, and of one that leaves no budget."""
    if not prompt:
        raise InvalidRequest("the prompt must not be empty, got no token ids")
    longest = _longest_prompt(engine)
    if longest is not None and len(prompt) > longest:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, engine {engine.engine_index} takes at most "
            f"{longest} (max_model_len {engine.max_model_len}, KV cache "
            f"{engine.kv_cache_size_tokens} tokens): shorten it"
        )


def _longest_prompt(engine: EngineInfo) -> int | None:
    """Prompt tokens that leave a budget of 0 or more; None when the engine did not say.

    The KV cache counts for one token less when the engine overlaps its steps, which the
    registration does not say: taken as given, since one token too many kills the engine. Nor does
    it say what speculation and caches of several groups (hybrid models) take off: the client's
    ``max_request_tokens`` is for those.
    """
    limits = []
    if engine.max_model_len > 0:
        limits.append(engine.max_model_len)
    if engine.kv_cache_size_tokens is not None and engine.kv_cache_size_tokens > 0:
        limits.append(engine.kv_cache_size_tokens - 1)
    return min(limits) - _CONTEXT_RESERVE if limits else None


def _check_unsupported(params: SamplingParams, priority: int | None) -> None:
    if params.top_logprobs:
        raise UnsupportedField(
            f"top_logprobs={params.top_logprobs} is not carried by TokenSpeed's wire: leave it "
            "at 0; logprobs=True returns the sampled tokens' own"
        )
    if params.prompt_logprobs is not None:
        raise UnsupportedField(
            f"prompt_logprobs={params.prompt_logprobs} is not carried by TokenSpeed's wire: "
            "leave it at None"
        )
    if priority is not None:
        raise UnsupportedField(
            f"priority={shown(priority)} is not carried by TokenSpeed's wire: leave it at None"
        )


def _check_sampling(params: SamplingParams) -> None:
    """What is narrower here than ``SamplingParams`` itself allows."""
    if params.top_k >= _TOP_K_LIMIT and params.temperature >= _GREEDY:
        raise InvalidRequest(
            f"top_k must be below {_TOP_K_LIMIT} on TokenSpeed, got {params.top_k}: lower it, or "
            "use -1 for no limit"
        )
    if params.ignore_eos and params.stop_token_ids:
        # The engine would skip them in silence and run on to max_tokens: a caller who names
        # stop tokens does not mean that.
        raise InvalidRequest(
            f"stop_token_ids={shown(params.stop_token_ids)} would be ignored: with "
            "ignore_eos=True TokenSpeed looks at no stop token; drop one of the two"
        )


def _sampling_array(params: SamplingParams) -> list[Any]:
    """The first 24 of the 29 elements, through ``seed``.

    The rest is the engine's own (stop_strs, stop_str_max_len, is_normalized) or takes one value
    only (logprobs, n). With is_normalized left at false the engine itself turns temperature 0
    into greedy sampling with a pinned seed and top_k -1 into "off", as its in-process frontend
    would.
    """
    bias: Mapping[int, float] | None = params.logit_bias
    return [
        params.max_tokens,
        None,  # stop: only through extra
        params.stop_token_ids or None,
        params.temperature,
        params.top_p,
        params.top_k if params.top_k < _TOP_K_LIMIT else -1,  # greedy sampling looks at none
        params.min_p,
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        params.min_tokens,
        params.json_schema,
        params.regex,
        params.ebnf,
        params.structural_tag,
        params.ignore_eos,
        True,  # skip_special_tokens
        True,  # spaces_between_special_tokens
        False,  # no_stop_trim
        None,  # thinking_budget
        None,  # custom_params
        None,  # stream_interval
        None if bias is None else {str(token): value for token, value in bias.items()},
        params.seed,
    ]
