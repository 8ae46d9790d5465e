"""msgpack: exactly one object or a DecodeError, whatever the bytes are."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from typing import Any

import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tszmq import codec
from tszmq.errors import DecodeError, InvalidRequest

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


@given(plain)
def test_what_is_packed_comes_back(value: Any) -> None:
    assert codec.unpack(codec.pack(value)) == value


@given(plain, st.binary(min_size=1, max_size=20) | plain.map(codec.pack))
def test_bytes_after_the_object_are_refused(value: Any, more: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.unpack(codec.pack(value) + more)


@given(plain, st.integers(0))
def test_a_truncated_object_is_refused(value: Any, cut: int) -> None:
    data = codec.pack(value)
    with pytest.raises(DecodeError):
        codec.unpack(data[: cut % len(data)])


@given(st.binary(max_size=60))
def test_any_bytes_give_one_object_or_a_decode_error(data: bytes) -> None:
    try:
        value = codec.unpack(data)
    except DecodeError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert ormsgpack.unpackb(data) == value or "nan" in repr(value)
    assert len(refusal) < 300


def test_ormsgpack_alone_ignores_what_follows() -> None:
    # The reason for the placeholder; when this fails, it may go.
    assert ormsgpack.unpackb(b"\x91\x01\x00") == [1]
    with pytest.raises(DecodeError, match=r"bytes follow the first object; got 3 bytes: 91 01 00$"):
        codec.unpack(b"\x91\x01\x00")


@pytest.mark.parametrize("part", range(1, len(codec.HOLE)))
def test_parts_of_the_placeholder_do_not_pass_for_it(part: int) -> None:
    with pytest.raises(DecodeError):
        codec.unpack(b"\x01" + codec.HOLE[:part])


def test_the_placeholder_cannot_overlap_with_itself() -> None:
    assert codec.HOLE[:2] == b"\xc4\x10"
    assert b"\xc4" not in codec.PLACEHOLDER
    assert len(codec.PLACEHOLDER) == 16


def test_holes_come_back_as_placeholders() -> None:
    pieces = (b"\x93\x01", codec.HOLE, b"\x02")
    assert codec.unpack_pieces(pieces) == [1, codec.PLACEHOLDER, 2]


@pytest.mark.parametrize(
    "pieces", [(b"\x92\x01",), (b"\x91\x01\x02",), (b"\x91", codec.HOLE, b"\x02"), (), (b"\xc1",)]
)
def test_pieces_that_are_not_one_object_are_refused(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(DecodeError):
        codec.unpack_pieces(pieces)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xa1\xff",  # not UTF-8
        b"\xa3\xed\xa0\x80",  # a lone surrogate
        b"\xd4\x01\x00",  # an extension type
        b"\xc7\x00\x05",
        b"\x81\x01\x02",  # a key that is not a str
        b"\x81\x90\x02",
        b"ENGINE_CORE_DEAD",
    ],
)
def test_what_is_not_plain_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"expected a list of ids, .*; got "):
        codec.unpack(data, "a list of ids")


def test_extension_types_can_be_read() -> None:
    assert codec.unpack(b"\x91\xd4\x03\x07", ext_hook=lambda code, data: (code, data)) == [
        (3, b"\x07")
    ]

    def broken(code: int, data: bytes) -> Any:
        raise RuntimeError("not a tensor")

    with pytest.raises(DecodeError, match="ext_hook failed"):
        codec.unpack(b"\xd4\x03\x07", ext_hook=broken)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(codec.unpack(b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"))


def test_error_texts_do_not_grow_with_the_message() -> None:
    with pytest.raises(DecodeError) as caught:
        codec.unpack(b"\xdb\x00\x0f\xff\xff" + b"x" * 1_000_000)
    assert "1000005 bytes: db 00 0f ff ff 78" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", {1: 2}, object(), {"a": {1}}])
def test_what_msgpack_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent as msgpack: "):
        codec.pack(value)


def test_integer_keys_are_packed_when_asked_for() -> None:
    assert codec.pack({5: 1.0}, int_keys=True) == b"\x81\x05\xcb\x3f\xf0" + bytes(6)


@pytest.mark.parametrize("version", ["1.13.0", "1.5.0", "1.12.2", "0.9", "1.13", "unknown", ""])
def test_a_release_that_crashes_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ormsgpack, "__version__", version)
    with pytest.raises(ImportError, match=r"found .*pip install 'ormsgpack>=1\.13\.1'"):
        _import_afresh()


def _import_afresh() -> Any:
    """A second copy of the module: the one in use stays as it is."""
    spec = importlib.util.find_spec("tszmq.codec")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["1.13.1", "1.13.2rc1", "1.14", "2.0.0", "1.100.0"])
def test_a_sound_release_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ormsgpack, "__version__", version)
    assert _import_afresh().unpack(b"\x01") == 1


BOMBS = {
    "array 32": b"\xdd\xff\xff\xff\xff" + bytes(10),
    "map 32": b"\xdf\xff\xff\xff\xff" + bytes(10),
    "bin 32": b"\xc6\xff\xff\xff\xff" + bytes(10),
    "str 32": b"\xdb\xff\xff\xff\xff" + bytes(10),
    "ext 32": b"\xc9\xff\xff\xff\xff\x01" + bytes(10),
    "nested array 16": b"\xdc\xff\xff" * 1000 + bytes(65536),
    "nested array 32": b"\xdd\xff\xff\xff\xff" * 1000 + bytes(65536),
    "nested map": b"\xdf\xff\xff\xff\xff\xa1a" * 1000 + bytes(65536),
    "nested fixarray": b"\x91" * 100_000,
    "nested to the limit": b"\x91" * 1022 + b"\xc0" + b"\xc0",
    "nested fixmap": b"\x81\xa1a" * 100_000,
}

CHILD = """
import resource, sys
from tszmq.codec import unpack
from tszmq.errors import DecodeError
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = bytes.fromhex(sys.stdin.read())
for _ in range(200):
    try:
        unpack(data)
    except DecodeError:
        continue
    sys.exit("accepted")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
sys.exit(f"grew by {grown} kB" if grown > 32_000 else 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as on Linux")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_neither_kill_nor_swell_the_process(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=BOMBS[name].hex(),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
