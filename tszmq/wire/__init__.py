"""What the bytes mean: one module an engine protocol, behind the seam in ``base``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tszmq.checks import shown
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.wire.base import WireProtocol
from tszmq.wire.tokenspeed import TokenSpeed
from tszmq.wire.vllm import Vllm
from tszmq.wire.vllm.eos import end_token_ids, read_model

__all__ = ["find_protocol"]

EndTokens = int | Sequence[int] | None
ModelPath = str | os.PathLike[str] | None


def find_protocol(
    name: object, *, eos_token_id: EndTokens = None, model: ModelPath = None
) -> WireProtocol:
    """The protocol of that name.

    Args:
        name: ``"tokenspeed"`` or ``"vllm"``.
        eos_token_id: The model's end token or tokens, the main one first (vLLM, whose engine
            knows none unless told; ``[]`` for none).
        model: The directory of the model on this machine, to read end tokens and the size of
            the vocabulary from (vLLM). ``eos_token_id`` goes before what it says.

    Raises:
        TypeError, InvalidRequest: There is none of that name, or an option is not what it
            should be.
        UnsupportedField: The protocol has no use for the option.
    """
    if not isinstance(name, str):
        raise TypeError(f"protocol must be a str, got {type(name).__name__}")
    make = _PROTOCOLS.get(name)
    if make is None:
        raise InvalidRequest(
            f"protocol must be one of {', '.join(map(repr, _PROTOCOLS))}, got {shown(name)}"
        )
    return make(eos_token_id, model)


def _tokenspeed(eos_token_id: EndTokens, model: ModelPath) -> TokenSpeed:
    for option, value in (("eos_token_id", eos_token_id), ("model", model)):
        if value is not None:
            raise UnsupportedField(
                f"{option}={shown(value)} has no use on TokenSpeed: its engine knows its model's "
                "end tokens; leave it out"
            )
    return TokenSpeed()


def _vllm(eos_token_id: EndTokens, model: ModelPath) -> Vllm:
    ids = None if eos_token_id is None else end_token_ids(eos_token_id)
    if model is None:
        return Vllm(ids or ())
    facts = read_model(model, ends_needed=ids is None)
    return Vllm(facts.eos_token_ids if ids is None else ids, facts.vocab_size)


_PROTOCOLS: dict[str, Callable[[EndTokens, ModelPath], WireProtocol]] = {
    "tokenspeed": _tokenspeed,
    "vllm": _vllm,
}
