"""TokenSpeed's output messages: the captured ones, and what is wrong with others."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import attrs
import pytest

from tests.wire.tokenspeed_vectors import frames, vector, vectors
from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire import tokenspeed_decoder
from tszmq.wire.base import EngineBatch
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder
from tszmq.wire.tokenspeed_output import read_batch

BATCHES = vectors("BatchTokenIDOutSlim")
LOAD = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")


def decode(data: bytes) -> EngineBatch:
    return TokenSpeedDecoder().decode([data])


def load_of(fields: dict[str, Any]) -> EngineLoad | None:
    running, waiting, active, total = (fields[name] for name in LOAD)
    if total == 0:
        return None
    return EngineLoad(running, waiting, active / total, max(running, waiting))


@pytest.mark.parametrize("vector", BATCHES, ids=lambda vector: vector["name"])
def test_captured_batches_are_read(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    elements = len(unpack(frames(vector)[0]))
    logprobs = fields["output_token_logprobs_val"]
    expected = EngineBatch(
        engine_index=fields["engine_index"] if elements >= 10 else None,
        request_ids=fields["rids"],
        token_ids=fields["output_ids"],
        finished={at: why for at, why in enumerate(fields["finished_reasons"]) if why},
        completion_tokens=fields["completion_tokens"],
        cached_tokens=fields["cached_tokens"],
        logprobs=logprobs if any(logprobs) else None,
        load=load_of(fields) if elements >= 14 else None,
    )
    assert columns_of(decode(frames(vector)[0])) == columns_of(expected)


def columns_of(batch: EngineBatch) -> dict[str, Any]:
    """All of it, less the form of it that is only there to be quick."""
    return {
        **attrs.asdict(batch),
        "token_ids": batch.rows_of_tokens(),
        "logprobs": batch.rows_of_logprobs(),
        "completion_tokens": batch.rows_of_counts(),
        "finished": dict(batch.finished),
        "one_each": None,
    }


def test_the_sentinel_is_no_batch() -> None:
    (sentinel,) = vectors("ENGINE_CORE_DEAD")
    with pytest.raises(DecodeError, match="16 bytes: 45 4e 47"):
        decode(*frames(sentinel))


# -- the parts of a batch -----------------------------------------------------------------


def batch(rows: int = 2, asked: bool = False, **columns: Any) -> list[Any]:
    """A valid batch, with logprobs if ``asked`` for; ``columns`` replaces elements by name."""
    tokens = [[10 + row, 20 + row] for row in range(rows)]
    values = {
        "tag": "BatchTokenIDOutSlim",
        "rids": [f"r{row}" for row in range(rows)],
        "tokens": tokens,
        "reasons": [""] * rows,
        "prompt": [3] * rows,
        "completion": [2] * rows,
        "cached": [0] * rows,
        "logprobs": [[-0.5, -1.5] if asked else [] for _ in range(rows)],
        "logprob_ids": tokens if asked else [[] for _ in range(rows)],
        "engine_index": 1,
        "running": 4,
        "waiting": 1,
        "active": 30,
        "total": 40,
    }
    assert set(columns) <= set(values)
    return list({**values, **columns}.values())


NAMES = ("tag", "rids", "tokens", "reasons", "prompt", "completion", "cached", "logprobs",
         "logprob_ids", "engine_index", "running", "waiting", "active", "total")  # fmt: skip


def replaced(values: list[Any], name: str, column: Any) -> list[Any]:
    position = NAMES.index(name)
    return [*values[:position], column, *values[position + 1 :]]


@pytest.fixture(params=[2, 16, 0xC2], ids=["small", "large", "header that looks like a bool"])
def rows(request: pytest.FixtureRequest) -> int:
    """Sizes that are decoded in different ways."""
    size: int = request.param
    return size


def test_the_valid_batch_is_read(rows: int) -> None:
    read = decode(pack(batch(rows)))
    assert read.request_ids == [f"r{row}" for row in range(rows)]
    assert read.load == EngineLoad(4, 1, 0.75, 4)
    assert not read.finished
    assert read.logprobs is None
    assert read.details is None


def test_no_frames_are_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="no frames"):
        TokenSpeedDecoder().decode([])


def test_frames_after_the_batch_are_not_looked_at() -> None:
    data = pack(batch())
    assert TokenSpeedDecoder().decode([data, b"\xc1"]).engine_index == 1
    with pytest.raises(DecodeError):
        TokenSpeedDecoder().decode([b"", data])


@pytest.mark.parametrize("later", [None, 1, "x", [], {"a": [1]}, True, 2.5, b"raw"])
def test_later_elements_are_skipped_whatever_they_are(rows: int, later: Any) -> None:
    read = decode(pack([*batch(rows), later]))
    assert columns_of(read) == columns_of(decode(pack(batch(rows))))


@pytest.mark.parametrize("elements", [11, 12, 13])
def test_a_load_that_is_not_whole_is_none(elements: int) -> None:
    read = decode(pack(batch()[:elements]))
    assert (read.engine_index, read.load) == (1, None)


def test_eras() -> None:
    assert decode(pack(batch()[:9])).engine_index is None
    assert decode(pack(batch()[:10])).engine_index == 1
    with pytest.raises(DecodeError, match="at least 9 elements, got 8"):
        decode(pack(batch()[:8]))


def test_no_pages_at_all_mean_no_load_yet(rows: int) -> None:
    assert decode(pack(batch(rows, total=0))).load is None


def test_usage_never_exceeds_one(rows: int) -> None:
    assert decode(pack(batch(rows, active=99, total=40))).load == EngineLoad(4, 1, 1.0, 4)


def test_more_waiting_than_running_counts_the_waiting(rows: int) -> None:
    load = decode(pack(batch(rows, running=1, waiting=7))).load
    assert load is not None
    assert load.num_requests == 7


def test_finished_rows_are_told_with_their_reasons(rows: int) -> None:
    reasons = ["stop", "a word of tomorrow", *[""] * (rows - 2)]
    assert decode(pack(batch(rows, reasons=reasons))).finished == {
        0: "stop",
        1: "a word of tomorrow",
    }


def test_a_row_may_have_no_tokens(rows: int) -> None:
    tokens = [[], [7], *[[]] * (rows - 2)]
    assert decode(pack(batch(rows, tokens=tokens))).rows_of_tokens() == tokens


def test_logprobs_of_some_rows(rows: int) -> None:
    some = [[], [-0.5, -2.0], *[[]] * (rows - 2)]
    ids = [[], [11, 21], *[[]] * (rows - 2)]
    assert decode(pack(batch(rows, logprobs=some, logprob_ids=ids))).logprobs == some


def test_logprobs_that_are_no_numbers_pass(rows: int) -> None:
    values = [[math.nan, -math.inf]] * rows
    read = decode(pack(batch(rows, logprobs=values, logprob_ids=[[1, 2]] * rows))).logprobs
    assert read is not None
    assert math.isnan(read[0][0])
    assert read[0][1] == -math.inf


def test_whole_logprobs_may_come_as_ints(rows: int) -> None:
    values = [[0, -1.5]] * rows
    read = decode(pack(batch(rows, logprobs=values, logprob_ids=[[1, 2]] * rows))).logprobs
    assert read == values
    assert read is not None
    assert set(map(type, chain.from_iterable(read))) == {float}


@pytest.mark.parametrize("value", [0, 0xC2, 0xC3, 0xC2C3, 0xC2C2C2C2, 2**32 - 1])
def test_counts_that_contain_the_bytes_of_a_bool(rows: int, value: int) -> None:
    column = [value] * rows
    read = decode(
        pack(batch(rows, tokens=[[value]] * rows, prompt=column, completion=column, cached=column))
    )
    assert read.rows_of_tokens() == [[value]] * rows
    assert (read.rows_of_counts(), read.cached_tokens) == (column,) * 2


def test_ids_may_hold_any_text(rows: int) -> None:
    ids = ["", "é\u00c2\u00c3", "x" * 194, "请求-🙂", *map(str, range(rows - 4))][:rows]
    assert decode(pack(batch(rows, rids=ids))).request_ids == ids


# -- what is wrong ------------------------------------------------------------------------

NO_COUNTS: list[Any] = [True, False, 1.0, -1, 2**32, 2**64 - 1, None, "1", b"1", [1], {}]


@pytest.mark.parametrize("wrong", NO_COUNTS)
@pytest.mark.parametrize("name", ["prompt", "completion", "cached"])
def test_counts_are_ints_in_32_bits(rows: int, name: str, wrong: Any) -> None:
    for column in ([wrong, *[0] * (rows - 1)], [*[0xC2] * (rows - 1), wrong]):
        with pytest.raises(DecodeError, match=f"{name}.*_tokens must"):
            decode(pack(replaced(batch(rows), name, column)))


@pytest.mark.parametrize("wrong", NO_COUNTS)
def test_tokens_are_ints_in_32_bits(rows: int, wrong: Any) -> None:
    for row in ([wrong], [5, wrong], [wrong, 0xC3C3]):
        with pytest.raises(DecodeError, match="output_ids must"):
            decode(pack(batch(rows, tokens=[[1, 2]] * (rows - 1) + [row])))


@pytest.mark.parametrize("wrong", NO_COUNTS)
@pytest.mark.parametrize("name", ["engine_index", "running", "waiting", "active", "total"])
def test_the_tail_is_of_ints_in_32_bits(rows: int, name: str, wrong: Any) -> None:
    with pytest.raises(DecodeError, match=f"{name}.* must be an int in"):
        decode(pack(replaced(batch(rows), name, wrong)))


def test_no_engine_has_an_index_of_three_bytes(rows: int) -> None:
    assert decode(pack(batch(rows, engine_index=65535))).engine_index == 65535
    with pytest.raises(DecodeError, match="65536"):
        decode(pack(batch(rows, engine_index=65536)))


@pytest.mark.parametrize("wrong", [None, 1, b"r", ["r"], True, {"r": 1}])
@pytest.mark.parametrize("name", ["rids", "reasons"])
def test_ids_and_reasons_are_texts(rows: int, name: str, wrong: Any) -> None:
    with pytest.raises(DecodeError, match="must hold str"):
        decode(pack(replaced(batch(rows), name, [""] * (rows - 1) + [wrong])))


@pytest.mark.parametrize("wrong", [None, 1, "ab", b"ab", {"a": 1}, {}, "", b""])
@pytest.mark.parametrize("name", ["tokens", "logprobs", "logprob_ids"])
def test_rows_are_arrays(rows: int, name: str, wrong: Any) -> None:
    valid = batch(rows, asked=True)
    column = valid[NAMES.index(name)]
    with pytest.raises(DecodeError, match="must hold list"):
        decode(pack(replaced(valid, name, [*column[:-1], wrong])))


@pytest.mark.parametrize("wrong", [None, 1, "ab", b"ab", {"a": 1, "b": 2}, {}, "", b"", True])
@pytest.mark.parametrize("name", NAMES[1:9])
@pytest.mark.parametrize("rows", [0, 1, 2, 16])
def test_columns_are_arrays(rows: int, name: str, wrong: Any) -> None:
    with pytest.raises(DecodeError, match="must be an array, got"):
        decode(pack(replaced(batch(rows), name, wrong)))


@pytest.mark.parametrize("name", NAMES[1:9])
@pytest.mark.parametrize("change", [-1, 1])
def test_columns_have_one_length(rows: int, name: str, change: int) -> None:
    column = batch(rows)[NAMES.index(name)]
    column = column[:-1] if change < 0 else [*column, column[-1]]
    with pytest.raises(DecodeError, match="as many rows as rids"):
        decode(pack(replaced(batch(rows), name, column)))


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ([-0.5] * 3, [10] * 3),  # more than tokens
        ([-0.5] * 2, [10]),
        ([-0.5] * 2, []),
        ([], [10, 20]),
    ],
)
def test_logprobs_match_the_tokens(rows: int, values: list[float], ids: list[int]) -> None:
    sent = batch(rows, logprobs=[[]] * (rows - 1) + [values], logprob_ids=[[]] * (rows - 1) + [ids])
    with pytest.raises(DecodeError, match="a logprob for every token at most"):
        decode(pack(sent))


@pytest.mark.parametrize("value", [-0.5, -1])
def test_a_logprob_that_a_prefill_engine_did_not_send_is_nan(rows: int, value: float) -> None:
    """A decode engine has none for the first token then, and sends the row all the same: what is
    missing is the asker's, the message everybody's."""
    others = [[]] * (rows - 1)
    sent = batch(rows, logprobs=[*others, [value]], logprob_ids=[*others, [10]])
    got = decode(pack(sent))
    assert got.token_ids == [[10, 20]] * rows or len(got.token_ids[-1]) == 2
    assert got.logprobs is not None
    assert [repr(number) for number in got.logprobs[-1]] == ["nan", repr(float(value))]
    assert got.logprobs[:-1] == others


@pytest.mark.parametrize("wrong", [True, None, "1", [1.0]])
def test_logprobs_are_floats(rows: int, wrong: Any) -> None:
    sent = batch(
        rows, logprobs=[[]] * (rows - 1) + [[-1, wrong]], logprob_ids=[[]] * (rows - 1) + [[1, 2]]
    )
    with pytest.raises(DecodeError, match="_val must hold float"):
        decode(pack(sent))


@pytest.mark.parametrize("wrong", [True, None, 1.0, -1])
def test_logprob_ids_are_token_ids(rows: int, wrong: Any) -> None:
    sent = batch(
        rows, logprobs=[[]] * (rows - 1) + [[-1.0, -2.0]],
        logprob_ids=[[]] * (rows - 1) + [[1, wrong]],
    )  # fmt: skip
    with pytest.raises(DecodeError, match="_idx must"):
        decode(pack(sent))


@pytest.mark.parametrize(
    "values", [[], None, 1, "BatchTokenIDOutSlim", {"tag": 1}, ["BatchTokenIDOut", *batch()[1:]],
               [b"BatchTokenIDOutSlim", *batch()[1:]], [[[]]]]
)  # fmt: skip
def test_another_tag_is_refused(values: Any) -> None:
    with pytest.raises(DecodeError, match="expected a BatchTokenIDOutSlim array, got"):
        decode(pack(values))


def test_bytes_after_the_array_are_refused(rows: int) -> None:
    for more in (b"\x00", b"\xc0", pack(batch(rows))):
        with pytest.raises(DecodeError, match="bytes follow"):
            decode(pack(batch(rows)) + more)


def test_every_truncation_is_refused() -> None:
    data = pack(batch(20))
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode(data[:length])


@pytest.mark.parametrize("rows", [2, 300])
def test_error_texts_are_bounded(rows: int) -> None:
    long = "x" * 100_000
    for values in (
        batch(rows, rids=[long] * (rows - 1) + [1]),
        batch(rows, tokens=[[2**40] * 1000] * rows),
        batch(rows, prompt=[long] * rows),
        batch(rows, logprobs=[[-1.0] * 1000] * rows),
        batch(rows, running=long),
        [long, *batch(rows)[1:]],
    ):
        with pytest.raises(DecodeError) as caught:
            decode(pack(values))
        assert len(str(caught.value)) < 400


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize("position", range(1, 14))
@pytest.mark.parametrize("rows", [1, 16])
def test_deep_nesting_anywhere_is_a_decode_error(position: int, rows: int) -> None:
    values = [pack(value) for value in batch(rows)]
    for depth in (500, 990, 1010, 5000):
        values[position] = nested(depth)
        with pytest.raises(DecodeError):
            decode(b"\x9e" + b"".join(values))
        # Both logprob columns at once: they must not be compared with one another.
        values[7] = values[8] = nested(depth)
        with pytest.raises(DecodeError):
            decode(b"\x9e" + b"".join(values))


# -- what is remembered from one message to the next --------------------------------------


def test_equal_ids_are_one_list() -> None:
    decoder = TokenSpeedDecoder()
    first, second, third = (decoder.decode([pack(batch(20))]) for _ in range(3))
    assert first.request_ids is second.request_ids is third.request_ids
    assert third.request_ids == [f"r{row}" for row in range(20)]


def test_other_ids_are_another_list() -> None:
    decoder = TokenSpeedDecoder()
    ids = [f"r{row}" for row in range(20)]
    other = [*ids[:-1], "new"]
    for changed in (ids, ids, ids, other, ids, other, other, ids[:-1], ids, ids, ["", *ids[1:]]):
        read = decoder.decode([pack(batch(len(changed), rids=changed))])
        assert read.request_ids == changed


def test_a_bad_message_leaves_no_trace() -> None:
    decoder = TokenSpeedDecoder()
    good = pack(batch(20))
    expected = attrs.asdict(decoder.decode([good]))
    wrong_ids = ["r0", 1, *[f"r{row}" for row in range(2, 20)]]
    for bad in (batch(20, rids=wrong_ids), batch(20, cached=[True] * 20), batch(20, running=-1)):
        for _ in range(3):
            with pytest.raises(DecodeError):
                decoder.decode([pack(bad)])
        for _ in range(3):
            assert attrs.asdict(decoder.decode([good])) == expected


def test_the_load_follows_every_message() -> None:
    decoder = TokenSpeedDecoder()
    for rows in (1, 20):
        for running in (4, 4, 5, 4):
            load = decoder.decode([pack(batch(rows, running=running))]).load
            assert load == EngineLoad(running, 1, 0.75, running)


def test_the_usual_batch_does_not_need_the_plain_way(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain_way(_: bytes) -> EngineBatch:
        raise AssertionError("a usual message was read the slow way")

    monkeypatch.setattr(tokenspeed_decoder, "read_batch", plain_way)
    decoder = TokenSpeedDecoder()
    usual: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"rids": [f"other{row}" for row in range(rows)]},
        {"reasons": ["stop"] * rows},
        {"tokens": [[0xC2, 0xC3C2, 7]] * rows},
        {"prompt": [0xC2] * rows, "total": 0xC3C3},
    )
    for columns in usual:
        assert len(decoder.decode([pack(batch(rows, **columns))]).rows_of_tokens()) == rows


def test_the_plain_way_reads_the_usual_batch_too(rows: int) -> None:
    data = pack(batch(rows))
    assert columns_of(read_batch(data)) == columns_of(decode(data))
    assert len(read_batch(*frames(vector("batch-256-requests"))).finished) == 16
