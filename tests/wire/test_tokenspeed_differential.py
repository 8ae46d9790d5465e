"""The decoder's quick way and its plain way agree on every message: one batch, or none."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.tokenspeed_vectors import frames, vectors
from tszmq.codec import HOLE, pack, unpack
from tszmq.errors import DecodeError
from tszmq.wire.base import EngineBatch
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder
from tszmq.wire.tokenspeed_output import read_batch

SEEDS = [frames(vector)[0] for vector in vectors("BatchTokenIDOutSlim")]


def outcome(read: Callable[[bytes], EngineBatch], data: bytes) -> Any:
    """What a reader makes of a message, comparable and with its types."""
    try:
        batch = read(data)
    except DecodeError:
        return None
    check_one_each(batch)
    columns = {
        **attrs.asdict(batch),
        "token_ids": batch.rows_of_tokens(),
        "logprobs": batch.rows_of_logprobs(),
        "completion_tokens": batch.rows_of_counts(),
        "finished": dict(batch.finished),
        "one_each": None,  # the quick way's alone
    }
    return repr(columns)


def check_one_each(batch: EngineBatch) -> None:
    """It is there instead of the columns, and counts what they count."""
    step = batch.one_each
    if step is None:
        return
    assert (batch.token_ids, batch.logprobs, batch.completion_tokens) == ([], None, None)
    assert len(step.tokens) == len(batch.request_ids) == batch.num_tokens()
    packed = array("I", step.completion_tokens()).tobytes()
    assert step.number() == int.from_bytes(packed, sys.byteorder)
    if step.logprobs is not None:
        assert len(step.logprobs) == len(step.tokens)


def test_the_quick_way_repeats_a_step_of_one_token_each() -> None:
    for seed in SEEDS:
        batch = TokenSpeedDecoder().decode([seed])
        usual = len(unpack(seed)) == 14 and bool(batch.request_ids)
        logprobs = batch.rows_of_logprobs()
        scored = logprobs is None or all(logprobs)
        single = usual and scored and all(len(row) == 1 for row in batch.rows_of_tokens())
        assert (batch.one_each is not None) == single


def agree(messages: list[bytes]) -> list[Any]:
    """Both ways on messages in a row, since the quick one remembers."""
    decoder = TokenSpeedDecoder()
    outcomes = []
    for data in messages:
        plain = outcome(read_batch, data)
        assert outcome(lambda data: decoder.decode([data]), data) == plain, data.hex()
        outcomes.append(plain)
    return outcomes


def test_both_read_every_captured_batch() -> None:
    assert None not in agree(SEEDS)
    assert None not in agree([seed for seed in SEEDS for _ in range(3)])


# -- valid batches ------------------------------------------------------------------------

counts = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 0xC2, 0xC3, 0xC2C2, 2**31])
texts = st.text(max_size=5) | st.sampled_from(["é", "r1", "r2", "\u00c2", "x" * 194])


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    rows = draw(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 194]))
    one = draw(texts)
    tokens = [draw(st.lists(counts, max_size=3))] * rows if rows > 3 else [
        draw(st.lists(counts, max_size=3)) for _ in range(rows)
    ]  # fmt: skip
    wanted = draw(st.booleans())
    values = [
        "BatchTokenIDOutSlim",
        [f"{one}{row}" for row in range(rows)],
        tokens,
        [draw(st.sampled_from(["", "stop", "é"]))] * rows,
        *([draw(counts)] * rows for _ in range(3)),
        [[draw(st.floats())] * len(row) if wanted else [] for row in tokens],
        [row if wanted else [] for row in tokens],
        draw(st.integers(0, 2**16)),
        *(draw(counts) for _ in range(4)),
        draw(st.none() | texts),
    ]
    return values[: draw(st.sampled_from([9, 10, 12, 14, 14, 14, 14, 15]))]


@given(batches(), st.integers(1, 3))
def test_they_agree_on_valid_batches(values: list[Any], times: int) -> None:
    (*_, last) = agree([pack(values)] * times)
    assert (last is None) == (len(values) > 9 and values[9] == 2**16)


# -- one value replaced -------------------------------------------------------------------

hostile = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 0xC2, 2**32, 2**64 - 1, 0.0, 1.5, "", "a", b""])
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner),
    max_leaves=4,
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A valid batch with one value, or one item somewhere, replaced."""
    values = draw(batches() | st.sampled_from(SEEDS).map(unpack))
    position = draw(st.integers(0, len(values) - 1))
    column = values[position]
    if isinstance(column, list) and column and draw(st.booleans()):
        column = list(column)
        row = draw(st.integers(0, len(column) - 1))
        if isinstance(column[row], list) and column[row] and draw(st.booleans()):
            column[row] = [*column[row][:-1], draw(hostile)]
        else:
            column[row] = draw(hostile)
    elif isinstance(column, list) and column and draw(st.booleans()):
        column = [*column, column[-1]] if draw(st.booleans()) else column[:-1]
    else:
        column = draw(hostile)
    return pack([*values[:position], column, *values[position + 1 :]])


