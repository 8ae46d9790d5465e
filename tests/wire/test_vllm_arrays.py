"""Arrays of vLLM's messages, judged by numpy where it has the type."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tszmq.errors import DecodeError
from tszmq.wire.vllm.arrays import Array, ArrayReader

SPELLINGS = {
    "<i4": "int32",
    "<i8": "int64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
}


def read(value: Any, *aux: bytes) -> Array:
    return ArrayReader([b"message", *aux]).read(value, "it")


@given(
    st.sampled_from(sorted(SPELLINGS)).flatmap(
        lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0))
    ),
    st.booleans(),
    st.booleans(),
)
def test_values_are_numpys(array: Any, torchs: bool, inline: bool) -> None:
    name = SPELLINGS[array.dtype.str] if torchs else array.dtype.str
    shape, raw = list(array.shape), array.tobytes()
    got = read([name, shape, raw]) if inline else read([name, shape, 1], raw)
    assert got.shape == array.shape
    assert repr(list(got.values)) == repr(array.ravel().tolist())


@pytest.mark.parametrize(
    ("bits", "value"),
    [
        (0x3F80, 1.0),
        (0xBF80, -1.0),
        (0x0000, 0.0),
        (0x8000, -0.0),
        (0x7F80, math.inf),
        (0xFF80, -math.inf),
        (0x7FC0, math.nan),
        (0x4049, 3.140625),
        (0x0001, 2.0**-133),
    ],
)
def test_bfloat16(bits: int, value: float) -> None:
    got = read(["bfloat16", [1], struct.pack("<H", bits)])
    assert repr(got.values) == repr((value,))


def test_nan_keeps_its_bits() -> None:
    raw = struct.pack("<I", 0x7FC12345)
    (value,) = read(["<f4", [1], raw]).values
    assert numpy.frombuffer(struct.pack("<d", value), "<u8")[0] >> 29 & 0x7FFFFF == 0x412345


F4 = bytes(8)  # two float32
BAD: list[Any] = [
    None,
    "array",
    [],
    ["<f4", [2]],
    ["<f4", [2], F4, None],
    ("<f4", [2], F4),
    [None, [2], F4],
    [["<f4"], [2], F4],
    [4, [2], F4],
    ["", [2], F4],
    [">f4", [2], F4],
    ["<u4", [2], F4],
    ["|O", [1], F4],
    ["complex64", [1], F4],
    ["<f4", None, F4],
    ["<f4", 2, F4],
    ["<f4", (2,), F4],
    ["<f4", {0: 2}, F4],
    ["<f4", [3], F4],
    ["<f4", [1], F4],
    ["<f4", [], F4],
    ["<f4", [-2], F4],
    ["<f4", [-2, -1], F4],
    ["<f4", [2.0], F4],
    ["<f4", [True, 2], F4],
    ["<f4", ["2"], F4],
    ["<f4", [1] * 9, b"abcd"],
    ["<f4", [2**63, 2**63, 2**63], F4],
    ["<f4", [2], None],
    ["<f4", [2], "12345678"],
    ["<f4", [2], [1]],
    ["<f4", [2], 0],
    ["<f4", [2], 2],
    ["<f4", [2], -1],
    ["<f4", [2], True],
    ["<f4", [2], 1.0],
    ["<f4", [2], 2**64],
    ["<f4", [1], 1],
]


@pytest.mark.parametrize("bad", BAD, ids=lambda value: str(value)[:30])
def test_what_is_no_array(bad: Any) -> None:
    with pytest.raises(DecodeError, match="it must"):
        read(bad, F4)


def test_a_frame_is_one_arrays() -> None:
    reader = ArrayReader([b"message", F4, F4])
    reader.read(["<f4", [2], 2], "it")
    reader.read(["<f4", [2], 1], "it")
    for index in (1, 2):
        with pytest.raises(DecodeError, match="unused frame"):
            reader.read(["<f4", [2], index], "it")


def test_no_items_need_no_bytes() -> None:
    assert read(["<f4", [0, 3], b""]).values == ()
    assert read(["<f4", [3, 0], b""]).shape == (3, 0)
    assert read(["<f4", [], bytes(4)]).values == (0.0,)
