"""Guards and the lock order, in both builds: what each must do, and what none may ever do.

Most tests run a private copy of the module, made under either setting, in this process; those
about the setting itself, signals and whole clients run Python anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

import tszmq.ownership
from tests.mock_engine import PATIENCE, in_thread
from tszmq.errors import LockOrderError
from tszmq.net.sockets import CheckedSocket, Owned

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parent.parent


class Value:
    """Something to guard."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, more: int) -> int:
        self.number += more
        return self.number


def import_anew(setting: str) -> Any:
    """A copy of the module as it is when imported under that TSZMQ_DEBUG."""
    name = f"ownership_{setting}"
    spec = importlib.util.spec_from_file_location(name, tszmq.ownership.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("TSZMQ_DEBUG")
    os.environ["TSZMQ_DEBUG"] = setting
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        if before is None:
            del os.environ["TSZMQ_DEBUG"]
        else:
            os.environ["TSZMQ_DEBUG"] = before
    assert module.CHECKED is (setting == "1")
    return module


PLAIN, CHECKED = import_anew("0"), import_anew("1")


@pytest.fixture(params=[PLAIN, CHECKED], ids=["plain", "checked"])
def either(request: pytest.FixtureRequest) -> Any:
    """The module in each build."""
    return request.param


def run_python(
    source: str, *arguments: str, debug: str | None = None, flags: tuple[str, ...] = ()
) -> str:
    """Run a script in a process of its own; what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "TSZMQ_DEBUG"}
    if debug is not None:
        env["TSZMQ_DEBUG"] = debug
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", source, *arguments],
        env={**env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


# --- which build it is ---------------------------------------------------------------------------

BUILD = """
import zmq
from tszmq.errors import LockOrderError
from tszmq.net.sockets import _Binder
from tszmq.ownership import CHECKED, Level, lock, mutex

state, readers = mutex(Level.STATE, []), lock(Level.READERS)
with readers:
    with state as value:
        value.append(1)
try:
    with state:
        with readers:
            order = "taken"
except LockOrderError:
    order = "refused"
binder = _Binder(1000, 1.0)
kind = type(binder.make(zmq.PULL)).__name__
binder.undo()
print(CHECKED, order, kind)
"""


@pytest.mark.parametrize(
    ("debug", "flags", "checked"),
    [
        (None, (), False),
        ("", (), False),
        ("0", (), False),
        ("0", ("-X", "dev"), False),
        ("1", (), True),
        ("1", ("-O",), True),
        (None, ("-X", "dev"), True),
    ],
)
def test_the_build_is_chosen_when_the_package_is_imported(debug, flags, checked):
    expected = "True refused CheckedSocket" if checked else "False taken Socket"
    assert run_python(BUILD, debug=debug, flags=flags).strip() == expected


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 14), reason="that Python looks for signals after a C __enter__"
)
def test_a_plain_guard_runs_no_python_code():
    """It costs what the lock costs, and has no bytecode at which a signal could come between."""
    guard = PLAIN.mutex(PLAIN.Level.STATE, Value())
    events = []
    sys.setprofile(lambda frame, event, argument: events.append((event, argument)))
    try:
        with guard:
            pass
    finally:
        sys.setprofile(None)
    assert [event for event, _ in events if event in ("call", "return")] == []
    for method in ("__enter__", "__exit__"):
        assert not hasattr(getattr(type(guard), method), "__code__")


FORKED = """
import os, threading
from tszmq.ownership import Level, holds_a_lock, mutex
state = mutex(Level.STATE, [])
held, done = threading.Event(), threading.Event()
def hold():
    with state:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
if (child := os.fork()) == 0:
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(holds_a_lock())) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    os._exit(any(seen) or len(seen) != 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_was_held_at_a_fork_is_held_by_nobody_in_the_child(debug):
    """Its threads get the ids of the parent's again."""
    assert run_python(FORKED, debug=debug, flags=("-W", "ignore")).strip() == "0"


# --- what both do --------------------------------------------------------------------------------


def test_a_guard_lends_its_value_and_keeps_others_out(either):
    guard = either.mutex(either.Level.STATE, Value())
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with guard as value:
            entered.set()
            assert leave.wait(PATIENCE)
            value.add(1)

    def add():
        with guard as value:
            return value.add(10)

    holding = in_thread(hold)
    assert entered.wait(PATIENCE)
    adding = in_thread(add)
    with pytest.raises(TimeoutError):
        adding.result(0.1)
    leave.set()
    holding.result(PATIENCE)
    assert adding.result(PATIENCE) == 11


def test_an_exception_in_the_block_frees_the_lock_and_comes_through(either):
    guard = either.mutex(either.Level.STATE, Value())
    with pytest.raises(ZeroDivisionError):
        with guard as value:
            value.number = 1 // value.number
    assert not guard.owned()

    def number():
        with guard as value:
            return value.number

    assert in_thread(number).result(PATIENCE) == 0


def test_many_threads_lose_no_update(either):
    guard = either.mutex(either.Level.STATE, Value())
    rounds = 3000

    def work():
        for _ in range(rounds):
            with guard as value:
                value.number = value.number + 1

    for working in [in_thread(work) for _ in range(4)]:
        working.result(PATIENCE)
    with guard as value:
        assert value.number == 4 * rounds


def test_readers_then_state_is_the_order(either):
    state, readers = either.mutex(either.Level.STATE, Value()), either.lock(either.Level.READERS)
    for _ in range(3):
        with readers:
            with state as value:
                value.add(1)
        with state as value:
            value.add(1)
    with state as value:
        assert value.number == 6


def test_the_levels_stand_in_their_order():
    assert [level.name for level in sorted(PLAIN.Level)] == ["READERS", "STATE"]


def test_holds_a_lock_is_about_this_thread_and_any_client(either):
    one, other = (either.mutex(either.Level.STATE, Value()) for _ in range(2))
    assert not either.holds_a_lock()
    with one:
        assert either.holds_a_lock()
        assert one.owned()
        assert not other.owned()
        assert in_thread(either.holds_a_lock).result(PATIENCE) is False
        assert in_thread(one.owned).result(PATIENCE) is False
    with other:
        assert either.holds_a_lock()
    assert not either.holds_a_lock()
    with either.lock(either.Level.READERS):
        assert not either.holds_a_lock()


def test_a_guard_that_is_gone_is_forgotten(either):
    before = len(either._guards)
    guard = either.mutex(either.Level.STATE, Value())
    assert len(either._guards) == before + 1
    del guard
    gc.collect()
    assert len(either._guards) == before


def test_holds_a_lock_while_the_collector_takes_a_guard_away(either):
    """Wherever in the look that collection comes: it is at the n-th allocation, for each n."""
    keep = [either.mutex(either.Level.STATE, Value()) for _ in range(40)]
    thresholds = gc.get_threshold()
    gc.freeze()  # what other tests left is not looked at sixty times
    try:
        for allocations in range(1, 60):
            gc.disable()
            gc.collect()
            cycle: list[Any] = [either.mutex(either.Level.STATE, Value())]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
            gc.enable()
            assert not either.holds_a_lock()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()
    assert keep


# --- what the checked build reports --------------------------------------------------------------


def here() -> str:
    """This file and the caller's line, as reports name it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def test_a_wrong_order_is_reported_with_both_locks_and_both_places():
    state, readers = (
        CHECKED.mutex(CHECKED.Level.STATE, Value()),
        CHECKED.lock(CHECKED.Level.READERS),
    )
    with state as value:
        held_at = here().replace(f":{sys._getframe().f_lineno}", f":{sys._getframe().f_lineno - 1}")
        with pytest.raises(LockOrderError) as caught:
            with readers:
                pytest.fail("taken")
        wanted_line = sys._getframe().f_lineno - 2
        value.add(1)  # the one that is held goes on
    report = str(caught.value)
    assert re.match(r"READERS lock 0x\w+ is taken against the order at ", report)
    assert f"{__file__}:{wanted_line} in {sys._getframe().f_code.co_name}" in report
    assert re.search(r"STATE lock 0x\w+ \(taken at " + re.escape(held_at), report)
    assert repr(threading.current_thread().name) in report
    assert report.endswith("the order is READERS, STATE")
    # Both are usable afterwards, in the right order.
    with readers:
        with state as value:
            assert value.add(1) == 2


def test_two_guards_of_one_level_are_reported_in_either_order():
    """Two clients' locks: whoever takes them in opposite orders deadlocks."""
    one, other = (CHECKED.mutex(CHECKED.Level.STATE, Value()) for _ in range(2))
    for first, second in ((one, other), (other, one)):
        with first:
            with pytest.raises(LockOrderError, match="against the order"):
                with second:
                    pytest.fail("taken")
        with second as value:
            value.add(1)


def test_a_lock_taken_twice_is_reported():
    guard = CHECKED.mutex(CHECKED.Level.STATE, Value())
    with guard as value:
        with pytest.raises(LockOrderError, match="taken twice by one thread"):
            with guard:
                pytest.fail("taken")
        assert guard.owned()
        value.add(1)
    assert not guard.owned()
    with guard as value:
        assert value.number == 1


def test_a_wrong_order_is_reported_before_it_blocks():
    """Somebody else holds the wanted lock and does not let go: the report comes all the same."""
    one, other = (CHECKED.mutex(CHECKED.Level.STATE, Value()) for _ in range(2))
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with other:
            entered.set()
            assert leave.wait(PATIENCE)

    def take_both():
        with one:
            with other:
                pytest.fail("taken")

    holding = in_thread(hold)
    assert entered.wait(PATIENCE)
    try:
        with pytest.raises(LockOrderError, match="against the order"):
            in_thread(take_both).result(PATIENCE / 2)
        assert not holding.done()
    finally:
        leave.set()
    holding.result(PATIENCE)
    for guard in (one, other):
        with guard as value:
            value.add(1)


def test_threads_have_orders_of_their_own():
    """What another thread holds is no matter of order."""
    state, readers = (
        CHECKED.mutex(CHECKED.Level.STATE, Value()),
        CHECKED.lock(CHECKED.Level.READERS),
    )

    def take_readers():
        with readers:
            return True

    with state:
        assert in_thread(take_readers).result(PATIENCE)


class Steps:
    """A thread's stack, which counts how far down it was looked at."""

    def __init__(self, frame: FrameType | None, count: list[int]) -> None:
        self.frame = frame
        self._count = count

    @property
    def f_lasti(self) -> int:
        return -1 if self.frame is None else self.frame.f_lasti

    @property
    def f_back(self) -> Steps | None:
        self._count[0] += 1
        back = None if self.frame is None else self.frame.f_back
        return None if back is None else Steps(back, self._count)


def test_a_check_does_not_look_through_the_stack_for_blocks_that_have_ended(monkeypatch):
    """However deep it is: only for a lock that is still waited for further down."""
    look, looks, steps = CHECKED._about_to_be_taken, [], [0]

    def counted(entries, frame):
        looks.append(list(entries))
        return look(entries, Steps(frame, steps))

    monkeypatch.setattr(CHECKED, "_about_to_be_taken", counted)
    state, readers = (
        CHECKED.mutex(CHECKED.Level.STATE, Value()),
        CHECKED.lock(CHECKED.Level.READERS),
    )

    def block() -> None:
        with readers:
            with state as value:
                value.add(1)

    def use(depth: int) -> None:
        if depth:
            use(depth - 1)
        block()
        block()

    in_thread(use, 100).result(PATIENCE)  # a thread with nothing on its account
    assert looks == [[]] * 404
    assert steps == [0]
    with state as value:
        assert value.number == 202


def test_a_value_used_after_its_block_is_reported():
    guard = CHECKED.mutex(CHECKED.Level.STATE, Value())
    with guard as value:
        escaped = value
        value.number = 5
    for use in (lambda: escaped.number, lambda: escaped.add(1)):
        with pytest.raises(LockOrderError, match=r"STATE lock 0x\w+ was used after its block"):
            use()
    with pytest.raises(LockOrderError, match="after its block ended"):
        escaped.number = 7
    with guard as value:
        assert value.number == 5
        with pytest.raises(LockOrderError):  # also in a later block of the same guard
            escaped.add(1)


def test_a_block_left_by_an_exception_ends_the_loan_too():
    guard = CHECKED.mutex(CHECKED.Level.STATE, Value())
    escaped = []
    with contextlib.suppress(ZeroDivisionError):
        with guard as value:
            escaped.append(value)
            escaped[0].number = 1 // value.number
    with pytest.raises(LockOrderError):
        escaped[0].add(1)


def test_a_value_used_by_another_thread_is_reported():
    """Also while the block that lent it is still open."""
    guard = CHECKED.mutex(CHECKED.Level.STATE, Value())
    with guard as value:
        with pytest.raises(LockOrderError):
            in_thread(lambda: value.number).result(PATIENCE)


def test_a_guard_keeps_no_value_alive_that_is_gone(either):
    """A thread that took a lock once must not hold on to what it guarded."""
    gone = threading.Event()

    class Mortal:
        def __del__(self) -> None:
            gone.set()

    guard = either.mutex(either.Level.STATE, Mortal())
    with guard:
        pass
    del guard
    gc.collect()
    assert gone.is_set()


# --- signals -------------------------------------------------------------------------------------

STORM = """
import faulthandler, signal, sys, threading, time
from tszmq.ownership import CHECKED, Level, lock, mutex

faulthandler.dump_traceback_later(40, exit=True)
rounds, levels = int(sys.argv[1]), sys.argv[2]


class Value:
    number = 0


guard, readers = mutex(Level.STATE, Value()), lock(Level.READERS)
taken = hits = 0


def interrupt(signum, frame):
    raise KeyboardInterrupt


def free():
    # In another thread: in this one a lock left taken could be taken again.
    answer = []

    def take():
        with readers:
            with guard as value:
                answer.append(value.number)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    return bool(answer)


signal.signal(signal.SIGALRM, interrupt)
while taken < rounds or hits < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        if levels == "one":
            while True:
                with guard as value:
                    pass
                taken += 1
        else:
            while True:
                with readers:
                    with guard as value:
                        value.number += 1
                taken += 1
    except KeyboardInterrupt:
        hits += 1
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except KeyboardInterrupt:
            pass
    if guard.owned() or hits % 100 == 0 and not free():
        raise SystemExit(f"left taken after {taken} rounds and {hits} interruptions")
assert free()
print(CHECKED, "passed")
"""


@pytest.mark.parametrize(("debug", "rounds"), [("0", 100_000), ("1", 15_000)])
@pytest.mark.parametrize("levels", ["one", "two"])
def test_ctrl_c_never_leaves_a_lock_taken(debug, rounds, levels):
    """Interrupted ten thousand times a second, while it takes a lock and while it lets go."""
    said = run_python(STORM, str(rounds), levels, debug=debug)
    assert said == f"{debug == '1'} passed\n"


CONTENDED = """
import faulthandler, signal, threading
from tszmq.ownership import Level, mutex

faulthandler.dump_traceback_later(40, exit=True)
guard, leave, entered = mutex(Level.STATE, []), threading.Event(), threading.Event()


def hold():
    with guard:
        entered.set()
        leave.wait(30)


holder = threading.Thread(target=hold)
holder.start()
entered.wait(30)


def interrupt(signum, frame):
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not interrupted:
        interrupted.append(True)
        raise KeyboardInterrupt


interrupted = []
signal.signal(signal.SIGALRM, interrupt)
try:
    # Again and again: one that comes just before the thread falls asleep does not wake it.
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    with guard:
        raise SystemExit("taken from its holder")
except KeyboardInterrupt:
    pass
leave.set()
holder.join(30)
with guard as value:
    value.append(1)
assert not guard.owned()
print("passed")
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_wait_for_a_lock_can_be_interrupted(debug):
    assert run_python(CONTENDED, debug=debug) == "passed\n"


HANDLER = """
import faulthandler, signal, threading
from tszmq.ownership import Level, mutex

faulthandler.dump_traceback_later(40, exit=True)
guard, other = mutex(Level.STATE, threading.local()), mutex(Level.STATE, threading.local())
entered, leave = threading.Event(), threading.Event()


def hold():
    with guard:
        entered.set()
        leave.wait(30)


holder = threading.Thread(target=hold)
holder.start()
entered.wait(30)


def use_the_other(signum, frame):
    with other as value:
        value.used = True
    leave.set()


signal.signal(signal.SIGALRM, use_the_other)
# Again and again: one that comes just before the thread falls asleep does not wake it.
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
for _ in range(3):
    with guard as value:
        signal.setitimer(signal.ITIMER_REAL, 0)
        value.used = True
holder.join(30)
with other as value:
    assert value.used
try:
    value.used
except Exception as error:
    print(type(error).__name__)
"""


def test_a_handler_that_comes_while_a_lock_is_waited_for_may_take_another():
    """The value that is about to be lent is lent all the same."""
    assert run_python(HANDLER, debug="1") == "LockOrderError\n"


# --- the collector inside a guarded block --------------------------------------------------------

COLLECT = """
import faulthandler, gc, sys
import tszmq
from tests.mock_engine import eventually

faulthandler.dump_traceback_later(20, exit=True)
unraisable = []
sys.unraisablehook = unraisable.append
client = tszmq.Client.embedded(1, step_ms=5, max_inflight=50)
long = tszmq.SamplingParams(max_tokens=5000)


class Closes:
    def __init__(self, target):
        self.target = target
        self.cycle = self

    def __del__(self):
        self.target.close()


def reading():
    with client.stream([1, 2], long) as stream:
        for chunk in stream:
            yield chunk


def make():
    if case == "stream":
        cycle = [client.stream([1, 2], long)]
    elif case == "closes stream":
        cycle = [Closes(client.stream([1, 2], long))]
    elif case == "closes client":
        cycle = [Closes(client), client.stream([1, 2], long)]
    elif case == "generator":
        cycle = [reading()]
        next(cycle[0])
    elif case == "bulk":
        several = [tszmq.SamplingParams(max_tokens=1), long, long]
        cycle = [client.as_completed([[1], [2], [3]], several)]
        next(cycle[0])
    cycle.append(cycle)


for case in sys.argv[1:]:
    gc.disable()
    make()
    assert client.inflight(0) >= 1, case
    with client._session.shared.state as flights:
        assert gc.collect(), case
        assert flights.requests, case  # nothing is torn out of the block's hands
    gc.enable()
    eventually(lambda: client.inflight(0) == 0, what=f"{case}: not aborted")
    assert not unraisable, (case, unraisable)
    if case == "closes client":
        eventually(lambda: not client.is_alive, what="not closed")
    else:
        assert client.generate([5]).token_ids, case
client.close()
print("passed")
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_the_collector_closes_inside_a_block_waits_for_its_end(debug):
    cases = ["stream", "closes stream", "generator", "closes client"]
    assert run_python(COLLECT, *cases, debug=debug) == "passed\n"


def test_a_bulk_call_that_the_collector_closes_inside_a_block_waits_for_its_end():
    assert run_python(COLLECT, "bulk", debug="1") == "passed\n"


# --- sockets -------------------------------------------------------------------------------------


@pytest.fixture
def checked_socket():
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PAIR, socket_class=CheckedSocket)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket._owner = None
    socket.close()
    context.term()