@given(st.lists(spoilt() | st.sampled_from(SEEDS), min_size=1, max_size=3))
def test_they_agree_on_spoilt_batches(messages: list[bytes]) -> None:
    agree(messages)


# -- bytes replaced, dropped, inserted ----------------------------------------------------

snippets = st.sampled_from(
    [
        b"\xc0", b"\xc2", b"\xc3", b"\x90", b"\x90\x90", b"\x91\x90\x91\x90", b"\xdc\x00\x10",
        b"\xdc\x00\xc2", b"\x9e", b"\x9f", b"\xa0", b"\x80", b"\xcc\xc2", b"\xcd\xc2\xc3",
        b"\xce\x00\x00\x00\x01", b"\xcf" + bytes(7) + b"\x01", b"\xcb" + bytes(8), b"\xc4\x00",
        b"\xc4\x10", b"\xdd\xff\xff\xff\xff", b"\xd9\x00", b"\xdd\x00\x00\x00\x10",
    ]
) | st.binary(max_size=4)  # fmt: skip


@st.composite
def mangled(draw: st.DrawFn, seed: bytes | None = None) -> bytes:
    data = seed or draw(batches().map(pack) | st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 3))):
        # Half of the changes go near the end: that is where columns are cut out.
        start = draw(st.integers(0, len(data)) | st.integers(max(0, len(data) - 90), len(data)))
        dropped = draw(st.integers(0, 5))
        data = data[:start] + draw(snippets) + data[start + dropped :]
    return data


@settings(max_examples=300)
@given(st.lists(mangled() | st.sampled_from(SEEDS), min_size=1, max_size=3))
def test_they_agree_on_mangled_bytes(messages: list[bytes]) -> None:
    agree(messages)


@st.composite
def after_the_same_rows(draw: st.DrawFn) -> list[bytes]:
    """A spoilt message of rows that the decoder knows by now, with logprobs or many."""
    token = draw(st.integers(0, 2**17))
    seeds = [pack(scored(draw(st.integers(16, 40)), token)), pack(many(token))]
    seed = draw(st.sampled_from(seeds))
    return [*[seed] * 5, draw(mangled(seed)), seed]


@settings(max_examples=300)
@given(after_the_same_rows())
def test_they_agree_on_mangled_bytes_after_the_same_rows(messages: list[bytes]) -> None:
    agree(messages)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: SEEDS[0][:21] + tail))
@example(b"")
@example(SEEDS[0][:21])
@example(SEEDS[0][:22])
@example(SEEDS[0][:21] + b"\xdc")
@example(SEEDS[0][:21] + b"\xdc\x00\x00")
def test_they_agree_on_any_bytes(data: bytes) -> None:
    agree([data, SEEDS[0], data])


# -- shapes that a quick way is tempted by ------------------------------------------------


