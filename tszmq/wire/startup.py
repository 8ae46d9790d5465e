"""The messages of the start-up, shared by both engines. No sockets here.

An engine says HELLO on the handshake socket, gets INIT with the addresses of the data sockets,
says READY, and registers with a map as its first message on the input socket. READY and the
registration are on different sockets: either may be seen first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tszmq.codec import pack, preview, unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineInfo
from tszmq.wire.described import described

__all__ = [
    "FAILED",
    "HELLO",
    "MAX_ENGINE_INDEX",
    "READY",
    "HandshakeMessage",
    "encode_init",
    "engine_identity",
    "engine_index",
    "read_handshake",
    "read_registration",
]

HELLO = "HELLO"
READY = "READY"
FAILED = "FAILED"

MAX_ENGINE_INDEX = 0xFFFF
_IDENTITY_BYTES = 2
_MAX_MESSAGE_BYTES = 1 << 20  # real ones are below 1 kB
_MAX_STATUS_CHARS = 64


def engine_identity(index: int) -> bytes:
    """The ZMQ identity of an engine: its index in 2 bytes, little-endian.

    Raises:
        ValueError: ``index`` is not in [0, 65535].
    """
    if not 0 <= index <= MAX_ENGINE_INDEX:
        raise ValueError(f"engine index must be in [0, {MAX_ENGINE_INDEX}], got {index}")
    return index.to_bytes(_IDENTITY_BYTES, "little")


def engine_index(identity: bytes) -> int | None:
    """The index in an engine's identity; None for a peer that is no engine."""
    if len(identity) != _IDENTITY_BYTES:
        return None
    return int.from_bytes(identity, "little")


@attrs.frozen
class HandshakeMessage:
    """What an engine says on the handshake socket.

    Attributes:
        status: ``HELLO``, ``READY``, ``FAILED`` or a word of a later version.
        message: The whole map as it came, unknown keys included.
    """

    status: str
    message: Mapping[str, Any] = attrs.field(repr=False)


def read_handshake(frames: Sequence[bytes]) -> HandshakeMessage:
    """A message of the handshake socket.

    Args:
        frames: Without the identity frame.

    Raises:
        DecodeError: Not one frame with a map whose ``status`` is a short text.
    """
    message = _read_map(frames, "a handshake message")
    status = message.get("status")
    if not isinstance(status, str) or not 0 < len(status) <= _MAX_STATUS_CHARS:
        raise DecodeError(
            f"the status of a handshake message must be a text of 1 to {_MAX_STATUS_CHARS} "
            f"characters, got {described(status)} in {preview(frames[0])}"
        )
    return HandshakeMessage(status, message)


def encode_init(
    input_address: str,
    output_address: str,
    parallel_config: Mapping[str, Any] | None = None,
) -> bytes:
    """The answer to HELLO: where the engine is to connect its data sockets.

    Args:
        input_address: Of the ROUTER that requests come from.
        output_address: Of the PULL that outputs go to.
        parallel_config: Set on the engine's own as it is (vLLM); neither engine needs any
            from a single frontend.
    """
    addresses = {
        "inputs": [input_address],
        "outputs": [output_address],
        "coordinator_input": None,
        "coordinator_output": None,
        "frontend_stats_publish_address": None,
    }
    return pack({"addresses": addresses, "parallel_config": dict(parallel_config or {})})


# EngineInfo attribute: (keys on the wire, newest first; what a missing key stands for). The
# defaults are TokenSpeed's; vLLM sends every key that it has. Sizes are signed: -1 stands for
# "no limit" in some engines' max_num_batched_tokens.
_INTEGERS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "max_model_len": (("max_model_len",), 0),
    "num_gpu_blocks": (("num_gpu_blocks",), 0),
    "block_size": (("prefix_granularity", "block_size"), 0),
    "world_size": (("world_size",), 1),
    "data_parallel_size": (("data_parallel_size",), 1),
    "data_parallel_rank": (("data_parallel_rank",), 0),
    "tensor_parallel_size": (("tensor_parallel_size",), 1),
    "pipeline_parallel_size": (("pipeline_parallel_size",), 1),
    "max_num_seqs": (("max_num_seqs",), 0),
    "max_num_batched_tokens": (("max_num_batched_tokens",), 0),
}
_TEXTS: Mapping[str, tuple[str, str]] = {
    "dtype": ("dtype", "bfloat16"),
    "engine_version": ("vllm_version", ""),  # TokenSpeed's has this name, too
    "instance_id": ("instance_id", ""),
}


def read_registration(engine_index: int, frames: Sequence[bytes]) -> EngineInfo:
    """The first message of an engine on the input socket: a map, no type frame before it.

    Args:
        engine_index: From its identity.
        frames: Without the identity frame.

    Raises:
        DecodeError: Not one frame with a map, or a key of the wrong type.
    """
    what = f"the registration of engine {engine_index}"
    message = _read_map(frames, what)
    values: dict[str, Any] = {}
    for name, (keys, default) in _INTEGERS.items():
        key = next((key for key in keys if key in message), keys[0])
        values[name] = _integer(message.get(key, default), key, what)
    for name, (key, default_text) in _TEXTS.items():
        values[name] = _text(message.get(key, default_text), key, what)
    size = message.get("kv_cache_size_tokens")
    if size is not None:
        size = _integer(size, "kv_cache_size_tokens", what)
    return EngineInfo(
        engine_index=engine_index,
        alive=True,
        kv_cache_size_tokens=size,
        registration=message,
        **values,
    )


def _read_map(frames: Sequence[bytes], what: str) -> dict[str, Any]:
    if len(frames) != 1:
        raise DecodeError(f"expected {what} as one frame, got {len(frames)} frames")
    if len(frames[0]) > _MAX_MESSAGE_BYTES:
        raise DecodeError(f"expected {what} of at most 1 MiB, got {preview(frames[0])}")
    message = unpack(frames[0], what)
    if not isinstance(message, dict):
        raise DecodeError(f"expected {what} as a map, got {preview(frames[0])}")
    return message


def _integer(value: object, key: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecodeError(f"{key} in {what} must be an int, got {described(value)}")
    return value


def _text(value: object, key: str, what: str) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"{key} in {what} must be a text, got {described(value)}")
    return value
