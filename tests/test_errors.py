from __future__ import annotations

import copy
import pickle

import pytest

import tszmq.errors
from tszmq.errors import (
    ClientClosed,
    ConnectError,
    DeadlineExceeded,
    DecodeError,
    EngineDead,
    EnginePaused,
    HandshakeTimeout,
    InvalidRank,
    InvalidRequest,
    RequestRejected,
    TokensLost,
    TszmqError,
    UnsupportedField,
)
from tszmq.types import Completion

PARTIAL = Completion("label", [1, 2], None, None, 3, 2, 0, 1, 0.0, 0.5, 1.5)
PLAIN = [
    getattr(tszmq.errors, name)
    for name in tszmq.errors.__all__
    if "__init__" not in vars(getattr(tszmq.errors, name))
]
EXAMPLES = [error("what happened") for error in PLAIN] + [
    EngineDead("engine 3 is dead", 3, "its socket was closed", PARTIAL),
    ClientClosed("the client was closed"),
    ClientClosed("the client was closed", PARTIAL),
    EngineDead("every engine is dead"),
    DecodeError("engine 2 sent bytes that are no message", 2, "three in a row"),
    RequestRejected("refused", "prompt_too_long", retryable=True),
    EnginePaused("paused", "paused", retryable=True),
    TokensLost("2 tokens of 5 came", PARTIAL),
    DeadlineExceeded("1.0 s passed", PARTIAL),
    DeadlineExceeded("1.0 s passed before anything was sent"),
]
COPIES = [
    *(
        pytest.param(
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)),
            id=f"pickle-{protocol}",
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
    pytest.param(copy.copy, id="copy"),
    pytest.param(copy.deepcopy, id="deepcopy"),
]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_copies_keep_class_message_and_attributes(error, duplicate) -> None:
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error) != ""
    assert twin.args == error.args
    assert vars(twin) == vars(error)


def test_every_public_error_has_an_example() -> None:
    assert {type(error).__name__ for error in EXAMPLES} == set(tszmq.errors.__all__)


def test_every_error_is_of_the_one_root_and_says_what_it_is() -> None:
    for name in tszmq.errors.__all__:
        error = getattr(tszmq.errors, name)
        assert issubclass(error, TszmqError)
        assert error.__doc__, name
        assert name in (tszmq.errors.__doc__ or ""), f"{name} is missing from the tree"


@pytest.mark.parametrize(
    ("error", "parents"),
    [
        (HandshakeTimeout, (ConnectError, TimeoutError)),
        (DeadlineExceeded, (TimeoutError,)),
        (DecodeError, (EngineDead,)),
        (EnginePaused, (RequestRejected,)),
        (InvalidRequest, (ValueError,)),
        (InvalidRank, (InvalidRequest, ValueError)),
        (UnsupportedField, (InvalidRequest, ValueError)),
    ],
)
def test_tree(error, parents) -> None:
    for parent in parents:
        assert issubclass(error, parent)


def test_attributes() -> None:
    dead = EngineDead("engine 3 is dead", 3, "its socket was closed")
    assert (dead.engine_index, dead.reason) == (3, "its socket was closed")
    nobody = EngineDead("every engine is dead")
    assert (nobody.engine_index, nobody.reason) == (None, "every engine is dead")
    assert nobody.partial is None
    rejected = RequestRejected("refused", "prompt_too_long", retryable=True)
    assert (rejected.code, rejected.retryable) == ("prompt_too_long", True)
    assert (RequestRejected("no").code, RequestRejected("no").retryable) == (None, False)
    assert TokensLost("lost", PARTIAL).partial is PARTIAL
    late = DeadlineExceeded("late", PARTIAL)
    assert late.partial is PARTIAL
    assert str(late) == "late"  # not OSError's reading of two arguments
    assert late.errno is None


def test_cause_and_notes_do_not_break_pickling() -> None:
    try:
        raise EngineDead("engine 0 is dead", 0) from OSError(32, "Broken pipe")
    except EngineDead as error:
        twin = pickle.loads(pickle.dumps(error))
    assert twin.engine_index == 0
