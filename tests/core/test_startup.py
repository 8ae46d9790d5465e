"""The start-up of engines: each step of the machine, and arbitrary histories of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tszmq.core.startup import Stage, Startup

pytestmark = pytest.mark.timeout(60)


def serve(startup: Startup, index: int, fd: int) -> None:
    """The whole usual way, its handshake connection closed after READY."""
    assert startup.hello(index, fd)
    assert startup.ready(index)
    assert startup.expects_registration(index)
    startup.registered(index)
    assert startup.handshake_closed(fd) is None


def test_the_usual_way():
    startup = Startup(2)
    assert startup.num_missing() == 2
    assert not startup.pending()
    assert not startup.expects_registration(0)
    serve(startup, 0, 10)
    assert startup.num_missing() == 1
    assert startup.hello(1, 11)
    assert startup.pending()
    startup.ready(1)
    startup.registered(1)
    assert startup.num_missing() == 0
    assert not startup.pending()
    assert not startup.expects_registration(1)


def test_the_registration_may_overtake_ready():
    """They are on two sockets."""
    startup = Startup(1)
    startup.hello(0, 10)
    assert startup.expects_registration(0)
    startup.registered(0)
    assert startup.ready(0)
    assert startup.num_missing() == 0
    assert startup.handshake_closed(10) is None
    assert not startup.expects_registration(0)


def test_ready_of_a_stranger_means_nothing():
    startup = Startup(1)
    assert not startup.ready(4)
    assert not startup.expects_registration(4)
    assert startup.num_missing() == 1


def test_more_engines_than_expected_are_kept_waiting():
    startup = Startup(1)
    serve(startup, 0, 10)
    assert not startup.hello(1, 11)
    assert "place is taken: 1" in startup.describe_missing()
    assert not startup.expects_registration(1)


@pytest.mark.parametrize("stage", ["greeted", "ready", "registered"])
def test_the_index_of_a_living_engine_is_kept_waiting(stage):
    startup = Startup(1)
    startup.hello(0, 10)
    if stage != "greeted":
        startup.ready(0)
    if stage == "registered":
        startup.registered(0)
    assert not startup.hello(0, 20)
    assert startup.describe_missing().endswith("is taken: 0")
    # The one that is there goes on unhurt.
    if stage != "registered":
        assert startup.expects_registration(0)
        startup.registered(0)
    assert startup.num_missing() == 0
    assert startup.died(0) == [0]
    assert startup.expects_registration(0)
    # It waits no longer: nobody is left when it dies in its turn.
    startup.registered(0)
    assert startup.died(0) == []


def test_a_dead_engine_is_replaced_at_once():
    startup = Startup(1)
    serve(startup, 0, 10)
    assert startup.died(0) == []
    assert startup.num_missing() == 0  # it had come
    assert startup.hello(0, 20)
    assert startup.num_missing() == 1
    startup.registered(0)
    assert startup.num_missing() == 0


def test_a_successor_that_gave_up_is_not_greeted():
    startup = Startup(1)
    serve(startup, 0, 10)
    startup.hello(0, 20)
    assert startup.handshake_closed(20) is None
    assert startup.died(0) == []
    assert not startup.expects_registration(0)


def test_the_last_who_said_hello_is_the_successor():
    startup = Startup(1)
    serve(startup, 0, 10)
    startup.hello(0, 20)
    startup.hello(0, 30)
    assert startup.handshake_closed(20) is None
    assert startup.died(0) == [0]
    assert startup.handshake_closed(30) == 0


def test_a_failed_start_up_frees_the_place_for_whoever_waits():
    startup = Startup(1)
    startup.hello(0, 10)
    startup.hello(5, 11)
    assert startup.handshake_closed(10) == 0
    assert startup.failed(0) == [5]
    assert startup.expects_registration(5)
    assert not startup.expects_registration(0)


def test_a_connection_that_closes_after_ready_means_nothing():
    startup = Startup(1)
    startup.hello(0, 10)
    startup.ready(0)
    assert startup.handshake_closed(10) is None
    assert startup.expects_registration(0)


def test_an_old_connection_of_a_restarted_engine_means_nothing():
    startup = Startup(1)
    startup.hello(0, 10)
    startup.registered(0)
    startup.died(0)
    startup.hello(0, 20)
    assert startup.handshake_closed(10) is None
    assert startup.expects_registration(0)
    assert startup.handshake_closed(20) == 0


def test_failure_of_one_that_is_not_starting_means_nothing():
    startup = Startup(2)
    serve(startup, 0, 10)
    assert startup.failed(0) == []
    assert startup.failed(1) == []
    assert startup.died(1) == []
    assert startup.num_missing() == 1


@pytest.mark.parametrize("says", ["ready", "registered"])
def test_one_whose_connection_broke_while_it_loaded_goes_on(says):
    """It says HELLO once, and its socket dials in again by itself."""
    startup = Startup(1)
    startup.hello(0, 10)
    assert startup.handshake_closed(10) == 0
    assert startup.failed(0) == []
    assert not startup.pending()
    assert startup.expects_registration(0)
    if says == "ready":
        assert startup.ready(0)
        assert startup.pending()
    startup.registered(0)
    assert startup.num_missing() == 0
    assert not startup.expects_registration(0)


def test_one_whose_place_was_given_away_does_not_come_back():
    startup = Startup(1)
    startup.hello(0, 10)
    startup.hello(1, 20)
    assert startup.handshake_closed(10) == 0
    assert startup.failed(0) == [1]
    assert not startup.ready(0)
    assert not startup.expects_registration(0)
    startup.registered(1)
    assert startup.num_missing() == 0


def test_stalled_is_one_that_was_ready_and_keeps_somebody_waiting():
    startup = Startup(1)
    startup.hello(0, 10)
    startup.ready(0)
    startup.hello(0, 20)
    assert startup.stalled() == []  # its connection is still there
    startup.handshake_closed(10)
    assert startup.stalled() == [0]
    startup.registered(0)
    assert startup.stalled() == []


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "2 of 2 engines missing: 2 never said HELLO (0, 1, if they are numbered from 0)"),
        (
            ["hello 1"],
            "2 of 2 engines missing: engine 1 said HELLO and was sent INIT, has not registered; "
            "1 never said HELLO (0, if they are numbered from 0)",
        ),
        (
            ["hello 0", "ready 0"],
            "2 of 2 engines missing: engine 0 said READY, has not registered; "
            "1 never said HELLO (1, if they are numbered from 0)",
        ),
        (
            ["hello 0", "closed 0"],
            "2 of 2 engines missing: gone after HELLO, before READY: 0; "
            "1 never said HELLO (1, if they are numbered from 0)",
        ),
        (
            ["hello 7", "registered 7"],
            "1 of 2 engines missing: 1 never said HELLO",
        ),
        (
            ["hello 0", "registered 0", "hello 0"],
            "1 of 2 engines missing: 1 never said HELLO (1, if they are numbered from 0); "
            "kept waiting because their index or place is taken: 0",
        ),
    ],
)
def test_who_is_missing_in_words(steps, text):
    startup = Startup(2)
    for number, step in enumerate(steps):
        what, index = step.split()
        if what == "hello":
            startup.hello(int(index), number)
        elif what == "closed":
            startup.failed(startup.handshake_closed(number - 1))
        else:
            getattr(startup, what)(int(index))
    assert startup.describe_missing() == text


@pytest.mark.parametrize("step", ["waiting", "greeted", "ready", "registered"])
def test_texts_are_short_however_many_are_missing(step):
    """Whoever can reach the socket can say HELLO with any index."""
    startup = Startup(65536 if step != "waiting" else 1)
    for index in range(1, 1000):
        startup.hello(index, index)
        if step in ("ready", "registered"):
            getattr(startup, step)(index)
    text = startup.describe_missing()
    assert len(text) < 700
    assert re.search(r"\d+ more", text)


def test_what_may_be_done_about_it():
    startup = Startup(1)
    assert "earlier client" in startup.advise()
    startup.hello(0, 0)
    assert startup.advise() == ""
    startup.ready(0)
    assert "dials the input address" in startup.advise()
    startup.registered(0)
    assert startup.advise() == ""


def test_strangers_are_counted():
    startup = Startup(1)
    startup.ignored = 3
    assert startup.describe_missing().endswith("3 messages of strangers were ignored")


class StartupMachine(RuleBasedStateMachine):
    """Engines with a connection each; descriptors are used again, as the kernel does."""

    EXPECTED = 2
    INDICES = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.startup = Startup(self.EXPECTED)
        self.stages: dict[int, Stage] = {}
        self.waiting: dict[int, int] = {}
        self.greeted: dict[int, int] = {}  # open connections of those that were sent INIT
        self.open: set[int] = set()
        self.gone: set[int] = set()  # their connection closed after INIT, before READY

    def may_return(self, index: int) -> bool:
        return index in self.gone and self.is_free(index)

    def is_free(self, index: int) -> bool:
        full = len(self.stages) >= self.EXPECTED
        return self.stages.get(index, None if full else Stage.DEAD) is Stage.DEAD

    def greet(self, index: int, fd: int) -> None:
        self.stages[index] = Stage.GREETED
        self.greeted[index] = fd
        self.gone.discard(index)

    def serve_waiting(self) -> list[int]:
        served = []
        for index, fd in list(self.waiting.items()):
            vacant = index not in self.stages and len(self.stages) < self.EXPECTED
            if vacant or self.stages.get(index) is Stage.DEAD:
                del self.waiting[index]
                self.greet(index, fd)
                served.append(index)
        return served

    @rule(index=INDICES)
    def hello(self, index: int) -> None:
        fd = min(set(range(10, 60)) - self.open)
        self.open.add(fd)
        stage = self.stages.get(index)
        free = stage is Stage.DEAD or (stage is None and len(self.stages) < self.EXPECTED)
        assert self.startup.hello(index, fd) is free
        if free:
            self.waiting.pop(index, None)
            self.greet(index, fd)
        else:
            self.waiting[index] = fd

    @rule(index=INDICES)
    def ready(self, index: int) -> None:
        if self.stages.get(index) is Stage.GREETED or self.may_return(index):
            self.stages[index] = Stage.READY
            self.gone.discard(index)
        assert self.startup.ready(index) is (index in self.stages)

    @rule(index=INDICES)
    def register(self, index: int) -> None:
        expected = self.stages.get(index) in (Stage.GREETED, Stage.READY) or self.may_return(index)
        assert self.startup.expects_registration(index) is expected
        if expected:
            self.startup.registered(index)
            self.stages[index] = Stage.REGISTERED
            self.gone.discard(index)

    @rule(index=INDICES)
    def die(self, index: int) -> None:
        if self.stages.get(index) is not Stage.REGISTERED:
            return  # nobody else is ever said to have died
        self.stages[index] = Stage.DEAD
        assert self.startup.died(index) == self.serve_waiting()

    @rule(index=INDICES)
    def fail(self, index: int) -> None:
        starting = self.stages.get(index) in (Stage.GREETED, Stage.READY)
        served = self.startup.failed(index)
        if starting:
            del self.stages[index]
            assert served == self.serve_waiting()
        else:
            assert served == []

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        fd = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(fd)
        failed = None
        for index, greeted in list(self.greeted.items()):
            if greeted == fd:
                del self.greeted[index]
                if self.stages.get(index) is Stage.GREETED:
                    failed = index
        for index, waiting in list(self.waiting.items()):
            if waiting == fd:
                del self.waiting[index]
        assert self.startup.handshake_closed(fd) == failed
        if failed is not None:
            del self.stages[failed]
            self.gone.add(failed)
            assert self.startup.failed(failed) == self.serve_waiting()

    @invariant()
    def agrees(self) -> None:
        starting = (Stage.GREETED, Stage.READY)
        came = sum(stage not in starting for stage in self.stages.values())
        assert self.startup.num_missing() == self.EXPECTED - came
        assert self.startup.pending() is any(each in starting for each in self.stages.values())
        assert self.startup.stalled() == [
            index
            for index in self.waiting
            if self.stages.get(index) is Stage.READY and index not in self.greeted
        ]

    @invariant()
    def never_more_than_expected(self) -> None:
        assert len(self.startup._stages) <= self.EXPECTED

    @invariant()
    def nobody_waits_in_front_of_a_free_place(self) -> None:
        for index in self.startup._waiting:
            stage = self.startup._stages.get(index)
            assert stage is not Stage.DEAD
            assert stage is not None or len(self.startup._stages) == self.EXPECTED


TestStartup = StartupMachine.TestCase
TestStartup.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
