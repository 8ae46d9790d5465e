from __future__ import annotations

import array
import copy
import enum
import inspect
import json
import math
import pickle
import types
from collections import deque
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tszmq.types
from tszmq import Client
from tszmq.errors import InvalidRequest
from tszmq.types import (
    MAX_TOKEN_ID,
    Completion,
    Endpoints,
    EngineHealth,
    EngineInfo,
    EngineLoad,
    SamplingParams,
    TokenChunk,
    token_id_list,
)

HUGE = 10**400  # neither a float nor 64 bits
UNPRINTABLE = 10**5000  # str() refuses it


class Colour(enum.IntEnum):
    RED = 3


# --- values ----------------------------------------------------------------------------------

VALUES = [
    SamplingParams(),
    SamplingParams(
        max_tokens=None,
        stop_token_ids=[1, 2],
        logit_bias={5: -1.5},
        json_schema={"type": "object"},
        extra={"custom": [1, {"a": b"b"}]},
    ),
    TokenChunk("label", [1, 2], "stop", [-0.5, -1.0], 3, 2, 1, [{1: -0.5}, {2: -1.0}]),
    TokenChunk(None, [1], None, None, 3, 1, 0),
    Completion("label", [1], "length", None, 3, 1, 0, 1, 0.0, 0.1, 0.2, 7, None, [None, {1: -1.0}]),
    EngineLoad(3, 2, 0.25, 4),
    EngineInfo(1, True, 4096, 100, 16, "bfloat16", "1.0", registration={"extra": [1]}),
    EngineHealth(1, True, 3, 0.5, None),
    Endpoints("tcp://127.0.0.1:30500", output="ipc:///run/out.sock"),
]


def test_every_public_value_type_has_an_example() -> None:
    classes = {type(value).__name__ for value in VALUES}
    others = {"MAX_TOKEN_ID", "TokenIds"}
    assert classes == {name for name in tszmq.types.__all__ if name[0].isupper()} - others


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_copies_are_equal(value) -> None:
    copies = [copy.copy(value), copy.deepcopy(value), attrs.evolve(value)]
    copies += [
        pickle.loads(pickle.dumps(value, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    ]
    for twin in copies:
        assert type(twin) is type(value)
        assert twin == value


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen(value) -> None:
    name = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises(AttributeError):
        value.misspelt = 1


def test_idle_load_keeps_the_cache_usage_only() -> None:
    assert EngineLoad(3, 2, 0.25, 4).idle() == EngineLoad(0, 0, 0.25, 0)


def made(**fields: Any) -> SamplingParams:
    """Parameters from arguments that a type checker need not like."""
    return SamplingParams(**fields)


# --- SamplingParams --------------------------------------------------------------------------

NOT_INTS: list[Any] = [True, False, 1.0, "1", b"1", [1], {}, math.nan, np.float64(1), np.True_]
NOT_NUMBERS: list[Any] = [None, True, False, "1", b"1", [1.0], 1j, np.True_]
NOT_BOOLS: list[Any] = [None, 0, 1, "True", 1.0, []]
INT_FIELDS = {
    "max_tokens": 1,
    "top_k": -1,
    "min_tokens": 0,
    "seed": 0,
    "top_logprobs": 0,
    "prompt_logprobs": 0,
}
OPTIONAL_INTS = {"max_tokens", "seed", "prompt_logprobs"}
# name: accepted, refused
FLOAT_FIELDS: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 0.0, 1, 100.0], [-0.1, -1]),
    "top_p": ([0.1, 1, 1.0], [0, 0.0, -0.1, 1.1]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1]),
    "frequency_penalty": ([-2, 0, 2.0], [-2.1, 2.1]),
    "presence_penalty": ([-2, 0, 2.0], [-2.1, 2.1]),
    "repetition_penalty": ([0.1, 1, 2], [0, -1, 2.1]),
}
BOOL_FIELDS = ["ignore_eos", "logprobs"]
TEXT_FIELDS = ["json_schema", "regex", "ebnf", "structural_tag"]


