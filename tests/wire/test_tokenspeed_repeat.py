"""Messages that repeat one another: read as any other, without being decoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.test_tokenspeed_differential import agree, mangled
from tszmq.codec import pack, unpack
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder
from tszmq.wire.tokenspeed_repeat import Repeat

ROWS = (1, 2, 15, 16, 17, 130)
STARTS = (0, 120, 250, 65530, 70000, 2**32 - 9)
"""Counts that are soon one byte longer, or never."""


def message(rows: int, step: int, base: list[int], scored: bool = False, **changes: Any) -> bytes:
    """One token each, of all widths; not the same ones in two steps."""
    tokens = [[(step * 7919 + row * 104729) % (300, 40000, 2**18)[row % 3]] for row in range(rows)]
    columns: dict[str, Any] = {
        "tag": "BatchTokenIDOutSlim",
        "rids": [f"request-number-{row:020}" for row in range(rows)],
        "tokens": tokens,
        "reasons": [""] * rows,
        "prompt": [row * 9 for row in range(rows)],
        "counts": [count + step for count in base],
        "cached": [row % 2 for row in range(rows)],
        "logprobs": [[-0.5 - token] for [token] in tokens] if scored else [[]] * rows,
        "ids": tokens if scored else [[]] * rows,
        "engine": 3,
        "running": rows,
        "waiting": step // 3,
        "active": 200 + step,
        "total": 4000,
    }
    return pack([*{**columns, **changes}.values()])


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look at a message that may be a repetition: whether it was one."""
    seen: list[bool] = []
    read = Repeat.read

    def spy(self: Repeat, data: bytes) -> Any:
        seen.append(False)
        batch = read(self, data)
        seen[-1] = batch is not None
        return batch

    monkeypatch.setattr(Repeat, "read", spy)
    return seen


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rows", ROWS)
def test_repetitions_are_read(repeated: list[bool], rows: int, start: int, scored: bool) -> None:
    assert None not in agree([message(rows, step, [start] * rows, scored) for step in range(9)])
    assert repeated == [True] * 7  # the first two are what the others repeat


@pytest.mark.parametrize("rows", ROWS)
def test_repetitions_of_rows_of_all_ages_are_read(repeated: list[bool], rows: int) -> None:
    ages = [STARTS[row % 5] + row for row in range(rows)]
    assert None not in agree([message(rows, step, ages) for step in range(9)])
    assert repeated == [True] * 7


def test_they_have_the_same_columns(repeated: list[bool]) -> None:
    """So that whoever applies them sees at once that nothing changed."""
    decoder = TokenSpeedDecoder()
    batches = [decoder.decode([message(3, step, [5] * 3)]) for step in range(9)]
    assert all(repeated)
    for batch in batches[3:]:
        assert batch.request_ids is batches[2].request_ids
        assert batch.one_each is not None
        assert batches[3].one_each is not None
        assert batch.one_each.counts is batches[3].one_each.counts


def test_two_engines_take_turns(repeated: list[bool]) -> None:
    mine, others = [[f"{engine}-{row:030}" for row in range(20)] for engine in "ab"]
    messages = []
    for step in range(9):
        messages.append(message(20, step, [7] * 20, rids=mine))
        messages.append(message(20, step * 2, [9] * 20, rids=others, engine=1))
    assert None not in agree(messages)
    assert repeated == [True] * 14


def test_a_lost_message_is_no_repetition_of_the_counts() -> None:
    """The one after it counts two more."""
    decoder = TokenSpeedDecoder()
    for step in (0, 1, 2, 3, 4, 6, 6, 5, 7, 8):
        batch = decoder.decode([message(2, step, [5, 9])])
        assert batch.rows_of_counts() == [5 + step, 9 + step]


@pytest.mark.parametrize(
    ("counts", "forged"),
    [
        ([0x7E], b"\x80"),  # 127 and one more in the same byte: an empty map
        ([0x7E, 5], b"\x80\x06"),
        ([0xFE, 0x90], b"\xcd\x00\xcc\x92"),  # 255 and one more: the next row's start is its value
        ([0xFFFE, 0x1234], b"\xce\x00\x00\xcd\x12\x36"),  # 52498 and 54
        ([0x03, 0x0403], b"\x04\xce\x04\x05"),  # two widths that look like one of two bytes
    ],
)
@pytest.mark.parametrize("warm", [3, 4])
def test_counts_that_need_another_width_are_not_foretold(
    counts: list[int], forged: bytes, warm: int
) -> None:
    """Bytes that come of adding without looking whether there is room."""
    rows = len(counts)
    base = [count - warm + 2 for count in counts]
    messages = [message(rows, step, base) for step in range(warm)]
    right = message(rows, warm, base)
    true = b"".join(pack(count + 2) for count in counts)
    assert right.count(true) == 1
    *_, expected = agree([*messages, right])
    assert expected is not None
    assert agree([*messages, right.replace(true, forged)])[-1] != expected


