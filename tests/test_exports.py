"""The public names, pinned: whatever else there is may change without notice."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import tszmq
import tszmq.errors
import tszmq.types

VALUES = {
    "Completion",
    "Endpoints",
    "EngineHealth",
    "EngineInfo",
    "EngineLoad",
    "SamplingParams",
    "TokenChunk",
    "TokenIds",
}
ERRORS = {
    "ClientClosed",
    "ConnectError",
    "DeadlineExceeded",
    "DecodeError",
    "EngineDead",
    "EnginePaused",
    "ForkedClient",
    "HandshakeTimeout",
    "InvalidRank",
    "InvalidRequest",
    "LockOrderError",
    "QueueFull",
    "RequestRejected",
    "TokensLost",
    "TszmqError",
    "UnsupportedField",
}


def test_public_names() -> None:
    assert set(tszmq.__all__) == {"Client", "BoundClient", "RequestStream"} | VALUES | ERRORS
    assert len(tszmq.__all__) == len(set(tszmq.__all__))


@pytest.mark.parametrize("name", sorted(VALUES))
def test_values_are_those_of_types(name: str) -> None:
    assert getattr(tszmq, name) is getattr(tszmq.types, name)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_are_those_of_errors(name: str) -> None:
    assert getattr(tszmq, name) is getattr(tszmq.errors, name)


def test_every_error_class_is_public() -> None:
    defined = {
        name
        for name, value in vars(tszmq.errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == ERRORS == set(tszmq.errors.__all__)


def test_star_import_brings_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from tszmq import *", names)
    names.pop("__builtins__")
    assert set(names) == set(tszmq.__all__)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tszmq.__version__)


def test_import_is_quiet_and_leaves_the_process_alone() -> None:
    """Nothing printed, no thread, no signal handler, no logging set-up, gc as it was."""
    program = """
import gc, logging, signal, sys, threading
before = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval(),
          [signal.getsignal(number) for number in signal.valid_signals()])
import tszmq
after = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval(),
         [signal.getsignal(number) for number in signal.valid_signals()])
assert before == after, (before, after)
assert threading.active_count() == 1, threading.enumerate()
assert not logging.getLogger().handlers
assert "numpy" not in sys.modules and "tszmq.cli" not in sys.modules, sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