def test_every_field_is_in_a_table_here() -> None:
    tested = {*INT_FIELDS, *FLOAT_FIELDS, *BOOL_FIELDS, *TEXT_FIELDS}
    assert {field.name for field in attrs.fields(SamplingParams)} == tested | {
        "stop_token_ids",
        "logit_bias",
        "extra",
    }


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, -1)
    assert (params.min_p, params.min_tokens, params.seed) == (0.0, 0, None)
    assert (params.frequency_penalty, params.presence_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.logprobs, params.ignore_eos, params.stop_token_ids) == (False, False, ())


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        SamplingParams(n=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", INT_FIELDS)
@pytest.mark.parametrize("value", NOT_INTS, ids=repr)
def test_int_fields_refuse_other_types(name, value) -> None:
    with pytest.raises(TypeError, match=name):
        made(**{name: value})


@pytest.mark.parametrize("name", INT_FIELDS)
def test_int_fields_have_limits(name) -> None:
    low = INT_FIELDS[name]
    for value in (low - 1, -5, 2**63, 2**64, HUGE, UNPRINTABLE):
        with pytest.raises(InvalidRequest, match=name):
            made(**{name: value})
    assert getattr(made(**{name: low}), name) == low


@pytest.mark.parametrize("name", INT_FIELDS)
def test_int_fields_become_plain_ints(name) -> None:
    for value in (np.int64(3), np.uint8(3), Colour.RED, np.array(3)):
        kept = getattr(made(**{name: value}), name)
        assert (type(kept), kept) == (int, 3)


@pytest.mark.parametrize("name", INT_FIELDS)
def test_none_is_for_optional_fields(name) -> None:
    if name in OPTIONAL_INTS:
        assert getattr(made(**{name: None}), name) is None
    else:
        with pytest.raises(TypeError, match=name):
            made(**{name: None})


def test_top_k_zero_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="top_k"):
        SamplingParams(top_k=0)


def test_seed_is_63_bits() -> None:
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(InvalidRequest, match="seed"):
        SamplingParams(seed=2**63)


@pytest.mark.parametrize("name", FLOAT_FIELDS)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_float_fields_refuse_other_types(name, value) -> None:
    with pytest.raises(TypeError, match=name):
        made(**{name: value})


@pytest.mark.parametrize("name", FLOAT_FIELDS)
def test_float_fields_have_limits(name) -> None:
    good, bad = FLOAT_FIELDS[name]
    for value in good:
        kept = getattr(made(**{name: value}), name)
        assert (type(kept), kept) == (float, value)
    for value in [*bad, math.nan, math.inf, -math.inf, HUGE, -HUGE, UNPRINTABLE, np.float32("nan")]:
        with pytest.raises(InvalidRequest, match=name):
            made(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("temperature", math.inf, "must be finite and at least 0.0, got inf"),
        ("temperature", -1.0, "must be finite and at least 0.0, got -1.0"),
        ("top_p", math.nan, "must be in (0.0, 1.0], got nan"),
        ("min_p", 2.0, "must be in [0.0, 1.0], got 2.0"),
    ],
)
def test_limits_are_said_as_they_are(name, value, text) -> None:
    """Infinity is within no interval, so that none is said to end there."""
    with pytest.raises(InvalidRequest) as caught:
        made(**{name: value})
    assert str(caught.value) == f"{name} {text}"


@pytest.mark.parametrize("name", FLOAT_FIELDS)
def test_float_fields_become_plain_floats(name) -> None:
    for value in (np.float64(0.5), np.float32(0.5), np.array(0.5)):
        kept = getattr(made(**{name: value}), name)
        assert (type(kept), kept) == (float, 0.5)


