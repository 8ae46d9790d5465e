"""vLLM's utility calls: what is sent, and what is made of the answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tszmq.codec import unpack
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.wire.vllm import Vllm

# -- utility calls ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "a b", "a.b", "_send_engine_dead", "__init__", "é\ud800"])
def test_methods_that_are_not_for_calling(method: str) -> None:
    with pytest.raises(InvalidRequest, match="public method"):
        Vllm().encode_utility(1, method, [])


def test_the_call_that_ends_the_input_thread_is_refused() -> None:
    with pytest.raises(UnsupportedField, match="handle_fault_tolerance"):
        Vllm().encode_utility(1, "handle_fault_tolerance", [])


@pytest.mark.parametrize("call_id", [-1, 2**64])
def test_call_ids_beyond_the_wire(call_id: int) -> None:
    with pytest.raises(InvalidRequest, match="call_id"):
        Vllm().encode_utility(call_id, "sleep", [1])


@pytest.mark.parametrize(
    ("call_id", "method", "args"),
    [(True, "m", []), (1.0, "m", []), (1, 5, []), (1, "m", "ab"), (1, "m", 5), (1, "m", {})],
)
def test_utility_calls_of_wrong_types(call_id: Any, method: Any, args: Any) -> None:
    with pytest.raises(TypeError):
        Vllm().encode_utility(call_id, method, args)


@pytest.mark.parametrize(
    "argument", [object(), {1, 2}, 2**64, -(2**63) - 1, "\ud800", {1.5: 2}, {None: 1}, range(3)]
)
def test_arguments_that_an_engine_cannot_read(argument: Any) -> None:
    with pytest.raises(InvalidRequest, match="args of m must be plain"):
        Vllm().encode_utility(1, "m", [[argument]])


def test_arguments_may_nest_but_not_without_end() -> None:
    value: Any = 1
    for _ in range(62):
        value = [value]
    Vllm().encode_utility(1, "m", [value])
    with pytest.raises(InvalidRequest, match="more than 64 levels"):
        Vllm().encode_utility(1, "m", [[[value]]])


def test_plain_arguments_arrive() -> None:
    args = (None, True, 1, -1, 2**64 - 1, 0.5, math.inf, "é", b"\x00", (1, [2]), {"a": {5: 6}})
    (kind, body) = Vllm().encode_utility(2**64 - 1, "m", args)
    assert kind == b"\x03"
    arrived = [*args[:-2], [1, [2]], {"a": {5: 6}}]
    assert unpack(body, int_keys=True) == [0, 2**64 - 1, "m", arrived]