def large(**columns: Any) -> list[Any]:
    values: dict[str, Any] = {
        "tag": "BatchTokenIDOutSlim",
        "rids": [f"r{row}" for row in range(16)],
        "tokens": [[row] for row in range(16)],
        "reasons": [""] * 16,
        "prompt": [5] * 16,
        "completion": [5] * 16,
        "cached": [0] * 16,
        "logprobs": [[]] * 16,
        "logprob_ids": [[]] * 16,
        "tail": 1,
    }
    return [*{**values, **columns}.values(), 2, 3, 4, 5]


def scored(rows: int = 16, token: int = 0) -> list[Any]:
    tokens = [[(token + row * 77) % 2**17] for row in range(rows)]
    return large(
        rids=[f"r{row:020}" for row in range(rows)],
        tokens=tokens,
        reasons=[""] * rows,
        prompt=[5] * rows,
        completion=[5] * rows,
        cached=[0] * rows,
        logprobs=[[-0.25 * row] for row in range(rows)],
        logprob_ids=tokens,
    )


def many(token: int = 0, **columns: Any) -> list[Any]:
    """Rows that the next batch has again, with other tokens and counts."""
    rows = 130
    usual: dict[str, Any] = {
        "rids": [f"r{row:020}" for row in range(rows)],
        "tokens": [[(token + row * 77) % 2**17] for row in range(rows)],
        "reasons": [""] * rows,
        "prompt": [row * 3 for row in range(rows)],
        "completion": [token % 1000 + row for row in range(rows)],
        "cached": [0] * rows,
        "logprobs": [[]] * rows,
        "logprob_ids": [[]] * rows,
    }
    return large(**{**usual, **columns})


def test_constant_columns_are_not_taken_for_granted() -> None:
    usual = many()
    assert agree([pack(many(token)) for token in range(6)]).count(None) == 0
    names = ("reasons", "prompt", "cached", "tokens", "completion")
    for index, name in zip((3, 4, 6, 2, 5), names, strict=True):
        column = usual[index]
        for row in (0, 60, 129):
            for item in (None, True, False, 7, "x", [7], [], [True], 2**32, -1, 0xC2):
                values = many(1, **{name: [*column[:row], item, *column[row + 1 :]]})
                seen = agree([pack(many(token)) for token in range(5)] + [pack(values)] * 2)
                assert None not in seen[:5]
        for wrong in (column[:-1], [*column, column[-1]], column[0], None, [column]):
            spoilt = pack(many(1, **{name: wrong}))
            assert agree([pack(usual)] * 5 + [spoilt])[-1] is None
    # The bytes of the columns elsewhere, and twice.
    first, second = pack(usual[3]) + pack(usual[4]), pack(usual[6])
    for values in (
        many(1, tokens=first),
        many(1, completion=second),
        many(1, tokens=[first] * 130),
        [*usual[:3], usual[3], usual[4], *usual[3:]],
        [*usual[:5], usual[6], *usual[6:]],
        [*usual[:3], usual[4], usual[3], *usual[5:]],
    ):
        agree([pack(usual)] * 5 + [pack(values), pack(usual)])


def test_what_is_repeated_is_taken_from_the_last_batch() -> None:
    """Or the tests of it test nothing."""
    for cached in (0, 3):
        decoder = TokenSpeedDecoder()
        batches = [decoder.decode([pack(many(step, cached=[cached] * 130))]) for step in range(8)]
        assert batches[7].request_ids is batches[6].request_ids
        assert batches[1].request_ids is batches[0].request_ids
        tokens = [batch.rows_of_tokens()[0] for batch in batches]
        assert tokens == [[step] for step in range(8)]