@pytest.mark.parametrize("name", BOOL_FIELDS)
def test_bool_fields(name) -> None:
    for value in NOT_BOOLS:
        with pytest.raises(TypeError, match=name):
            made(**{name: value})
    for value in (True, np.True_):
        assert getattr(made(**{name: value}), name) is True


@pytest.mark.parametrize("name", TEXT_FIELDS)
def test_text_fields(name) -> None:
    for value in (1, b"bytes", ["a"], True):
        with pytest.raises(TypeError, match=name):
            made(**{name: value})
    with pytest.raises(InvalidRequest, match=name):
        made(**{name: "lone surrogate \ud800"})
    assert getattr(made(**{name: "\u00e9\U0001f600"}), name) == "\u00e9\U0001f600"


def test_one_grammar_at_most() -> None:
    for first in TEXT_FIELDS:
        for second in TEXT_FIELDS:
            if first < second:
                with pytest.raises(InvalidRequest, match=f"{first}.*{second}|{second}.*{first}"):
                    made(**{first: "a", second: "b"})


def test_json_schema_may_be_a_mapping() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema_given in (schema, types.MappingProxyType(schema)):
        assert json.loads(SamplingParams(json_schema=schema_given).json_schema or "") == schema
    endless: dict[str, Any] = {}
    endless["self"] = endless
    for bad in (endless, {"minimum": math.nan}):
        with pytest.raises(InvalidRequest, match="json_schema"):
            SamplingParams(json_schema=bad)
    for wrong in ({"a": object()}, {1: object()}, {(1, 2): 3}):
        with pytest.raises(TypeError, match=r"^json_schema cannot be written as JSON: "):
            made(json_schema=wrong)


def test_min_tokens_within_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=500, max_tokens=None)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    "value", [[2, 1], (2, 1), deque([2, 1]), np.array([2, 1]), array.array("i", [2, 1])], ids=repr
)
def test_stop_token_ids_become_a_tuple(value) -> None:
    kept = SamplingParams(stop_token_ids=value).stop_token_ids
    assert kept == (2, 1)
    assert set(map(type, kept)) == {int}


def test_stop_token_ids_none_and_sets() -> None:
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    assert SamplingParams(stop_token_ids={2, 1}).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    "value", [5, "12", b"12", [True], [1.0], ["1"], [[1]], {1: 2}, np.array(5), [None]], ids=repr
)
def test_stop_token_ids_refuse_other_types(value) -> None:
    with pytest.raises(TypeError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize("token", [-1, 2**31, HUGE])
def test_token_fields_have_limits(token) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[token])
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={token: 1.0})


def test_logit_bias_becomes_plain() -> None:
    bias = SamplingParams(logit_bias={np.int64(5): np.float32(0.5), 6: 1}).logit_bias
    assert bias == {5: 0.5, 6: 1.0}
    assert [(type(key), type(value)) for key, value in bias.items()] == [(int, float)] * 2


@pytest.mark.parametrize(
    "value", [[1], "a", 1, {"1": 1.0}, {True: 1.0}, {1.0: 1.0}, {1: "2"}, {1: None}, {1: True}]
)
def test_logit_bias_refuses_other_types(value) -> None:
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias=value)


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, HUGE])
def test_logit_bias_is_finite(bias) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={1: bias})


def test_extra_is_a_copy_with_text_keys() -> None:
    given = {"a": 1}
    params = SamplingParams(extra=given)
    given["b"] = 2
    assert params.extra == {"a": 1}
    assert SamplingParams(extra=None).extra == {}
    for bad in ([1], "a", {1: 2}):
        with pytest.raises(TypeError, match="extra"):
            made(extra=bad)


def test_type_checkers_see_the_types() -> None:
    """The converters must not widen the arguments to object."""
    parameters = inspect.signature(SamplingParams).parameters
    for name in (*INT_FIELDS, *FLOAT_FIELDS, *BOOL_FIELDS):
        assert parameters[name].annotation not in ("object", "Any", inspect.Parameter.empty), name


