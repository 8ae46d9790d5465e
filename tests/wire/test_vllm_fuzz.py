"""Any bytes are a message or a ``DecodeError``, and the quick ways read what the plain ones do."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any
from unittest import mock

import attrs
import ormsgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.vllm_vectors import frames, vectors
from tszmq.codec import unpack
from tszmq.errors import DecodeError
from tszmq.wire.base import EngineBatch
from tszmq.wire.vllm import Vllm, logprobs, outputs

SEEDS = [frames(vector) for vector in vectors("EngineCoreOutputs")]
REGISTRATION = frames(vectors("EngineCoreReadyResponse")[0])[0]


def decode(message: list[bytes]) -> EngineBatch | None:
    """A batch, checked for what its readers rely on; None for a decode error."""
    batch, error = None, ""
    try:
        batch = Vllm().decoder().decode(message)
    except DecodeError as caught:
        error = str(caught)
    assert len(error) < 600
    if batch is not None:
        check(batch)
    return batch


def check(batch: EngineBatch) -> None:
    rows = len(batch.request_ids)
    assert len(batch.token_ids) == rows
    assert all(type(request_id) is str for request_id in batch.request_ids)
    for tokens in batch.token_ids:
        assert type(tokens) is list
        assert all(type(token) is int for token in tokens)
    assert list(batch.finished) == sorted(batch.finished)
    assert all(0 <= row < rows and reason for row, reason in batch.finished.items())
    if batch.logprobs is not None:
        assert len(batch.logprobs) == rows
        for tokens, values in zip(batch.token_ids, batch.logprobs, strict=True):
            assert len(values) in (0, len(tokens))
            assert all(type(value) is float for value in values)
    for position, detail in (batch.details or {}).items():
        assert 0 <= position < rows
        if detail.top_logprobs is not None:
            assert len(detail.top_logprobs) == len(batch.token_ids[position])
        if detail.prompt_logprobs is not None:
            assert detail.prompt_logprobs[0] is None
    if batch.load is not None:
        assert 0 <= batch.load.kv_cache_usage <= 1


def plainly(message: list[bytes]) -> EngineBatch | None:
    """The same by the long ways alone."""
    with (
        mock.patch.object(logprobs, "_read_small", return_value=None),
        mock.patch.object(outputs, "_read_rows", _read_one_by_one),
    ):
        return decode(message)


_quick_rows = outputs._read_rows


def _read_one_by_one(index: int, rows: list[Any], aux: Any) -> EngineBatch:
    return _quick_rows(index, [outputs._whole_row(row) for row in rows], aux)


def agree(message: list[bytes]) -> EngineBatch | None:
    ours, plain = decode(message), plainly(message)
    assert shown(ours) == shown(plain), [frame.hex() for frame in message]
    return ours


def shown(batch: EngineBatch | None) -> str:
    return "" if batch is None else repr(attrs.asdict(batch))


def test_the_seeds_are_read() -> None:
    assert None not in map(agree, SEEDS)


@given(st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    agree([data])


@given(st.sampled_from(SEEDS), st.data())
def test_bytes_cut_off_or_added(seed: list[bytes], data: st.DataObject) -> None:
    first, *aux = seed
    length = data.draw(st.integers(0, len(first) - 1))
    assert agree([first[:length], *aux]) is None
    assert agree([first + data.draw(st.binary(min_size=1, max_size=4)), *aux]) is None


@settings(max_examples=400)
@given(st.sampled_from(SEEDS), st.data())
def test_bytes_changed(seed: list[bytes], data: st.DataObject) -> None:
    message = list(map(bytearray, seed))
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from([frame for frame in message if frame]))
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255) | st.sampled_from([0xC0, 0x90, 0xC2, 0xDD]))
    agree(list(map(bytes, message)))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-3, 5)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=8)
    | st.builds(ormsgpack.Ext, st.integers(0, 5), st.binary(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def packed(value: Any) -> bytes:
    return ormsgpack.packb(value, option=ormsgpack.OPT_NON_STR_KEYS)


def readable(seed: list[bytes]) -> Any:
    return unpack(seed[0], ext_hook=ormsgpack.Ext, int_keys=True)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every element of a message, by its path."""
    found = [path] if path else []
    items = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = value.items()  # type: ignore[assignment]
    for key, item in items:
        found += places(item, (*path, key))
    return found