def test_what_is_not_repeated_may_be_anything_that_is_valid() -> None:
    usual = [pack(many(step)) for step in range(5)]
    one_each = [[row] for row in range(130)]
    valid = [
        many(tokens=[[], [1, 2], *one_each[2:]]),  # as many in all
        many(tokens=[[row, row + 1, row + 2] for row in range(130)]),
        many(tokens=[[]] * 130),
        many(tokens=[[0xC2], [0xC3], [0xC2C3], *one_each[3:]]),
        [*many()[:9], 0xFFFF, 0, 0, 0, 0],
        [*many()[:9], 3, 2**32 - 1, 2**31, 0xC2, 0xC3],
    ]
    for values in valid:
        assert None not in agree([*usual, pack(values), pack(values), *usual])
    wrong = [
        [*many()[:9], 0x10000, 2, 3, 4, 5],
        [*many()[:9], True, 2, 3, 4, 5],
        [*many()[:9], 1, 2, 3, 4, False],
        [*many()[:9], 1, 2, 3, 4, 2**32],
        [*many()[:9], 1, 2, 3, -4, 5],
        [*many()[:9], 1, 2, None, 4, 5],
        many(tokens=[[True], *one_each[1:]]),
        many(completion=[False, *range(129)]),
    ]
    for values in wrong:
        assert agree([*usual, pack(values), usual[0]])[-2:] == [None, agree([usual[0]])[0]]
    # Other ids after the same first one.
    for rids in ([f"r{row:020}" for row in (*range(129), 7777)], ["r" + "0" * 20] * 130):
        assert None not in agree([*usual, pack(many(rids=rids)), usual[0]])


def rows_of(count: int, step: int, **columns: Any) -> list[Any]:
    """A batch of the first so many rows of an engine."""
    usual: dict[str, Any] = {
        "rids": [f"r{row:026}" for row in range(count)],
        "tokens": [[(step + row * 7919) % 70000] for row in range(count)],
        "reasons": [""] * count,
        "prompt": [row % 300 for row in range(count)],
        "completion": [step + row for row in range(count)],
        "cached": [0] * count,
        "logprobs": [[]] * count,
        "logprob_ids": [[]] * count,
    }
    return large(**{**usual, **columns})


def scored_rows_of(count: int, step: int) -> list[Any]:
    tokens = [[(step + row * 7919) % 70000] for row in range(count)]
    logprobs = [[-0.25 * row] for row in range(count)]
    return rows_of(count, step, tokens=tokens, logprobs=logprobs, logprob_ids=tokens)


KINDS: dict[str, Callable[[int, int], list[Any]]] = {
    "usual": rows_of,
    "cached": lambda count, step: rows_of(count, step, cached=[row % 3 for row in range(count)]),
    "logprobs": scored_rows_of,
}


