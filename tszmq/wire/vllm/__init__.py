"""vLLM's EngineCore wire, 0.26 to 0.33 and what they have in common with what comes next.

Requests are in ``requests`` (with ``extra``, ``lora`` and ``structured``), output messages in
``outputs`` (with ``rows``, ``logprobs`` and ``arrays``), a model's end tokens in ``eos``.

The engine has no tokenizer: it stops at end tokens only when a request names them. ``Vllm`` sends
those that it was given with every request that does not say ``ignore_eos``. Without any, a
request is fine, and goes on to ``max_tokens`` or the end of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tszmq.checks import shown
from tszmq.codec import pack
from tszmq.errors import InvalidRequest
from tszmq.types import EngineInfo, SamplingParams
from tszmq.wire import startup
from tszmq.wire.base import AddRequest
from tszmq.wire.vllm.eos import ModelFacts, end_token_ids
from tszmq.wire.vllm.outputs import VllmDecoder
from tszmq.wire.vllm.requests import check_request, encode_request
from tszmq.wire.vllm.utility import encode_call

__all__ = ["Vllm"]

_ABORT = b"\x01"
_START_WAVE = b"\x02"
_WAVE_LIMIT = 2**63


class Vllm:
    """The ``WireProtocol`` of vLLM.

    Args:
        eos_token_ids: The model's end tokens. The engine stops at the first without a stop
            reason, and at the others with the token as stop reason.
        vocab_size: Rows of the model's embedding, to check token ids against; None if unknown.

    Raises:
        TypeError, InvalidRequest: Not that, or an end token beyond the vocabulary.
    """

    def __init__(self, eos_token_ids: Sequence[int] = (), vocab_size: int | None = None) -> None:
        ids = end_token_ids(eos_token_ids, "eos_token_ids")
        if vocab_size is not None:
            if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
                raise TypeError(f"vocab_size must be an int or None, got {shown(vocab_size)}")
            if vocab_size < 1:
                raise InvalidRequest(f"vocab_size must be at least 1, got {vocab_size}")
            if max(ids, default=0) >= vocab_size:
                raise InvalidRequest(
                    f"eos_token_ids must be below {vocab_size}, the vocabulary's size, got "
                    f"{max(ids)}"
                )
        self._model = ModelFacts(ids, vocab_size)

    @property
    def name(self) -> str:
        """``"vllm"``."""
        return "vllm"

    def read_registration(self, engine_index: int, frames: Sequence[bytes]) -> EngineInfo:
        """The engine's ready response.

        A rank that steps on its own sets its data_parallel_size to 1 before it registers, unless
        INIT set it: one with more than 1 is in a lockstep group.

        Raises:
            DecodeError: It is none.
        """
        info = startup.read_registration(engine_index, frames)
        return attrs.evolve(info, lockstep=info.data_parallel_size > 1)

    def runs_at_most(self, engine: EngineInfo) -> int:
        """As it says: each rank registers its own."""
        return engine.max_num_seqs

    def check(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int | None,
        engine: EngineInfo,
    ) -> None:
        """Refuse what the engine would lose in silence, go deaf of or die of.

        Not checked, because nothing tells: token ids when the vocabulary's size is not known,
        an adapter's path (an engine dies of one that it cannot load: load it with the utility
        call ``add_lora`` first), which grammar backend the engine has, and what a speculative
        or diffusion model cannot sample with. ``priority`` has an effect on engines that
        schedule by it: lower is earlier.

        Raises:
            InvalidRequest: With what is wrong, its value and what to do.
            UnsupportedField: The wire has no such field.
        """
        check_request(prompt_token_ids, params, priority, engine, self._model)

    def encode_add(self, request: AddRequest) -> list[bytes]:
        """The frames of an add: the type, then the request array."""
        return encode_request(request, self._model)

    def encode_abort(self, request_ids: list[str]) -> list[bytes]:
        """The frames of an abort: the type, then an array of ids. The engine does not answer."""
        return [_ABORT, pack(request_ids)]

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> list[bytes]:
        """The frames that call a public method of the engine.

        Raises:
            TypeError, InvalidRequest, UnsupportedField: The engine would go deaf of it.
        """
        return encode_call(call_id, method, args)

    def encode_start_wave(self, wave: int) -> list[bytes]:
        """The frames that wake a parked rank; one whose wave is higher ignores them.

        Raises:
            InvalidRequest: ``wave`` is no number of a wave.
        """
        if isinstance(wave, bool) or not isinstance(wave, int) or not 0 <= wave < _WAVE_LIMIT:
            raise InvalidRequest(f"wave must be an int in [0, 2**63), got {shown(wave)}")
        return [_START_WAVE, pack([wave, None])]

    def decoder(self) -> VllmDecoder:
        """A decoder of ``EngineCoreOutputs`` messages."""
        return VllmDecoder()