@settings(max_examples=400)
@given(st.sampled_from(SEEDS), anything, st.data())
def test_elements_replaced(seed: list[bytes], value: Any, data: st.DataObject) -> None:
    message = readable(seed)
    *path, last = data.draw(st.sampled_from(places(message)))
    parent = message
    for key in path:
        parent = parent[key]
    parent[last] = value
    agree([packed(message), *seed[1:]])


@given(anything, st.lists(st.binary(max_size=8), max_size=2))
def test_any_object(value: Any, aux: list[bytes]) -> None:
    agree([packed(value), *aux])


# -- logprobs of one message, read as one table ------------------------------------------

shapes = st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 3]))
dtypes = st.sampled_from([("<i4", "i", "<f4", "f")] * 6 + [("int64", "q", "float64", "d")])


@st.composite
def scored_rows(draw: st.DrawFn) -> list[Any]:
    tokens, width = draw(shapes)
    id_type, id_letter, type_, letter = draw(dtypes)
    items = tokens * width
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=items, max_size=items))
    values = draw(st.lists(st.floats(width=32), min_size=items, max_size=items))
    missing = draw(st.booleans()) and draw(st.booleans())
    table = [
        [id_type, [tokens, width], ormsgpack.Ext(3, struct.pack(f"<{items}{id_letter}", *ids))],
        [type_, [tokens, width], ormsgpack.Ext(3, struct.pack(f"<{items}{letter}", *values))],
        None,
        None,
    ]
    return ["r", list(range(tokens)), None if missing else table, *[None] * 16]


def scored(shape: list[Any], data: Any, *ranks: Any, tokens: tuple[int, ...] = (1,)) -> list[Any]:
    tables = [[dtype, shape, data] for dtype in ("<i4", "<f4")]
    return ["r", list(tokens), [*tables, *ranks], *[None] * 16]


@example([scored([True, 1], bytes(4), None)])
@example([scored([1, 1.0], bytes(4), None)])
@example([scored([1, 1], bytes(4))])
@example([scored([1, 0], b"", None)])
@example([scored([0, 0], b"", None, tokens=())])
@example([scored([1, 1], bytes(8), None), scored([1, 1], b"", None)])
@given(st.lists(scored_rows(), min_size=1, max_size=4))
def test_scored_rows(rows: list[Any]) -> None:
    agree([packed([0, rows])])


@given(st.lists(scored_rows(), min_size=1, max_size=3), anything, st.data())
def test_scored_rows_with_an_element_replaced(
    rows: list[Any], value: Any, data: st.DataObject
) -> None:
    message = [0, rows]
    *path, last = data.draw(st.sampled_from(places(message)))
    parent: Any = message
    for key in path:
        parent = parent[key]
    parent[last] = value
    agree([packed(message)])


@pytest.mark.parametrize("width", [b"x" * 1000, "x" * 1000, [1] * 1000, True, 1.5, None, -1])
def test_a_width_that_is_no_number_is_not_multiplied(width: Any) -> None:
    """By the number of tokens it would be much more than the message."""
    tokens = tuple(range(10_000))
    message = [packed([0, [scored([len(tokens), width], b"", None, tokens=tokens)]])]
    tracemalloc.start()
    try:
        assert decode(message) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(message[0])


# -- registrations ------------------------------------------------------------------------


@given(st.data())
def test_registrations_changed(data: st.DataObject) -> None:
    changed = bytearray(REGISTRATION)
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        info = Vllm().read_registration(0, [bytes(changed)])
    except DecodeError:
        return
    assert type(info.max_model_len) is int
    assert type(info.lockstep) is bool
