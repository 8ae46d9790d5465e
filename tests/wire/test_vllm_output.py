"""vLLM's output messages: the captured ones, and what is wrong with others."""

from __future__ import annotations

import math
import struct
from typing import Any

import ormsgpack
import pytest

from tests.wire.vllm_vectors import frames, vectors
from tszmq.codec import unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import EngineBatch, RowDetail, StartWave, UtilityResult, WaveComplete
from tszmq.wire.vllm import Vllm

REASONS = ("stop", "length", "abort", "error", "repetition")
NO_DETAIL = (None, None, None, None, None, None, None, False)


def decode(message: list[Any], *aux: bytes) -> EngineBatch:
    data = ormsgpack.packb(message, option=ormsgpack.OPT_NON_STR_KEYS)
    return Vllm().decoder().decode([data, *aux])


def detail(value: RowDetail) -> tuple[Any, ...]:
    return (
        value.stop_reason, value.top_logprobs, value.prompt_logprobs, value.cached_tokens,
        value.kv_transfer_params, value.error_code, value.error_message, value.retryable,
    )  # fmt: skip


# -- the captured messages ----------------------------------------------------------------


def rankings(arrays: dict[str, Any]) -> list[tuple[tuple[int, float], ...]]:
    ids, logprobs = arrays["logprob_token_ids"]["values"], arrays["logprobs"]["values"]
    return [tuple(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]


def expected_detail(row: dict[str, Any]) -> tuple[Any, ...]:
    sampled, prompt = row["new_logprobs"], row["new_prompt_logprobs_tensors"]
    wide = sampled is not None and sampled["logprobs"]["shape"][0] > 0
    error = row["error"] or {"code": None, "message": None, "retryable": False}
    cached = (row["prefill_stats"] or {"num_cached_tokens": 0})["num_cached_tokens"]
    return (
        row["stop_reason"],
        rankings(sampled) if wide and sampled["logprobs"]["shape"][1] > 1 else None,
        None if prompt is None else [None, *map(dict, rankings(prompt))],
        cached or None,
        row["kv_transfer_params"],
        error["code"],
        error["message"],
        error["retryable"],
    )


def expected_logprobs(rows: list[dict[str, Any]]) -> list[list[float]] | None:
    columns = [
        [] if row["new_logprobs"] is None
        else [values[0] for values in row["new_logprobs"]["logprobs"]["values"]]
        for row in rows
    ]  # fmt: skip
    return columns if any(columns) else None


def expected_load(stats: dict[str, Any] | None) -> EngineLoad | None:
    if stats is None:
        return None
    running, waiting, skipped = (
        stats[f"num_{kind}_reqs"] for kind in ("running", "waiting", "skipped_waiting")
    )
    return EngineLoad(running, waiting, stats["kv_cache_usage"], running + waiting + skipped)


UTILITIES = [vector for vector in vectors("EngineCoreOutputs") if "utility" in vector["name"]]
STEPS = [vector for vector in vectors("EngineCoreOutputs") if vector not in UTILITIES]


@pytest.mark.parametrize("vector", STEPS, ids=lambda vector: vector["name"])
def test_captured_steps_are_read(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    rows = fields["outputs"]
    batch = Vllm().decoder().decode(frames(vector))
    ids = [row["request_id"] for row in rows]
    ended = [row["request_id"] for row in rows if row["finish_reason"] is not None]
    without_row = sorted(set(fields["finished_requests"] or ()) - set(ended))
    assert batch.engine_index == fields["engine_index"]
    assert batch.request_ids[: len(ids)] == ids
    assert sorted(batch.request_ids[len(ids) :]) == without_row
    assert batch.token_ids == [row["new_token_ids"] for row in rows] + [[]] * len(without_row)
    reasons = [row["finish_reason"] for row in rows]
    assert batch.finished == {
        **{at: REASONS[why] for at, why in enumerate(reasons) if why is not None},
        **dict.fromkeys(range(len(rows), len(rows) + len(without_row)), "abort"),
    }
    assert batch.logprobs == expected_logprobs(rows)
    assert batch.load == expected_load(fields["scheduler_stats"])
    details = dict(enumerate(map(expected_detail, rows)))
    assert {at: detail(value) for at, value in (batch.details or {}).items()} == {
        at: value for at, value in details.items() if value != NO_DETAIL
    }
    assert (batch.completion_tokens, batch.cached_tokens) == (None, None)
    assert batch.weight_version == fields["weight_version"]
    assert list(batch.signals) == [
        kind(fields[name])
        for name, kind in (("wave_complete", WaveComplete), ("start_wave", StartWave))
        if fields[name] is not None
    ]


@pytest.mark.parametrize("vector", UTILITIES, ids=lambda vector: vector["name"])
def test_captured_answers_are_read(vector: dict[str, Any]) -> None:
    call_id, failure, result = unpack(frames(vector)[0])[4]
    batch = Vllm().decoder().decode(frames(vector))
    value = None if result is None else result[1]
    assert list(batch.signals) == [UtilityResult(call_id, failure, value)]
    assert batch.request_ids == []


def test_every_captured_output_is_one_of_these() -> None:
    assert (len(STEPS), len(UTILITIES)) == (29, 5)


def test_the_sentinel_is_no_message() -> None:
    (sentinel,) = vectors("ENGINE_CORE_DEAD")
    with pytest.raises(DecodeError, match="16 bytes: 45 4e 47"):
        Vllm().decoder().decode(frames(sentinel))


# -- the parts of a message ---------------------------------------------------------------


def row(request_id: Any = "r0", tokens: Any = (5,), **elements: Any) -> list[Any]:
    """An output of 19 elements; ``elements`` replaces some by name."""
    values = {
        "request_id": request_id,
        "new_token_ids": list(tokens) if type(tokens) is tuple else tokens,
        "new_logprobs": None,
        "prompt_logprobs": None,
        "pooling_output": None,
        "finish_reason": None,
        "stop_reason": None,
        "events": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "trace_headers": None,
        "prefill_stats": None,
        "routed_experts": None,
        "num_nans_in_logits": 0,
        "mm_cache_miss_hashes": None,
        "new_sampling_mask": None,
        "spec_decode_metrics": None,
        "prompt_token_id_logprobs": None,
        "error": None,
    }
    assert set(elements) <= set(values)
    return list({**values, **elements}.values())


def message(*rows: Any, **elements: Any) -> list[Any]:
    """A message of 9 elements."""
    values = {
        "engine_index": 1,
        "outputs": list(rows),
        "scheduler_stats": None,
        "timestamp": 1.5,
        "utility_output": None,
        "finished_requests": None,
        "wave_complete": None,
        "start_wave": None,
        "weight_version": "default",
    }
    assert set(elements) <= set(values)
    return list({**values, **elements}.values())


def test_the_usual_message() -> None:
    batch = decode(message(row("a", (1,)), row("b", (2, 3)), row("c", ())))
    assert (batch.engine_index, batch.request_ids) == (1, ["a", "b", "c"])
    assert batch.token_ids == [[1], [2, 3], []]
    assert not batch.finished
    assert (batch.logprobs, batch.load, batch.details, batch.signals) == (None, None, None, ())


def test_no_frames_are_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="no frames"):
        Vllm().decoder().decode([])


@pytest.mark.parametrize("elements", [2, 3, 8, 9])
def test_messages_of_other_releases(elements: int) -> None:
    assert decode(message(row())[:elements]).request_ids == ["r0"]
    assert decode([*message(row()), "later", {1: 2}]).request_ids == ["r0"]


@pytest.mark.parametrize("elements", [2, 6, 14, 18])
def test_outputs_of_other_releases(elements: int) -> None:
    short = row("short", (7,), finish_reason=1)[:elements]
    batch = decode(message(row(), short, [*row("long"), "later", None]))
    assert batch.request_ids == ["r0", "short", "long"]
    assert batch.finished == ({1: "length"} if elements >= 6 else {})


def test_an_empty_message_is_not_read() -> None:
    for short in ([], [1]):
        with pytest.raises(DecodeError, match="EngineCoreOutputs"):
            decode(short)


def test_transfer_params_are_of_their_row() -> None:
    """Whatever the connector says."""
    given = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": None}
    batch = decode(message(row("a"), row("b", kv_transfer_params=given), weight_version=None))
    assert batch.details is not None
    assert {at: value.kv_transfer_params for at, value in batch.details.items()} == {1: given}
    assert batch.weight_version is None


@pytest.mark.parametrize("code", [5, 99, -1, 2**40])
def test_unknown_ends_are_ends(code: int) -> None:
    batch = decode(message(row(finish_reason=code)))
    assert batch.finished == {0: f"unknown({code})"}


def test_pickles_are_not_read_and_do_no_harm() -> None:
    """Of an engine with VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
    pickled = ormsgpack.Ext(1, b"cos\nsystem\n")
    batch = decode(message(row(kv_transfer_params={"a": [pickled]}, stop_reason=1)))
    assert batch.details is not None
    assert detail(batch.details[0]) == (1, *NO_DETAIL[1:])
    for value in (pickled, [{"deep": pickled}], {"a": [pickled]}):
        (answer,) = decode(message(utility_output=[7, None, [["m", "T"], value]])).signals
        assert isinstance(answer, UtilityResult)
        assert (answer.call_id, answer.value) == (7, None)
        assert "pickled" in str(answer.failure)


def test_results_of_any_plain_kind() -> None:
    for value in (None, 5, "x", [1], {"a": {7: [b"raw"]}}, math.inf):
        (answer,) = decode(message(utility_output=[2**64 - 1, None, [None, value]])).signals
        assert answer == UtilityResult(2**64 - 1, None, value)
    raw = ["<f4", [1], ormsgpack.Ext(3, b"\0\0\0\0")]
    (answer,) = decode(message(utility_output=[1, None, [None, raw]])).signals
    assert answer == UtilityResult(1, None, ["<f4", [1], b"\0\0\0\0"])


# -- load ---------------------------------------------------------------------------------


def load(**stats: Any) -> EngineLoad | None:
    return decode(message(scheduler_stats=stats)).load


def test_load() -> None:
    assert load(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5) == EngineLoad(
        3, 2, 0.5, 5
    )
    assert load() == EngineLoad(0, 0, 0.0, 0)
    assert load(num_waiting_reqs=2, num_skipped_waiting_reqs=4) == EngineLoad(0, 2, 0.0, 6)
    assert load(kv_cache_usage=1) == EngineLoad(0, 0, 1.0, 0)
    assert load(kv_cache_usage=1.25) == EngineLoad(0, 0, 1.0, 0)


def test_no_statistics_are_no_load() -> None:
    assert decode(message(row())).load is None


# -- logprobs -----------------------------------------------------------------------------


def array(dtype: str, shape: list[int], *values: float) -> list[Any]:
    letter = {"<i4": "i", "<f4": "f", "<i8": "q", "float32": "f", "int32": "i"}[dtype]
    raw = struct.pack(f"<{len(values)}{letter}", *values)
    return [dtype, shape, ormsgpack.Ext(3, raw)]


def logprobs(ids: list[int], values: list[float], width: int = 1) -> list[Any]:
    rows = len(values) // width
    shape = [rows, width]
    ranks = array("<i8", [rows], *[1] * rows)
    return [array("<i4", shape, *ids), array("<f4", shape, *values), ranks, None]


def test_logprobs_stand_beside_their_tokens() -> None:
    batch = decode(
        message(
            row("a", (1,), new_logprobs=logprobs([1], [-0.5])),
            row("b", (2,)),
            row("c", (3, 4), new_logprobs=logprobs([3, 4], [-1.5, -2.5])),
        )
    )
    assert batch.logprobs == [[-0.5], [], [-1.5, -2.5]]
    assert batch.details is None


def test_rankings_are_read_with_them() -> None:
    both = logprobs([3, 9, 4, 3], [-1.5, -0.5, -2.5, -0.25], width=2)
    batch = decode(message(row("a", (3, 4), new_logprobs=both), row("b", (2,))))
    assert batch.logprobs == [[-1.5, -2.5], []]
    assert batch.details is not None
    assert batch.details.keys() == {0}
    assert batch.details[0].top_logprobs == [((3, -1.5), (9, -0.5)), ((4, -2.5), (3, -0.25))]


def test_rows_of_one_message_may_differ_in_width() -> None:
    batch = decode(
        message(
            row("a", (3,), new_logprobs=logprobs([3, 9], [-1.5, -0.5], width=2)),
            row("b", (2,), new_logprobs=logprobs([2], [-0.25])),
            row("c", (), new_logprobs=logprobs([], [], width=3)),
        )
    )
    assert batch.logprobs == [[-1.5], [-0.25], []]
    assert batch.details is not None
    assert batch.details.keys() == {0}


def test_numbers_that_are_none_are_passed_on() -> None:
    values = [math.nan, -math.inf, math.inf]
    batch = decode(message(row("a", (1, 2, 3), new_logprobs=logprobs([1, 2, 3], values))))
    assert repr(batch.logprobs) == "[[nan, -inf, inf]]"


def test_logprobs_of_no_token_are_none() -> None:
    batch = decode(message(row("a", (), finish_reason=2, new_logprobs=logprobs([], [], 2))))
    assert (batch.logprobs, batch.details) == (None, None)


@pytest.mark.parametrize("tail", [[None], [None, None], []])
def test_prompt_logprobs(tail: list[Any]) -> None:
    """Of five elements since 0.33, of four before."""
    tables = [array("int32", [2, 1], 8, 9), array("float32", [2, 1], -0.5, -0.25)]
    ranks = ["int64", [2], ormsgpack.Ext(3, bytes(16))]
    batch = decode(message(row(prompt_logprobs=[*tables, ranks, *tail])))
    assert batch.details is not None
    assert batch.details[0].prompt_logprobs == [None, {8: -0.5}, {9: -0.25}]
    assert batch.logprobs is None


def test_arrays_in_frames_of_their_own() -> None:
    wide = [["<i4", [1, 2], 2], ["<f4", [1, 2], 1], ["<i8", [1], 3], None]
    data = [struct.pack("<2f", -0.5, -1.5), struct.pack("<2i", 5, 6), bytes(8)]
    batch = decode(message(row(new_logprobs=wide)), *data)
    assert batch.logprobs == [[-0.5]]
    assert batch.details is not None
    assert batch.details[0].top_logprobs == [((5, -0.5), (6, -1.5))]


# -- requests that are finished -----------------------------------------------------------


def test_finished_requests_with_their_rows_are_not_ended_twice() -> None:
    batch = decode(message(row(finish_reason=0), finished_requests=["r0"]))
    assert (batch.request_ids, batch.finished) == (["r0"], {0: "stop"})


def test_finished_requests_without_a_row_are_aborted() -> None:
    ended = row("b", (), finish_reason=3, new_logprobs=logprobs([], []))
    scored = row("a", (1,), new_logprobs=logprobs([1], [-0.5]))
    batch = decode(message(scored, ended, finished_requests=["x", "b", "x", "a"]))
    assert batch.request_ids == ["a", "b", "x", "a"]
    assert batch.token_ids == [[1], [], [], []]
    assert batch.finished == {1: "error", 2: "abort", 3: "abort"}
    assert batch.logprobs == [[-0.5], [], [], []]


# -- what is wrong ------------------------------------------------------------------------

BAD_ROWS: list[tuple[Any, str]] = [
    (5, "an output must be an array"),
    ({0: "r", 1: []}, "an output must be an array"),
    ([], "an output must be an array"),
    (["r"], "an output must be an array"),
    ("x" * 19, "an output must be an array"),
    (row(5), "request_id must be text"),
    (row(None), "request_id must be text"),
    (row(b"r"), "request_id must be text"),
    (row(tokens=None), "new_token_ids must be an array"),
    (row(tokens="ab"), "new_token_ids must be an array"),
    (row(tokens={1: 2}), "new_token_ids must be an array"),
    (row(tokens=[True]), "new_token_ids must hold ints, got True"),
    (row(tokens=[1.0]), "new_token_ids must hold ints, got 1.0"),
    (row(tokens=[[1]]), "new_token_ids must hold ints"),
    (row(tokens=[None]), "new_token_ids must hold ints"),
    (row(finish_reason="stop"), "finish_reason must be an int"),
    (row(finish_reason=True), "finish_reason must be an int"),
    (row(finish_reason=[0]), "finish_reason must be an int"),
    (row(stop_reason=1.5), "stop_reason must be"),
    (row(stop_reason=[1]), "stop_reason must be"),
    (row(prefill_stats=[1]), "prefill_stats must be a map"),
    (row(prefill_stats={"num_cached_tokens": -1}), "num_cached_tokens"),
    (row(prefill_stats={"num_cached_tokens": True}), "num_cached_tokens"),
    (row(kv_transfer_params=[1]), "kv_transfer_params must be a map"),
    (row(kv_transfer_params={1: 2}), "kv_transfer_params must be a map"),
    (row(error="bad"), "error must be a map"),
    (row(error={}), "error must have a code"),
    (row(error={"code": "c", "message": 5}), "error must have a code"),
    (row(error={"code": "c", "message": "m", "retryable": 1}), "error must have a code"),
    (row(new_logprobs=5), "new_logprobs must be an array"),
    (row(new_logprobs=[]), "new_logprobs must be an array"),
    (row(new_logprobs=logprobs([1], [-0.5])[:2]), "new_logprobs must be an array"),
    (row(new_logprobs=logprobs([1, 2], [-0.5, -0.5])), "2 rows for 1 tokens"),
    (row(tokens=[], new_logprobs=logprobs([1], [-0.5])), "1 rows for 0 tokens"),
    (row(new_logprobs=[array("<f4", [1, 1], 1), array("<f4", [1, 1], 1), None]), "integers and"),
    (row(new_logprobs=[array("<i4", [1, 1], 1), array("<i4", [1, 1], 1), None]), "integers and"),
    (row(new_logprobs=[array("<i4", [1, 1], 1), array("<f4", [1], 1), None]), "two tables"),
    (row(new_logprobs=[array("<i4", [1], 1), array("<f4", [1], 1), None]), "two tables"),
    (row(new_logprobs=[array("<i4", [2**40, 0]), array("<f4", [2**40, 0]), None]), "two tables"),
    (row(prompt_logprobs=[array("int32", [2**40, 0]), array("float32", [2**40, 0]), None]),
     "two tables"),
    (row(prompt_logprobs="ab"), "new_prompt_logprobs_tensors must be an array"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "expected"), BAD_ROWS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("others", [0, 1])
def test_bad_outputs(bad: Any, expected: str, others: int) -> None:
    with pytest.raises(DecodeError, match=expected):
        decode(message(*[row()] * others, bad))


BAD_MESSAGES: list[tuple[Any, str]] = [
    ({"a": 1}, "EngineCoreOutputs"),
    ("text", "EngineCoreOutputs"),
    ([1, None], "EngineCoreOutputs"),
    ([1, {}], "EngineCoreOutputs"),
    (message(engine_index=None), "engine_index"),
    (message(engine_index=True), "engine_index"),
    (message(engine_index=-1), "engine_index"),
    (message(engine_index=65536), "engine_index"),
    (message(scheduler_stats=[1]), "scheduler_stats must be a map"),
    (message(scheduler_stats={"num_running_reqs": -1}), "num_running_reqs"),
    (message(scheduler_stats={"num_waiting_reqs": True}), "num_waiting_reqs"),
    (message(scheduler_stats={"num_skipped_waiting_reqs": 2**32}), "num_skipped"),
    (message(scheduler_stats={"kv_cache_usage": math.nan}), "kv_cache_usage"),
    (message(scheduler_stats={"kv_cache_usage": math.inf}), "kv_cache_usage"),
    (message(scheduler_stats={"kv_cache_usage": -0.5}), "kv_cache_usage"),
    (message(scheduler_stats={"kv_cache_usage": True}), "kv_cache_usage"),
    (message(scheduler_stats={"kv_cache_usage": "0.5"}), "kv_cache_usage"),
    (message(finished_requests="r0"), "finished_requests"),
    (message(finished_requests=[1]), "finished_requests"),
    (message(finished_requests=[["r0"]]), "finished_requests"),
    (message(wave_complete=-1), "wave_complete"),
    (message(wave_complete=True), "wave_complete"),
    (message(wave_complete=2**62), "wave_complete"),
    (message(start_wave=2**63), "start_wave"),
    (message(start_wave="5"), "start_wave"),
    (message(utility_output=[1, None]), "utility_output"),
    (message(utility_output={"call_id": 1}), "utility_output"),
    (message(utility_output=["1", None, None]), "call_id"),
    (message(utility_output=[True, None, None]), "call_id"),
    (message(utility_output=[1, 5, None]), "failure"),
    (message(utility_output=[1, None, 5]), "result"),
    (message(utility_output=[1, None, [None]]), "result"),
    (message(weight_version=1), "weight_version"),
    (message(weight_version="v" * 1001), "weight_version"),
]


@pytest.mark.parametrize(("bad", "expected"), BAD_MESSAGES, ids=lambda value: str(value)[:40])
def test_bad_messages(bad: Any, expected: str) -> None:
    with pytest.raises(DecodeError, match=expected):
        decode(bad)


def test_error_texts_are_short_however_large_the_message() -> None:
    for bad in (message(row("x" * 10**6, 5)), message(row(stop_reason=[["y" * 10**6]] * 1000))):
        with pytest.raises(DecodeError) as caught:
            decode(bad)
        assert len(str(caught.value)) < 400
