"""The suites notice the mistakes that they are there for; see ``mutations``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.mutations import BY_TESTS, TWO_LOCKS, Mutation, copy_of, run_in, run_tests_in

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

FAILED = 1  # pytest's exit code when tests failed, and not for another reason


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without a mistake, in which all the tests that are used pass: or a broken copy
    would look like a mistake that was noticed."""
    copy = copy_of(tmp_path_factory.mktemp("base"))
    tests = sorted({test for mutation in BY_TESTS for test in mutation.tests})
    status, output = run_tests_in(copy, *tests)
    assert status == 0, output
    return copy


@pytest.mark.parametrize("mutation", BY_TESTS, ids=lambda each: each.name)
def test_a_mistake_is_noticed(mutation: Mutation, base: Path, tmp_path: Path):
    status, output = run_tests_in(copy_of(tmp_path, mutation, base), "-x", *mutation.tests)
    assert status == FAILED, output
    assert mutation.says in output, output


def test_a_mutation_whose_text_is_gone_fails_loudly(tmp_path: Path):
    patch = BY_TESTS[0].patches[0]
    stale = Mutation("stale", (type(patch)(patch.path, "no such text", ""),))
    with pytest.raises(AssertionError, match="has 0 times"):
        copy_of(tmp_path, stale)


# --- the reference's bug -----------------------------------------------------------------------

ONE_REQUEST = """
import tszmq

with tszmq.Client.embedded(1) as client:
    try:
        print(client.generate([1, 2]).finish_reason)
    except tszmq.ClientClosed as error:
        print(error)
"""


@pytest.fixture(scope="module")
def two_locks(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(tmp_path_factory.mktemp("two_locks"), TWO_LOCKS, base)


def test_two_locks_deadlock_under_stress_when_nothing_is_checked(two_locks: Path):
    """It looks healthy for a while: one request at a time goes through."""
    status, output = run_in(two_locks, "-c", ONE_REQUEST, debug="0")
    assert (status, output) == (0, "length\n")
    status, output = run_in(two_locks, "-m", "tests.stress.workload", "20", "4", debug="0")
    assert status == 3, output
    assert "made no progress for 4.0 s" in output
    # Both sides of the embrace are in the dump.
    assert "in admit" in output
    assert "receiver.py" in output


def test_two_locks_are_named_at_the_first_inversion_when_checked(two_locks: Path):
    """One request, one thread that takes them the wrong way round: no deadlock is needed."""
    status, output = run_in(two_locks, "-c", ONE_REQUEST, debug="1")
    assert status == 0, output
    report = output.partition("LockOrderError")[2]
    assert "STATE lock" in report
    assert "against the order" in report
    assert "INFLIGHT lock" in report
    assert "(taken at " in report
    assert "receiver.py" in report