# --- token ids -------------------------------------------------------------------------------


class FakeTensor:
    """A torch tensor, as far as this package may know it."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


class FakeScalar:
    """A zero-dimensional tensor, as iterating a tensor gives them."""

    ndim = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value

    def __len__(self) -> int:
        raise TypeError("len() of a 0-d tensor")

    def __index__(self) -> int:
        return int(self.value)


INT_DTYPES = [np.dtype(code) for code in "bhilqBHILQ"] + [np.dtype(">i4"), np.dtype(">u8")]


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        deque([1, 2, 3]),
        *(array.array(code, [1, 2, 3]) for code in "bBhHiIlLqQ"),
        *(np.array([1, 2, 3], dtype) for dtype in INT_DTYPES),
        np.array([1, 2, 3], object),
        np.arange(1, 7)[:3:],
        np.array([3, 2, 1])[::-1],
        [np.int64(1), np.uint8(2), 3],
        [Colour.RED - 2, 2, Colour.RED],
        FakeTensor([1, 2, 3]),
        [FakeScalar(1), FakeScalar(2), FakeScalar(3)],
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', getattr(ids, 'typecode', ''))}",
)
def test_array_likes_become_plain_lists(ids) -> None:
    tokens = token_id_list(ids)
    assert tokens == [1, 2, 3]
    assert type(tokens) is list
    assert set(map(type, tokens)) == {int}


def test_the_list_is_fresh() -> None:
    ids = [1, 2, 3]
    tokens = token_id_list(ids)
    ids.append(4)
    assert tokens == [1, 2, 3]


@pytest.mark.parametrize(
    "ids",
    [
        None,
        1,
        1.5,
        "123",
        "",
        b"123",
        bytearray(b"123"),
        memoryview(b"123"),
        {1: 2},
        {1, 2},
        frozenset({1}),
        {1: 2}.keys(),
        (token for token in [1, 2]),
        iter([1, 2]),
        map(int, "12"),
        list,
        object(),
        [True, 2],
        [False],
        [1.0],
        [None],
        ["1"],
        [b"1"],
        [[1, 2]],
        [(1,)],
        [1, 2, 3.0],
        [np.True_],
        [np.float64(1)],
        [np.array([1])],
        [np.array([[1]])],
        [FakeScalar(True)],
        [FakeScalar(1.0)],
        np.array(5),
        np.int64(5),
        np.array([True, False]),
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array([[]]),
        np.array(["1"]),
        array.array("d", [1.0]),
        FakeTensor(5),
        FakeTensor([[1]]),
        FakeTensor([1.0]),
        FakeTensor([True]),
    ],
    ids=lambda ids: f"{type(ids).__name__}",
)
def test_what_is_no_sequence_of_ints_is_refused(ids) -> None:
    with pytest.raises(TypeError, match=r"^prompt must"):
        token_id_list(ids, what="prompt")


@pytest.mark.parametrize(
    "ids", [[], (), range(0), np.array([], np.int32), np.array([]), FakeTensor([]), deque()]
)
def test_empty_is_refused(ids) -> None:
    with pytest.raises(InvalidRequest, match="prompt must not be empty"):
        token_id_list(ids, what="prompt")


@pytest.mark.parametrize(
    "wrong", [-1, -HUGE, 2**31, 2**63, HUGE, UNPRINTABLE, np.int64(-1), np.uint64(2**63)], ids=type
)
def test_ids_out_of_range_are_named_with_their_place(wrong) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt must be in \[0, 2147483647\].*position 2$"):
        token_id_list([0, MAX_TOKEN_ID, wrong], what="prompt")


@pytest.mark.parametrize("wrong", [-1, -256, -(2**31), -(2**31) - 1, 2**31, 2**32, 2**63])
def test_an_id_out_of_range_among_small_ones_is_refused(wrong: int) -> None:
    for ids in ([wrong], [0, wrong], [wrong, 0], [0, wrong, 0]):
        with pytest.raises(InvalidRequest, match=rf"got {wrong} at position {ids.index(wrong)}$"):
            token_id_list(ids, what="prompt")


def test_limits_themselves_are_accepted() -> None:
    assert token_id_list([0, MAX_TOKEN_ID]) == [0, MAX_TOKEN_ID] == [0, 2**31 - 1]


ITEMS = [
    *(0, 1, 127, 105, 0x69696969, MAX_TOKEN_ID, MAX_TOKEN_ID + 1, 2**32, 2**63, -1, -(2**31), HUGE),
    *(
        True,
        False,
        None,
        Ellipsis,
        1.0,
        1j,
        math.nan,
        "",
        "iiiii",
        "i" * 300,
        b"iiii",
        bytearray(4),
    ),
    *((), (1,), [1], [105] * 3, {1: 1}, Colour.RED, np.int64(3), np.uint8(105), np.array([1, 2])),
    *(np.bool_(True), np.float32(1), object(), StopIteration, array.array("I", [1])),
]


def _plainly(ids: list[Any]) -> list[int] | None:
    """Item by item; None for what is refused."""
    numbers = [item.item() if isinstance(item, np.generic) else item for item in ids]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in numbers):
        return None
    return [int(item) for item in numbers] if all(0 <= x < 2**31 for x in numbers) else None


@given(st.lists(st.sampled_from(ITEMS) | st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=12))
def test_no_mixture_passes_for_ints(ids: list[Any]) -> None:
    expected = _plainly(ids)
    if expected is None:
        with pytest.raises((TypeError, InvalidRequest)):
            token_id_list(ids)
        return
    tokens = token_id_list(ids)
    assert tokens == expected
    assert set(map(type, tokens)) == {int}


def test_errors_say_which_item() -> None:
    with pytest.raises(TypeError, match=r"prompt must hold ints, got bool \(True\) at position 1"):
        token_id_list([1, True], what="prompt")


def test_error_texts_are_bounded() -> None:
    for ids in ([1, "x" * 100_000], [list(range(100_000))], FakeTensor("x" * 100_000)):
        with pytest.raises(TypeError) as caught:
            token_id_list(ids)
        assert len(str(caught.value)) < 300


def test_equal_params_hash_alike() -> None:
    """They can be keys, mappings or not."""
    one, other = (SamplingParams(seed=1, logit_bias={5: 1.0}, extra={"a": 1}) for _ in range(2))
    assert one == other
    assert {one: "x"}[other] == "x"
    assert one != SamplingParams(seed=1, logit_bias={5: 2.0}, extra={"a": 1})


def test_equal_engines_hash_alike() -> None:
    """They can be keys, whatever they registered with."""
    one, other = (
        EngineInfo(1, True, 4096, 100, 16, "bfloat16", "1.0", registration={"extra": [1]})
        for _ in range(2)
    )
    assert {one: "x"}[other] == "x"
    assert one != attrs.evolve(one, registration={"extra": [2]})


@pytest.mark.parametrize("method", [Client.generate, Client.stream])
def test_type_checkers_see_what_a_prompt_is(method) -> None:
    """Text is an object, too."""
    assert inspect.signature(method).parameters["ids"].annotation == "TokenIds"


@pytest.mark.parametrize("name", TEXT_FIELDS)
def test_grammars_have_no_nul(name: str) -> None:
    """An engine's parser takes a text up to there, or ends."""
    with pytest.raises(InvalidRequest, match=f"{name} must not have a NUL character"):
        SamplingParams(**{name: "a\0b"})


def test_a_wrong_prompt_is_told_the_way_out() -> None:
    with pytest.raises(TypeError, match="for several prompts, call generate_many"):
        token_id_list([[1, 2], [3]])
    with pytest.raises(TypeError, match="a tokenizer has to turn into token ids"):
        token_id_list("Hello")
