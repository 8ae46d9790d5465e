"""The start-up messages of both engines, against those captured from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.tokenspeed_vectors import frames, vector, vectors
from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineInfo
from tszmq.wire.startup import (
    FAILED,
    HELLO,
    READY,
    encode_init,
    engine_identity,
    engine_index,
    read_handshake,
    read_registration,
)

VLLM: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "vllm.json").read_text(encoding="utf-8")
)


def of_vllm(*messages: str) -> list[dict[str, Any]]:
    return [vector for vector in VLLM if vector["message"] in messages]


# -- identities ---------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("identity"), ids=lambda vector: vector["name"])
def test_identities_are_the_captured_ones(vector: dict[str, Any]) -> None:
    (identity,) = frames(vector)
    assert engine_index(identity) == vector["fields"]["engine_index"]
    assert engine_identity(vector["fields"]["engine_index"]) == identity


@pytest.mark.parametrize("identity", [b"", b"\x00", b"\x00\x00\x00", b"\x00\x80\x00\x41\xa7"])
def test_a_stranger_has_no_index(identity: bytes) -> None:
    assert engine_index(identity) is None


@pytest.mark.parametrize("index", [-1, 65536])
def test_an_index_that_fits_no_identity_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=str(index)):
        engine_identity(index)


# -- HELLO, READY -------------------------------------------------------------------------

HANDSHAKES = vectors("WireReadyMessage") + of_vllm("handshake HELLO", "handshake READY")


@pytest.mark.parametrize("vector", HANDSHAKES, ids=lambda vector: vector["name"])
def test_captured_handshakes_are_read(vector: dict[str, Any]) -> None:
    read = read_handshake(frames(vector))
    assert read.status == vector["fields"]["status"]
    assert read.status in (HELLO, READY)
    assert read.message == vector["fields"]


@pytest.mark.parametrize("status", [FAILED, "LATER", "x" * 64])
def test_other_words_are_passed_on(status: str) -> None:
    assert read_handshake([pack({"status": status, "new": [1]})]).status == status


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b""],
        [pack({"status": HELLO}), b""],
        [pack({"status": HELLO}) + b"\x00"],
        [pack([HELLO])],
        [pack(HELLO)],
        [pack({})],
        [pack({"status": None})],
        [pack({"status": ""})],
        [pack({"status": 1})],
        [pack({"status": b"HELLO"})],
        [pack({"status": [[]]})],
        [pack({"status": "x" * 65})],
        [pack({"status": "x" * 2_000_000})],
        [b"ENGINE_CORE_DEAD"],
    ],
)
def test_what_is_no_handshake_is_a_short_decode_error(message: list[bytes]) -> None:
    with pytest.raises(DecodeError, match="handshake message") as caught:
        read_handshake(message)
    assert len(str(caught.value)) < 400


# -- INIT ---------------------------------------------------------------------------------

INITS = vectors("WireHandshakeInitMessage") + of_vllm("INIT")
SENT_BY_US = {"handshake-init", "INIT"}


@pytest.mark.parametrize("vector", INITS, ids=lambda vector: vector["name"])
def test_our_init_has_what_the_captured_ones_have(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    addresses = fields["addresses"]
    ours = encode_init(
        addresses["inputs"][0], addresses["outputs"][0], fields.get("parallel_config")
    )
    if vector["name"] in SENT_BY_US:
        assert [ours] == frames(vector)
    decoded = unpack(ours)
    assert decoded["parallel_config"] == fields.get("parallel_config", {})
    # Only the first address of each list is used; no coordinator and no later keys are ours.
    seen = vector.get("engine_sees", fields)["addresses"]
    assert set(decoded["addresses"]) == set(seen)
    assert decoded["addresses"]["inputs"] == seen["inputs"][:1]
    assert decoded["addresses"]["outputs"] == seen["outputs"][:1]


def test_an_init_always_has_both_addresses() -> None:
    # What a TokenSpeed engine cannot start with.
    broken = [vector for vector in vectors("malformed") if "init" in vector["name"]]
    assert [vector["fields"].get("addresses") for vector in broken] == [
        {"inputs": [], "outputs": []},
        None,
    ]
    sent = unpack(encode_init("ipc:///a", "ipc:///b"))
    assert sent["addresses"]["inputs"] == ["ipc:///a"]
    assert sent["addresses"]["outputs"] == ["ipc:///b"]


# -- registrations ------------------------------------------------------------------------

REGISTRATIONS = vectors("WireEngineCoreReadyResponse") + of_vllm("EngineCoreReadyResponse")
RENAMED = {"engine_version": "vllm_version"}
OURS = {"engine_index", "alive", "registration", "lockstep", "incarnation"}


@pytest.mark.parametrize("vector", REGISTRATIONS, ids=lambda vector: vector["name"])
def test_captured_registrations_are_read(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    read = read_registration(7, frames(vector))
    assert (read.engine_index, read.alive) == (7, True)
    assert read.registration == fields
    for name, value in attrs.asdict(read, recurse=False).items():
        if name in OURS:
            continue
        key = RENAMED.get(name, name)
        if name == "block_size" and "prefix_granularity" in fields:
            key = "prefix_granularity"
        assert value == fields[key], name


def test_missing_keys_stand_for_the_engines_defaults() -> None:
    empty = read_registration(5, [pack({})])
    spelled_out = read_registration(5, frames(vector("registration-defaults")))
    assert attrs.evolve(spelled_out, registration={}) == empty


def test_sizes_may_be_negative() -> None:
    name = "registration-max-num-batched-tokens-minus-1"
    assert read_registration(0, frames(vector(name))).max_num_batched_tokens == -1


INTEGERS = [
    "max_model_len", "num_gpu_blocks", "block_size", "prefix_granularity", "world_size",
    "data_parallel_size", "data_parallel_rank", "tensor_parallel_size", "pipeline_parallel_size",
    "max_num_seqs", "max_num_batched_tokens", "kv_cache_size_tokens",
]  # fmt: skip
TEXTS = ["dtype", "vllm_version", "instance_id"]


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [1.0, True, "1", b"1", [], {}])
def test_a_size_that_is_no_int_is_refused(key: str, value: Any) -> None:
    with pytest.raises(DecodeError, match=rf"{key} in the registration of engine 3 .*an int"):
        read_registration(3, [pack({key: value})])


@pytest.mark.parametrize("key", INTEGERS)
def test_only_the_kv_cache_may_be_unknown(key: str) -> None:
    if key == "kv_cache_size_tokens":
        assert read_registration(3, [pack({key: None})]).kv_cache_size_tokens is None
        return
    with pytest.raises(DecodeError, match="got None"):
        read_registration(3, [pack({key: None})])


@pytest.mark.parametrize("key", TEXTS)
@pytest.mark.parametrize("value", [None, 1, b"1", ["x"]])
def test_a_text_that_is_none_is_refused(key: str, value: Any) -> None:
    with pytest.raises(DecodeError, match=rf"{key} in the registration"):
        read_registration(3, [pack({key: value})])


@pytest.mark.parametrize("message", [[], [b""], [pack({}), pack({})], [pack([])], [b"\x80\x80"]])
def test_what_is_no_registration_is_a_decode_error(message: list[bytes]) -> None:
    with pytest.raises(DecodeError, match="the registration of engine 2"):
        read_registration(2, message)


@given(st.lists(st.binary(max_size=80), max_size=2))
def test_no_bytes_get_anything_else_out_of_it(message: list[bytes]) -> None:
    for read in (read_handshake, lambda frames: read_registration(1, frames)):
        try:
            read(message)
        except DecodeError as error:
            text = str(error)
        else:
            text = ""
        assert len(text) < 500


@given(st.dictionaries(st.sampled_from([*INTEGERS, *TEXTS]), st.integers() | st.text(max_size=99)))
def test_a_registration_is_whole_or_refused(fields: dict[str, Any]) -> None:
    fields = {
        key: max(-(2**63), min(value, 2**64 - 1)) if isinstance(value, int) else value
        for key, value in fields.items()
    }
    typed = all(isinstance(value, str) == (key in TEXTS) for key, value in fields.items())
    try:
        read: EngineInfo | None = read_registration(0, [pack(fields)])
    except DecodeError:
        read = None
    if "prefix_granularity" in fields and not isinstance(fields.get("block_size", 0), int):
        return  # the old spelling is not looked at beside the new one
    assert (read is not None) == typed
