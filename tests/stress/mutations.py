"""Mistakes on purpose: each is put into a copy of the package, and a suite has to notice.

A mutation is a few replacements of source text. Text that is not there exactly once is an
error, so that none turns into a mutation that changes nothing when the source moves on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

__all__ = ["BY_TESTS", "TWO_LOCKS", "Mutation", "copy_of", "run_in", "run_tests_in"]

ROOT = Path(__file__).resolve().parent.parent.parent


@attrs.frozen
class Patch:
    """One replacement in one file of the package."""

    path: str
    old: str
    new: str


@attrs.frozen
class Mutation:
    """A mistake, and what notices it.

    Attributes:
        name: What is wrong.
        patches: How it is made.
        tests: The tests to run: the cheapest ones that notice.
        says: Part of what the failure says.
    """

    name: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...] = ()
    says: str = ""


def copy_of(directory: Path, mutation: Mutation | None = None, base: Path = ROOT) -> Path:
    """The package and its tests, with the mistake in them.

    Args:
        directory: Where to; it has none of the three yet.
        mutation: What to change in it.
        base: What to copy: a copy that ran has its bytecode with it, which is still good for
            every file that is not changed.

    Raises:
        AssertionError: The source has not the text that is to be replaced.
    """
    for part in ("tszmq", "tests"):
        shutil.copytree(base / part, directory / part)
    shutil.copy(base / "pyproject.toml", directory)
    for patch in mutation.patches if mutation else ():
        path = directory / "tszmq" / patch.path
        text = path.read_text("utf-8")
        count = text.count(patch.old)
        assert count == 1, f"{patch.path} has {count} times what {mutation} replaces:\n{patch.old}"
        path.write_text(text.replace(patch.old, patch.new), "utf-8")
    return directory


def run_in(
    directory: Path, *arguments: str, debug: str = "", seconds: float = 55
) -> tuple[int, str]:
    """Run that copy: the exit code and everything it wrote."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={
            **env,
            "PYTHONPATH": str(directory),
            "TSZMQ_DEBUG": debug,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


def run_tests_in(directory: Path, *tests: str, debug: str = "") -> tuple[int, str]:
    """Run some tests of that copy."""
    plugins = ("-p", "no:cacheprovider", "-p", "pytest_timeout")
    quiet = ("-q", "--no-header", "--tb=short")
    return run_in(directory, "-m", "pytest", *plugins, *quiet, *tests, debug=debug)


# --- the reference's bug -----------------------------------------------------------------------

# Load and in-flight ids behind a mutex each: choosing takes load, then in-flight; whatever
# ends a request takes in-flight, then load. (Both guard the same object here; it is the order
# that matters.)
TWO_LOCKS = Mutation(
    "load and in-flight ids have a lock each, taken in opposite orders",
    (
        Patch("ownership.py", "    STATE = 20\n", "    STATE = 20\n    INFLIGHT = 30\n"),
        Patch(
            "net/shared.py",
            "    arrivals: Gate = attrs.field(factory=Gate)\n",
            "    arrivals: Gate = attrs.field(factory=Gate)\n"
            "    inflight: object = attrs.field(factory=lambda: mutex(Level.INFLIGHT, []))\n",
        ),
        Patch(
            "net/shared.py",
            "from tszmq.ownership import Mutex\n",
            "from tszmq.ownership import Level, Mutex, mutex\n",
        ),
        Patch(
            "net/submit.py",
            "        with session.shared.state as flights:\n"
            "            engine = flights.limits(prepared.pinned)\n",
            "        with session.shared.state as flights, session.shared.inflight:\n"
            "            engine = flights.limits(prepared.pinned)\n",
        ),
        Patch(
            "net/receiver.py",
            "            with self._shared.state as flights:\n"
            "                applied = flights.apply(batch, now)\n",
            "            with self._shared.inflight, self._shared.state as flights:\n"
            "                applied = flights.apply(batch, now)\n",
        ),
    ),
)

# --- mistakes that unit tests notice -----------------------------------------------------------

ROUTING = "tests/core/test_routing.py"
FLIGHTS = "tests/core/test_flights.py"
STEPS = "tests/core/test_steps.py"
OWNERSHIP = "tests/test_ownership.py"