USES = {
    "send": lambda socket: socket.send(b"x", zmq.NOBLOCK),
    "send_multipart": lambda socket: socket.send_multipart([b"x", b"y"], zmq.NOBLOCK),
    "recv": lambda socket: socket.recv(zmq.NOBLOCK),
    "recv_multipart": lambda socket: socket.recv_multipart(zmq.NOBLOCK),
    "poll": lambda socket: socket.poll(0),
    "getsockopt": lambda socket: socket.getsockopt(zmq.TYPE),
    "close": lambda socket: socket.close(),
}


@pytest.mark.parametrize("use", USES)
def test_a_socket_used_by_another_thread_is_reported(checked_socket, use):
    socket = Owned(checked_socket).take()
    with pytest.raises(LockOrderError, match=r"socket of thread \d+ was used by thread \d+"):
        in_thread(USES[use], socket).result(PATIENCE)
    assert not socket.closed
    try:
        USES[use](socket)  # its owner may
    except zmq.Again:
        pass


def test_a_socket_has_one_taker(checked_socket):
    owned = Owned(checked_socket)
    taken = in_thread(owned.take).result(PATIENCE)
    with pytest.raises(LockOrderError, match="taken by another thread"):
        owned.take()
    with pytest.raises(LockOrderError):
        taken.poll(0)


def test_racing_takers_one_gets_it():
    for _ in range(200):
        owned = Owned(object())
        start = threading.Barrier(3)

        def take(owned=owned, start=start):
            start.wait(PATIENCE)
            return owned.take()

        taking = [in_thread(take) for _ in range(2)]
        start.wait(PATIENCE)
        errors = [each.exception(PATIENCE) for each in taking]
        assert sorted(isinstance(error, LockOrderError) for error in errors) == [False, True]


def test_before_it_is_taken_a_socket_belongs_to_nobody(checked_socket):
    """Whoever binds sets it up, and then hands it over."""
    assert checked_socket.getsockopt(zmq.TYPE) == zmq.PAIR
    assert in_thread(checked_socket.getsockopt, zmq.TYPE).result(PATIENCE) == zmq.PAIR