def series(kind: str, count: int, joined: int, ended: bool) -> tuple[list[bytes], list[Any]]:
    """Five messages of the same rows, and the sixth batch: with others, or the end of one."""
    before = [pack(KINDS[kind](count, step)) for step in range(5)]
    values = KINDS[kind](count + joined, 5)
    if ended:
        values[3] = ["", "stop", *[""] * (count + joined - 2)]
    return before, values


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("joined", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_they_agree_whatever_byte_is_another(kind: str, joined: int, ended: bool) -> None:
    """One after the other, in a batch of known rows and of some that join."""
    decoder = TokenSpeedDecoder()
    before, values = series(kind, 17, joined, ended)
    data = pack(values)
    plain = outcome(read_batch, data)
    accepted = 0
    second_id, last_id = data.index(b"r00") + 29, data.index(b"r%026d" % 16)
    for at in (*range(second_id), *range(last_id, len(data))):
        for byte in {0x00, 0x90, 0xC3, 0xDC, (data[at] + 1) % 256}:
            for message in before if at % 50 == 0 else before[-1:]:
                decoder.decode([message])
            changed = data[:at] + bytes([byte]) + data[at + 1 :]
            expected = outcome(read_batch, changed)
            seen = outcome(lambda data: decoder.decode([data]), changed)
            assert seen == expected, f"byte {at} is {byte:#x} in {data.hex()}"
            accepted += expected is not None
        if at % 50 == 0:
            assert outcome(lambda data: decoder.decode([data]), data) == plain
    assert accepted > len(data) / 10


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_join_are_not_taken_for_granted(kind: str, ended: bool) -> None:
    before, usual = series(kind, 18, 2, ended)
    assert None not in agree([*before, pack(usual)])
    for column in range(1, 9):
        for row in (17, 18, 19):
            for item in (
                None,
                True,
                7,
                "x",
                b"x",
                b"x" * 26,
                [],
                [7],
                ["x"],
                [0.5],
                {},
                {"a": 1},
                2**32,
            ):
                values = [*usual[:column], list(usual[column]), *usual[column + 1 :]]
                values[column][row] = item
                agree([*before, pack(values), before[-1]])
        for wrong in (usual[column][:18], usual[column][:19], [*usual[column], usual[column][-1]]):
            values = [*usual[:column], wrong, *usual[column + 1 :]]
            assert agree([*before, pack(values), before[-1]])[-2] is None
    # Fewer rows than are known, said in a header only.
    data = pack(KINDS[kind](18, 5))
    for rows in (0, 16, 17):
        agree([*before, data[:21] + b"\xdc\0" + bytes([rows]) + data[24:]])
        agree([*before, data.replace(b"\xdc\0\x12", b"\xdc\0" + bytes([rows]))])


@pytest.mark.parametrize("rows", [16, 194, 195, 256, 0x1C2])
@pytest.mark.parametrize("joined", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_quick_way_is_taken(
    kind: str, joined: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the number of rows looks like a bool. Else it is not worth having."""
    before, values = series(kind, rows, joined, ended=True)
    left = KINDS[kind](rows + joined, 6)
    left[1:9] = [[column[0], *column[2:]] for column in left[1:9]]
    messages = [*before, pack(values), *([pack(left)] if len(left[1]) >= 16 else [])]
    check_quick(messages[:1], messages[1:], monkeypatch)


def test_the_quick_way_is_taken_again_after_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may count them anew."""
    anew = [pack(rows_of(20, step, prompt=[7 * row for row in range(20)])) for step in range(3)]
    check_quick([pack(rows_of(20, 0)), anew[0]], anew[1:], monkeypatch)


def check_quick(
    before: list[bytes], messages: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After those, these are read right, and neither plainly nor row by row."""
    expected = [outcome(read_batch, message) for message in messages]
    decoder = TokenSpeedDecoder()
    for message in before:
        decoder.decode([message])
    long_ways = (
        ("tszmq.wire.tokenspeed_decoder.read_batch", lambda _: pytest.fail("plainly")),
        (
            "tszmq.wire.tokenspeed_decoder.TokenSpeedDecoder._read_rows",
            lambda *_: pytest.fail("slowly"),
        ),
    )
    for name, fail in long_ways:
        monkeypatch.setattr(name, fail)
    for message, plain in zip(messages, expected, strict=True):
        assert outcome(lambda data: decoder.decode([data]), message) == plain


def test_columns_that_vary_are_decoded() -> None:
    messages = []
    for step in range(8):
        cached = [step % 3] * 130
        messages.append(pack(many(step, cached=cached, prompt=[step + row for row in range(130)])))
    assert None not in agree(messages)


def test_the_ids_of_logprobs_are_not_taken_for_granted() -> None:
    usual = scored(40)
    spoilt = []
    for row in (0, 20, 39):
        for item in ([], [1], [1, 2], [None], [True], 7, [2**32], [-1]):
            values = scored(40)
            values[8] = list(values[2])
            values[8][row] = item
            spoilt.append(values)
            values = scored(40)
            values[2] = values[8] = list(values[2])
            values[2][row] = item
            spoilt.append(values)
    short = [*usual[:8], usual[8][:-1], *usual[9:]]
    shorter = [*usual[:2], usual[2][:-1], *usual[3:8], usual[2][:-1], *usual[9:]]
    swapped = [*usual[:7], usual[8], usual[7], *usual[9:]]
    longer = [*usual[:9], usual[8], *usual[9:]]
    before = [*usual[:3], usual[8], *usual[4:]]
    for values in (*spoilt, short, shorter, swapped, longer, before):
        assert values != usual
        first, second, _ = agree([pack(usual), pack(usual), pack(values)])
        assert first is not None
        assert first == second
    with_text = scored(40)
    with_text[9] = pack(usual[8])  # as bytes of one value, where the index should be
    assert agree([pack(usual), pack(usual), pack(with_text)])[-1] is None


def test_ids_of_other_lengths_in_bytes_than_in_characters() -> None:
    """They are remembered as they are on the wire, also when some of them leave."""
    kinds = ["\u00e9", "", "\u00e9\u00e9", *["\u00e9"] * 17]
    rids = [kind + f"{row:030}"[len(kind) :] for row, kind in enumerate(kinds)]
    ended = ["", "stop", *[""] * 18]
    columns: dict[str, Any] = {
        "tokens": [[row] for row in range(20)],
        "prompt": [5] * 20,
        "completion": [5] * 20,
        "cached": [0] * 20,
        "logprobs": [[]] * 20,
        "logprob_ids": [[]] * 20,
    }
    first = large(rids=rids, reasons=ended, **columns)
    left = {name: column[1:] for name, column in columns.items()}
    second = large(rids=[rids[0], *rids[2:]], reasons=[""] * 19, **left)
    outcomes = agree([pack(first), pack(second), pack(second), pack(second)])
    assert None not in outcomes


@pytest.mark.parametrize("joins", [False, True])
def test_an_id_with_another_inside_leaves_nothing_of_itself(joins: bool) -> None:
    """One twice as long as the others on the wire, whose second half looks like one of them:
    when it has ended, a batch that lists that half is still no batch."""
    others = [f"{row:0128}" for row in range(20)]
    inner = pack("y" * 128)
    double = "x" * 127 + inner.decode()
    assert len(pack(double)) == 2 * len(pack(others[0])) == 2 * len(inner)

    def batch(rids: list[str], reasons: list[str] | None = None) -> bytes:
        rows = len(rids)
        return pack(rows_of(rows, 5, rids=rids, reasons=reasons or [""] * rows))

    at = 20 if joins else 1
    rids = [*others[:at], double, *others[at:]]
    ended = ["stop" if rid == double else "" for rid in rids]
    left = batch(others)
    end = left.index(pack(others[at - 1])) + len(inner)
    crafted = left[:end] + inner + left[end:]
    messages = [batch(others)] * joins + [batch(rids, ended), crafted, left]
    outcomes = agree(messages)
    assert [each is None for each in outcomes[-3:]] == [False, True, False]


def test_a_large_header_of_few_rows() -> None:
    few = {name: value[:15] for name, value in zip(
        ("rids", "tokens", "reasons", "prompt", "completion", "cached", "logprobs", "logprob_ids"),
        large()[1:9], strict=True)}  # fmt: skip
    messages = []
    for first in ("\u00e9123456789", "123456789"):
        data = pack(large(**{**few, "rids": [first, *few["rids"][1:]]}))
        messages.append(data[:21] + b"\xdc\x00\x0f" + data[22:])
    assert None not in agree(messages)


def test_a_message_that_ends_in_its_first_header_leaves_no_trace() -> None:
    zero_rows = SEEDS[0][:21] + b"\xdc\0\0" + b"\x90" * 4 + b"\xdc" * 3 + b"\1" + b"\0" * 4
    for cut in (22, 23):
        assert agree([SEEDS[0][:21] + b"\xdc\0"[: cut - 21], zero_rows]) == [None, None]
        decoder = TokenSpeedDecoder()
        with pytest.raises(DecodeError):
            decoder.decode([pack(large())[:cut]])
        batches = [decoder.decode([pack(many(step))]) for step in range(5)]
        assert batches[1].request_ids is batches[0].request_ids  # the quick way goes on


def test_empty_logprob_columns_of_any_width() -> None:
    values = large(tokens=[[]] * 16)
    data = pack(values)
    at = data.rindex(b"\xdc\x00\x10")
    assert None not in agree([data[:at] + b"\xdd\x00\x00\x00\x10" + data[at + 3 :]])


def test_a_bool_is_found_beside_logprobs_of_any_width() -> None:
    value = -(2.0**36)  # its eight bytes have more of the bytes of a bool than its four
    usual = scored(20)
    usual[7] = [[value]] * 20
    usual[4] = [5] * 20
    data = pack(usual)
    wide, narrow = b"\xcb" + struct.pack(">d", value), b"\xca" + struct.pack(">f", value)
    prompt = data.index(pack(usual[4])) + 3
    spoilt = data[:prompt] + b"\xc3" + data[prompt + 1 :]
    assert None not in agree([data, data.replace(wide, narrow)])
    for narrowed in range(4):
        assert agree([spoilt.replace(wide, narrow, narrowed)]) == [None]


@pytest.mark.parametrize("rows", [3, 20])
def test_a_bool_anywhere_beside_logprobs_is_found(rows: int) -> None:
    usual = scored_rows_of(rows, 1)
    assert agree([pack(usual)]) != [None]
    for element in (4, 5, 6):
        column = [*usual[element][:-1], True]
        assert agree([pack([*usual[:element], column, *usual[element + 1 :]])]) == [None]
    for element in range(9, 14):
        assert agree([pack([*usual[:element], True, *usual[element + 1 :]])]) == [None]


EMPTY = pack([[]] * 16) * 2


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_empty_columns_elsewhere_are_not_cut(tokens: int) -> None:
    def usual(**columns: Any) -> list[Any]:
        return large(**{"cached": [tokens] * 16, **columns})  # zeros are cut as well

    assert None not in agree([pack(usual())] * 3)
    for name in ("cached", "tail", "reasons"):
        nils: dict[str, Any] = {"logprobs": None, "logprob_ids": None}
        text: dict[str, Any] = {name: EMPTY}  # as bytes of one value
        rows: dict[str, Any] = {name: [[]] * 16}
        for columns in (nils, text, rows, {**nils, **text}, {**nils, **rows}):
            assert agree([pack(usual(**columns))] * 3) == [None] * 3
    assert agree([pack(usual()) + EMPTY, pack(usual())[:-4] + EMPTY]) == [None] * 2
    # Later elements may hold anything, that run included.
    assert None not in agree([pack([*usual(), EMPTY]), pack([*usual(), [[]] * 16, [[]] * 16])])


def test_nothing_in_a_message_passes_for_a_hole() -> None:
    hole = unpack(HOLE)  # not known to any engine; even so, only where columns may be cut
    for name in ("rids", "logprobs", "logprob_ids", "tail"):
        assert agree([pack(large()), pack(large()), pack(large(**{name: hole}))])[-1] is None
        assert agree([pack(large(cached=[3] * 16)), pack(large(**{name: hole}))])[-1] is None
    for name in ("rids", "tokens", "reasons", "prompt", "completion", "cached", "logprobs", "tail"):
        for item in (hole, [hole] * 130):
            assert agree([pack(many())] * 5 + [pack(many(0, **{name: item}))])[-1] is None


def test_a_bool_is_found_among_numbers_that_look_like_it() -> None:
    looks_like = [0xC2, 0xC3, 0xC2C3, 0xC3C20000, *[7] * 12]
    for bool_ in (True, False):
        for name in ("prompt", "completion", "cached"):
            column = [*looks_like[:-1], bool_]
            assert agree([pack(large(**{name: column, "rids": ["\u00c2"] * 16}))]) == [None]
            assert agree([pack(large(**{name: column}))]) == [None]
        tokens = [[item] for item in looks_like]
        assert None not in agree([pack(large(tokens=tokens))])
        assert agree([pack(large(tokens=[*tokens[:-1], [bool_]]))]) == [None]
        assert agree([pack(large(tail=bool_))]) == [None]


def test_wide_integers_are_the_integers_they_are() -> None:
    canonical = pack(large(cached=[0xC2] * 16))
    for header, width in ((0xCD, 2), (0xCE, 4), (0xCF, 8), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        data = canonical.replace(b"\xcc\xc2", bytes([header]) + (0xC2).to_bytes(width, "big"))
        assert data != canonical
        assert agree([data, canonical]) == agree([canonical, data])
        assert agree([data])[0] is not None