BY_TESTS = [
    Mutation(
        "an emptied engine keeps its last report",
        (
            Patch(
                "core/routing.py",
                "            if load is not None and load.num_requests:\n"
                "                self.load = load.idle()\n",
                "",
            ),
        ),
        (f"{ROUTING}::test_an_engine_that_empties_shows_no_requests_and_keeps_its_cache_usage",),
        "EngineLoad",
    ),
    Mutation(
        "the clamp comes before the report is stored",
        (
            Patch(
                "core/routing.py",
                "            engine.load = load\n        for request_id",
                "            kept = load\n        for request_id",
            ),
            Patch(
                "core/routing.py",
                "            self._remove(engine, request_id, tokens)\n        engine.settle()\n",
                "            self._remove(engine, request_id, tokens)\n        engine.settle()\n"
                "        if load is not None:\n            engine.load = kept\n",
            ),
        ),
        (f"{ROUTING}::test_the_report_is_stored_before_the_ids_it_finishes_are_released",),
        "EngineLoad",
    ),
    Mutation(
        "places are counted: a second release gives back somebody else's",
        (
            Patch(
                "core/routing.py",
                "        if request_id not in engine.inflight:\n            return False\n",
                "        if not engine.inflight:\n            return False\n"
                "        if request_id not in engine.inflight:\n"
                "            request_id = next(iter(engine.inflight))\n",
            ),
        ),
        (f"{ROUTING}::test_release_of_an_unknown_id_or_engine_changes_nothing",),
        "nobody",
    ),
    Mutation(
        "a dropped stream takes the lock in its finalizer",
        (
            Patch(
                "stream.py",
                "            self._session.shared.mailbox.post(Settle([request], ABORTED))\n",
                "            withdraw(self._session, request, ABORTED)\n",
            ),
            Patch(
                "net/submit.py",
                "    if not holds_a_lock():\n        wake_all(shared.settle(requests, end))\n",
                "    wake_all(shared.settle(requests, end))\n",
            ),
        ),
        (f"{OWNERSHIP}::test_what_the_collector_closes_inside_a_block_waits_for_its_end",),
        "AssertionError: stream",
    ),
    Mutation(
        "a place is taken before the request is listed",
        (
            Patch(
                "core/flights.py",
                "        self.requests[request.wire_id] = request\n"
                "        self.routing.place(index, request.wire_id, request.prompt_tokens)\n",
                "        self.routing.place(index, request.wire_id, request.prompt_tokens)\n"
                "        self.requests[request.wire_id] = request\n",
            ),
        ),
        (f"{FLIGHTS}::test_an_admission_that_a_signal_cut_off_is_undone_by_withdrawing",),
        "AssertionError",
    ),
    Mutation(
        "remembered rows outlive the end of one of them",
        (
            Patch(
                "core/flights.py",
                "        self._rows[request.engine_index].lose(request.wire_id)\n",
                "",
            ),
        ),
        (f"{FLIGHTS}::test_late_rows_are_noise",),
        "assert",
    ),
    Mutation(
        "what is kept together is dealt out after the end",
        (
            Patch(
                "core/flights.py",
                "        rows.deal_to(batch.finished)\n",
                "",
            ),
        ),
        (f"{STEPS}::test_an_abort_after_tokens_that_are_kept_is_no_refusal",),
        "assert",
    ),
    Mutation(
        "the lane of a row that ended is not kept empty",
        (
            Patch(
                "core/steps.py",
                "            values.insert(hole, 0)\n",
                "            pass\n",
            ),
        ),
        (f"{STEPS}::test_rows_that_end_or_join_do_not_break_up_what_is_kept",),
        "assert",
    ),
    Mutation(
        "a bad batch is not taken back",
        (
            Patch(
                "core/rows.py",
                "                if ids:\n                    del tokens[-len(ids) :]\n",
                "                pass\n",
            ),
        ),
        (f"{FLIGHTS}::test_a_bad_token_in_any_row_leaves_no_trace",),
        "AssertionError",
    ),
    Mutation(
        "bytes in the middle of a token are taken for the start of a row",
        (
            Patch(
                "wire/columns.py",
                "    if number & mask:\n        return None\n",
                "",
            ),
        ),
        ("tests/wire/test_columns.py::test_no_short_sequence_is_read_wrongly",),
        "AssertionError",
    ),
    Mutation(
        "counts are foretold that need another width",
        (
            Patch(
                "wire/tokenspeed_repeat.py",
                "            and self._ahead < self._most_ahead\n",
                "",
            ),
        ),
        (
            "tests/wire/test_tokenspeed_repeat.py"
            "::test_counts_that_need_another_width_are_not_foretold",
        ),
        "AssertionError",
    ),
    Mutation(
        "a batch that counts on from an earlier one is taken for the next",
        (
            Patch(
                "core/steps.py",
                "            are_next = step.ahead == last.ahead + 1\n",
                "            are_next = True\n",
            ),
        ),
        (f"{STEPS}::test_counts_that_count_on_after_a_gap_have_lost_tokens",),
        "AssertionError",
    ),
    Mutation(
        "a turn that is given up is lost",
        (
            Patch(
                "core/flights.py",
                "        self.places.leave(ticket)\n        return self.grant()\n",
                "        self.places.leave(ticket)\n        return []\n",
            ),
        ),
        (f"{FLIGHTS}::test_giving_up_passes_the_turn_on",),
        "assert",
    ),
    Mutation(
        "a waiter does not look again once it is listed",
        (
            Patch(
                "net/gate.py",
                "                if ready():\n                    self._leave(sleeper)\n"
                "                    return True\n",
                "",
            ),
        ),
        ("tests/net/test_gate.py::test_the_condition_is_looked_at_again_once_listed",),
        "looks",
    ),
    Mutation(
        "the mailbox clears its flag before it drains the byte",
        (
            Patch(
                "net/mailbox.py",
                "        try:\n            while self._reader.recv(4096):\n",
                "        self._rung = False\n        items = deque(self._items)\n"
                "        self._items.clear()\n"
                "        try:\n            while self._reader.recv(4096):\n",
            ),
            Patch("net/mailbox.py", "        return self._items\n", "        return items\n"),
        ),
        ("tests/net/test_mailbox.py::test_a_post_between_the_drained_byte_and_the_flag_is_taken",),
        "late",
    ),
    Mutation(
        "a plain guard runs Python code between its lock and its block",
        (
            Patch(
                "ownership.py",
                '        "__enter__": _enter(entries),\n',
                '        "__enter__": lambda _: next(entries),\n',
            ),
        ),
        (f"{OWNERSHIP}::test_a_plain_guard_runs_no_python_code",),
        "call",
    ),
]
if sys.version_info[:2] == (3, 14):  # its guards do so, and its test is left out
    BY_TESTS.pop()