@pytest.mark.parametrize(
    ("odd", "following"),
    [
        (b"\xcd\x00\x05\x07", b"\xcd\x01\x05\x08"),  # of two bytes on average
        (b"\x05\xcc\x07", b"\x05\xcd\x08"),
        (b"\xcc\x05\xcc\x07", b"\xcc\x06\xcc\x08"),
    ],
)
def test_counts_may_be_written_wider_than_they_need(odd: bytes, following: bytes) -> None:
    def written(step: int, packed: bytes) -> bytes:
        usual = message(2, step, [0x50, 0x51])
        counts = pack(0x50 + step) + pack(0x51 + step)
        assert usual.count(counts) == 1
        return usual.replace(counts, packed)

    agree([*(message(2, step, [0x50, 0x51]) for step in range(3)), written(3, odd),
           written(4, following), written(5, odd)])  # fmt: skip


def test_no_more_is_remembered_than_is_of_use() -> None:
    decoder = TokenSpeedDecoder()
    for engine in range(200):
        for step in range(3):
            decoder.decode([message(2, step, [5, 5], rids=[f"{engine:030}", "other"])])
        assert len(decoder._repeats) <= 64
    assert decoder._repeats.popitem()[1] is not None


@pytest.mark.parametrize(("rows", "size"), [(3, 100_000), (15, 20_000), (16, 20_000), (9000, 40)])
def test_long_ids_are_not_remembered(rows: int, size: int) -> None:
    """Of 64 keys, one engine could make us keep a message each."""
    decoder = TokenSpeedDecoder()
    ids = [f"{row:0{size}}" for row in range(rows)]
    for step in range(4):
        assert decoder.decode([message(rows, step, [5] * rows, rids=ids)]).request_ids == ids
    assert not decoder._known
    assert not any(decoder._repeats.values())


def test_rows_that_join_are_not_remembered_without_end() -> None:
    decoder = TokenSpeedDecoder()
    for rows in (16, 8000, 16_000, 16_000, 16_000):
        decoder.decode([message(rows, 1, [5] * rows)])
    assert not decoder._known
    assert not any(decoder._repeats.values())


def test_remembered_rows_are_those_of_the_batch() -> None:
    """Not those of an earlier one that began with the same id."""
    few = ["a" * 28] + ["b" * 28] * 15
    rows = 10_001
    many = ["a" * 28] + [f"c{row:027}" for row in range(rows - 1)]
    messages = [message(16, 0, [300] * 16, rids=few)]
    messages += [message(rows, step, [300] * rows, rids=many) for step in range(3)]
    packed = pack(many)
    forged = messages[-1].replace(packed, packed[:3] + pack(few)[3:])
    prompts = pack([row * 9 for row in range(rows)])
    forged = forged.replace(prompts, prompts[:3] + pack([row * 9 for row in range(16)])[3:])
    assert len(forged) < len(messages[-1]) - rows * 28
    assert agree([*messages, forged])[-1] is None


def test_what_is_always_the_same_does_not_hide_in_the_counts() -> None:
    """Columns that stand where counts should go on, and the counts behind them."""
    counts = [300, 301, 302]
    messages = [message(3, step, counts) for step in range(5)]
    values = unpack(messages[4])
    rest = pack(values[6]) + pack(values[7]) + pack(values[8])
    data = message(3, 7, counts)
    at = data.index(rest)
    for moved in (3, 6, 9):
        swapped = data[: at - moved] + rest + data[at - moved : at] + data[at + len(rest) :]
        assert agree([*messages, swapped])[-1] is None


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("scored", [False, True])
def test_one_value_that_is_another(rows: int, scored: bool) -> None:
    names = ("rids", "tokens", "reasons", "prompt", "counts", "cached", "logprobs", "ids")
    for index, name in enumerate(names, start=1):
        for item in (None, True, False, 7, "x", [7], [], [True], 2**32, -1, 0.5, [0.5], [0xC2]):
            for row in {0, rows - 1}:
                usual = [message(rows, step, [5] * rows, scored) for step in range(4)]
                column = unpack(usual[3])[index]
                column[row] = item
                other = message(rows, 3, [5] * rows, scored, **{name: column})
                assert None not in agree([*usual, other, *usual])[:4]
    for name in ("engine", "running", "waiting", "active", "total"):
        for item in (None, True, False, -1, 2**32, 2**16, 0.5, "x", [], 0, 0xC2):
            usual = [message(rows, step, [5] * rows, scored) for step in range(4)]
            agree([*usual, message(rows, 4, [5] * rows, scored, **{name: item}), *usual])


@st.composite
def spoilt_repetitions(draw: st.DrawFn) -> list[bytes]:
    """Messages that repeat one another; after some, spoilt ones."""
    rows, start = draw(st.sampled_from(ROWS[:5])), draw(st.sampled_from(STARTS[:5]))
    scored = draw(st.booleans())
    steps = [message(rows, step, [start + draw(st.integers(0, 3))] * rows, scored)
             for step in range(3)] if draw(st.booleans()) else []  # fmt: skip
    steps += [
        message(rows, step, [start] * rows, scored) for step in range(draw(st.integers(3, 8)))
    ]
    following = message(rows, len(steps), [start] * rows, scored)
    return [*steps, draw(mangled(following)), following, draw(mangled(steps[-1])), steps[-1]]


@settings(max_examples=300)
@given(spoilt_repetitions())
def test_they_agree_on_spoilt_repetitions(messages: list[bytes]) -> None:
    agree(messages)
