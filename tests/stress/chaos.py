"""Engines die, stall, fall silent and talk nonsense, while 32 threads use all of the client.

    python tests/stress/chaos.py [--seconds 20] [--protocol vllm] [--threads 32] [--seed 0]

Four simulator engines, each with a tormentor of its own that kills it, kills it again while it
starts, stops and continues it, pauses it, mutes it, makes it crash, say goodbye or spit garbage,
and restarts it. Meanwhile every request has to end once: with tokens that are a beginning of
the predicted ones (all of them when its ``finish_reason`` says so), or with an error that says
why; and every call has to return in its own time. When the engines are well again nothing may
be in flight, here or there, and after ``close()`` no thread and no descriptor may be left.

Prints a summary as JSON. Exit status 0: all went well. 1: something was wrong, in words. 3: a
call did not return; every thread's stack is on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # from a checkout, uninstalled

import tszmq
from tszmq import SamplingParams
from tszmq.ownership import CHECKED
from tszmq.sim import expected_tokens

ENGINES = 4
UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
SLACK = 5.0 * UNIT
"""What a call may take beyond its timeout: on a busy machine a thread has to get its turn."""
NO_TIMEOUT = 30.0 * UNIT
"""What a call without one may take: every fault below is over in much less."""
COMING_BACK = 30.0 * UNIT
SILENCE = 3.0
RSS_GROWTH = 96 << 20
LONG = 4000
"""More tokens than there is time for."""
EXPECTED = (
    tszmq.EngineDead,
    tszmq.DeadlineExceeded,
    tszmq.TokensLost,
    tszmq.RequestRejected,
    tszmq.QueueFull,
)


class Wrong(Exception):
    """Something that must not be."""


def fail(what: str, status: int = 1, *more: str) -> None:
    """Say what was wrong, and end without waiting for anything."""
    sys.stderr.write("\n".join((what, *more)) + "\n")
    if status == 3:
        faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(status)


# --- what was asked, and what became of it ---------------------------------------------------


@attrs.frozen
class Asked:
    """A request that can be judged."""

    prompt: list[int]
    params: SamplingParams

    def judge(self, outcome: object) -> str:
        """The name of its end, unless that is wrong."""
        if isinstance(outcome, tszmq.Completion):
            self.check(outcome.token_ids, outcome.logprobs, outcome.finish_reason)
            return str(outcome.finish_reason)
        if not isinstance(outcome, EXPECTED):
            raise Wrong(f"{self.prompt} ended with {outcome!r}")
        if not str(outcome):
            raise Wrong(f"{type(outcome).__name__} without a word of why")
        partial = getattr(outcome, "partial", None)
        if partial is not None:
            self.check(partial.token_ids, partial.logprobs, None)
        return type(outcome).__name__

    def check(self, ids: Sequence[int], logprobs: Sequence[float] | None, end: str | None) -> None:
        """They are the predicted ones; all of them, if that is how it ended."""
        if list(ids) != expected_tokens(self.prompt, len(ids)):
            raise Wrong(f"{self.prompt} ({self.params.max_tokens} tokens) gave {list(ids)[:50]}")
        if end not in (None, "abort", "length"):
            raise Wrong(f"nobody asked for the end {end!r}")
        if end == "length" and len(ids) != self.params.max_tokens:
            raise Wrong(f"{len(ids)} tokens of {self.params.max_tokens}, and no error")
        if logprobs is not None and len(logprobs) != len(ids):
            raise Wrong(f"{len(logprobs)} logprobs beside {len(ids)} tokens")


def ask(chance: random.Random, tokens: int = 0) -> Asked:
    """Some request."""
    prompt = [chance.randrange(1, 1000) for _ in range(chance.randrange(1, 20))]
    count = tokens or chance.choice([1, 5, 20, 60, 150])
    return Asked(prompt, SamplingParams(max_tokens=count, logprobs=chance.random() < 0.3))


class Watch:
    """When each call began and has to be back, the kills, and what came of everything."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.kills = self.restarts = 0
        self.latest = 0.0
        self.delays: list[float] = []  # from a kill to an error it caused
        self._kills: list[list[float]] = [[] for _ in range(ENGINES)]
        self._due: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """The block is one call, and is back in that time."""
        name = threading.current_thread().name
        due = time.monotonic() + (NO_TIMEOUT if seconds is None else seconds)
        self._due[name] = due + SLACK
        try:
            yield
        finally:
            del self._due[name]
            with self._lock:
                self.latest = max(self.latest, time.monotonic() - due)

    def check_calls(self) -> None:
        """Fail when a call is not back."""
        for name, due in list(self._due.items()):
            if time.monotonic() > due:
                fail(f"a call of {name} does not return", 3, *self.wrong)

    def ended(self, end: str) -> None:
        """One request has ended so."""
        with self._lock:
            self.ends[end] += 1

    def killed(self, index: int) -> None:
        """That engine is killed now."""
        self.kills += 1
        self._kills[index].append(time.monotonic())

    def died(self, error: tszmq.EngineDead, placed: float) -> None:
        """A request that was placed then has this error now; measured from the kill between."""
        now = time.monotonic()
        if error.engine_index is None:
            return
        for killed in self._kills[error.engine_index]:
            if placed < killed:
                with self._lock:
                    self.delays.append(now - killed)
                return

    def run(self, work: Callable[..., object], *args: object) -> None:
        """A thread's life: do that over and over; what is wrong ends everything."""
        chance = random.Random(threading.current_thread().name)
        try:
            while not self.stop.is_set():
                work(self, chance, *args)
                self.calls[work.__name__] += 1
        except BaseException:
            self.wrong.append(f"{threading.current_thread().name}: {traceback.format_exc()}")
            self.stop.set()


# --- what callers do ---------------------------------------------------------------------------


def settle(
    watch: Watch,
    asked: Asked,
    seconds: float | None,
    call: Callable[[], object],
    placed: Sequence[float] = (),
) -> None:
    """Make one call for one request, and judge its end.

    ``placed``: where the call puts the time at which the request had its engine.
    """
    with watch.within(seconds):
        try:
            outcome: object = call()
        except tszmq.TszmqError as error:
            outcome = error
            if isinstance(error, tszmq.EngineDead) and placed:
                watch.died(error, placed[0])
    watch.ended(asked.judge(outcome))
    breathe(watch, [outcome])


def breathe(watch: Watch, outcomes: Sequence[object]) -> None:
    """When all engines are dead, do not spin."""
    if any(isinstance(outcome, tszmq.EngineDead) for outcome in outcomes):
        watch.stop.wait(0.1)


def generate(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked, seconds = ask(chance), chance.choice([0.0, 0.05, 1.0, 3.0])
    settle(
        watch,
        asked,
        seconds,
        lambda: client.generate(asked.prompt, asked.params, timeout=seconds),
    )


def generate_without_timeout(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = ask(chance)
    settle(watch, asked, None, lambda: client.generate(asked.prompt, asked.params))


def generate_pinned(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked, rank = ask(chance, chance.choice([20, 400])), chance.randrange(ENGINES)

    placed: list[float] = []

    def request() -> tszmq.Completion:
        if chance.random() < 0.3:
            return client.generate(
                asked.prompt, asked.params, data_parallel_rank=rank, timeout=8, request_id="pinned"
            )
        stream = client.stream(
            asked.prompt, asked.params, data_parallel_rank=rank, timeout=8, request_id="pinned"
        )
        placed.append(time.monotonic())
        return stream.result()

    def call() -> tszmq.Completion:
        try:
            done = request()
        except tszmq.EngineDead as error:
            if error.engine_index != rank:
                raise Wrong(f"pinned to {rank}: {error}") from error
            raise
        if (done.engine_index, done.request_id) != (rank, "pinned"):
            raise Wrong(f"pinned to {rank}, served by {done.engine_index}")
        return done

    settle(watch, asked, 8, call, placed)


def read(stream: tszmq.RequestStream, limit: int | None = None) -> list[int]:
    """Chunk by chunk; after the end there is nothing more."""
    ids: list[int] = []
    for chunk in itertools.islice(stream, limit):
        ids += chunk.token_ids
        if chunk.completion_tokens != len(ids):
            raise Wrong(f"{chunk.completion_tokens} tokens so far, {len(ids)} were read")
    return ids


def read_stream(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked, rank = ask(chance), chance.choice([None, *range(ENGINES)])
    placed: list[float] = []

    def call() -> tszmq.Completion:
        with client.stream(
            asked.prompt, asked.params, data_parallel_rank=rank, timeout=8
        ) as stream:
            placed.append(time.monotonic())
            ids = read(stream)
            if next(stream, None) is not None:
                raise Wrong("a chunk after the last one")
            done = stream.result(0)
            if list(done.token_ids) != ids:
                raise Wrong(f"chunks gave {ids}, the result {done.token_ids}")
            return done

    settle(watch, asked, 8, call, placed)


def leave_stream(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = ask(chance, LONG)

    def call() -> tszmq.Completion:
        with client.stream(asked.prompt, asked.params, timeout=8) as stream:
            read(stream, chance.randrange(4))
        return stream.result(0)

    settle(watch, asked, 8, call)


def drop_stream(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = ask(chance, LONG)
    with watch.within(8):
        try:
            stream = client.stream(asked.prompt, asked.params, timeout=8)
            asked.check(read(stream, chance.randrange(3)), None, None)
            cycle: list[Any] = [stream]
            cycle.append(cycle)
            watch.ended("dropped")
        except tszmq.TszmqError as error:
            watch.ended(asked.judge(error))
            breathe(watch, [error])
    watch.stop.wait(0.01)


_open: list[tszmq.RequestStream] = []


def stream_closed_elsewhere(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = ask(chance, LONG)

    def call() -> tszmq.Completion:
        stream = client.stream(asked.prompt, asked.params, timeout=8)
        _open.append(stream)
        if chance.random() < 0.5:
            read(stream)
        return stream.result()

    settle(watch, asked, 8, call)


def close_streams(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    watch.stop.wait(0.02)
    while _open:
        with watch.within(0):
            _open.pop().close()


def many(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = [ask(chance) for _ in range(chance.randrange(1, 60))]
    prompts, params = [a.prompt for a in asked], [a.params for a in asked]
    with watch.within(4):
        results = client.generate_many(
            prompts,
            params,
            timeout=4,
            errors="return",
            max_inflight=chance.choice([None, 1, 9]),
            progress=lambda done, total: None,
        )
    for one, result in zip(asked, results, strict=True):
        watch.ended(one.judge(result))
    breathe(watch, results)


def many_or_error(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = [ask(chance) for _ in range(8)]
    with watch.within(4):
        try:
            results = client.generate_many(
                [a.prompt for a in asked], [a.params for a in asked], timeout=4
            )
        except tszmq.TszmqError as error:
            if not isinstance(error, EXPECTED):
                raise
            watch.ended(f"{type(error).__name__} of a batch")
            breathe(watch, [error])
            return
    for one, result in zip(asked, results, strict=True):
        watch.ended(one.judge(result))


def as_completed(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = [ask(chance) for _ in range(20)]
    limit = chance.choice([None, 5])
    seen: set[int] = set()
    outcomes: list[object] = []
    with watch.within(4):
        results = client.as_completed(
            iter([a.prompt for a in asked]), [a.params for a in asked], timeout=4, errors="return"
        )
        for index, result in itertools.islice(results, limit):
            watch.ended(asked[index].judge(result))
            outcomes.append(result)
            if index in seen:
                raise Wrong(f"prompt {index} ended twice")
            seen.add(index)
    breathe(watch, outcomes)
    if limit is None and len(seen) != len(asked):
        raise Wrong(f"{len(seen)} of {len(asked)} prompts ended")


def stream_many(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = [ask(chance) for _ in range(20)]
    ids: list[list[int]] = [[] for _ in asked]
    ends: dict[int, str] = {}
    with watch.within(4):
        chunks = client.stream_many(
            [a.prompt for a in asked], [a.params for a in asked], timeout=4, errors="return"
        )
        for index, chunk in chunks:
            if index in ends:
                raise Wrong(f"prompt {index} goes on after its end, {ends[index]}")
            if isinstance(chunk, Exception):
                ends[index] = asked[index].judge(chunk)
                continue
            ids[index] += chunk.token_ids
            if chunk.finish_reason is not None:
                asked[index].check(ids[index], None, chunk.finish_reason)
                ends[index] = chunk.finish_reason
    if len(ends) != len(asked):
        raise Wrong(f"{len(ends)} of {len(asked)} prompts ended")
    for end in ends.values():
        watch.ended(end)
    if "EngineDead" in ends.values():
        watch.stop.wait(0.1)


def labelled(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    asked = ask(chance, LONG)
    label = f"label {chance.randrange(3)}"
    settle(
        watch,
        asked,
        8,
        lambda: client.generate(asked.prompt, asked.params, timeout=8, request_id=label),
    )


def abort(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    watch.stop.wait(0.03)
    with watch.within(0):
        if chance.random() < 0.02:
            client.abort_all()
        else:
            client.abort(f"label {chance.randrange(3)}")


def look(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    with watch.within(0):
        health = client.health()
        if sorted(health) != list(range(ENGINES)) or len(client.engines) != ENGINES:
            raise Wrong(f"engines are missing: {health}")
        for index in range(ENGINES):
            load = client.load(index)
            if client.inflight(index) < 0 or (load is not None and load.num_running < 0):
                raise Wrong(f"engine {index}: {load}")
        assert client.is_alive in (True, False)
        look_inside(client)
    watch.stop.wait(0.005)


def look_inside(client: tszmq.Client) -> None:
    """What must hold at every moment at which another thread can look."""
    with client._session.shared.state as flights:
        routing = flights.routing
        placed = [routing.inflight(index) for index in range(ENGINES)]
        loads = [routing.load(index) for index in range(ENGINES)]
        requests = len(flights.requests)
    if sum(placed) != requests:
        raise Wrong(f"{placed} places for {requests} requests")
    for count, load in zip(placed, loads, strict=True):
        if not count and load is not None and (load.num_running or load.num_waiting):
            raise Wrong(f"an idle engine shows {load}")


def utility(watch: Watch, chance: random.Random, client: tszmq.Client) -> None:
    who = chance.choice([None, *range(ENGINES)])
    with watch.within(1):
        try:
            answer = client.is_sleeping(engine_index=who, timeout=1)
            if answer is not False and (who is not None or any(answer.values())):
                raise Wrong(f"is_sleeping of {who} answered {answer!r}")
        except (tszmq.EngineDead, tszmq.DeadlineExceeded, tszmq.UnsupportedField) as error:
            watch.ended(f"{type(error).__name__} of a call")
    watch.stop.wait(0.02)


CROWD = (
    (generate, 4),
    (generate_without_timeout, 3),
    (generate_pinned, 6),
    (read_stream, 4),
    (leave_stream, 2),
    (drop_stream, 2),
    (stream_closed_elsewhere, 2),
    (close_streams, 1),
    (many, 1),
    (many_or_error, 1),
    (as_completed, 1),
    (stream_many, 1),
    (labelled, 1),
    (abort, 1),
    (look, 1),
    (utility, 1),
)


# --- what happens to the engines ---------------------------------------------------------------


class Tormentor:
    """Everything that can become of one engine, one after the other."""

    def __init__(self, watch: Watch, client: tszmq.Client, index: int, unmutes: bool) -> None:
        self.watch = watch
        self.client = client
        self.fleet = client.fleet
        self.index = index
        self._unmutes = unmutes
        self._chance = random.Random(random.random())
        self._faults = (
            *[self.restart] * 3,
            self.kill_twice,
            self.kill_while_it_starts,
            self.stop,
            self.stop_until_given_up,
            self.pause,
            self.mute,
            self.one_bad_message,
            self.only_bad_messages,
            self.raise_,
            self.crash,
            self.terminate,
        )

    def torment(self, watch: Watch, chance: random.Random) -> None:
        fault = self._chance.choice(self._faults)
        self.watch.faults[fault.__name__.strip("_")] += 1
        fault()
        if not self._is_alive():
            self.restart()
        self.wait(0.5, 2.5)

    def wait(self, least: float, most: float) -> None:
        self.watch.stop.wait(self._chance.uniform(least, most))

    def say(self, command: str) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self.fleet.send(self.index, command)

    def _is_alive(self) -> bool:
        return self.client.engines[self.index].alive

    def _epoch(self) -> int:
        with self.client._session.shared.state as flights:
            return flights.engines[self.index].epoch

    def restart(self) -> None:
        """Kill it, start another, and wait until that serves."""
        self.fleet.cont(self.index)
        self.watch.killed(self.index)
        self.fleet.kill(self.index)
        epoch = self._epoch()
        self.fleet.restart(self.index)
        self.watch.restarts += 1
        deadline = time.monotonic() + COMING_BACK
        pause = threading.Event()
        while self._epoch() == epoch or not self._is_alive():
            if time.monotonic() > deadline:
                readiness = self.client._session.shared.readiness.text
                raise Wrong(f"engine {self.index} was restarted and is not served: {readiness}")
            pause.wait(0.01)

    def kill_twice(self) -> None:
        self.restart()
        self.restart()

    def kill_while_it_starts(self) -> None:
        self.watch.killed(self.index)
        self.fleet.restart(self.index)
        self.wait(0.0, 0.8)
        self.restart()

    def stop(self) -> None:
        self.fleet.stop(self.index)
        self.wait(0.1, 1.0)
        if self._chance.random() < 0.7:
            self.fleet.cont(self.index)
        else:
            self.restart()

    def stop_until_given_up(self) -> None:
        """And it lives on, and goes on talking, as a dead one."""
        self.fleet.stop(self.index)
        self.wait(SILENCE + 1.0, SILENCE + 1.5)
        self.fleet.cont(self.index)
        self.wait(0.2, 0.3)

    def pause(self) -> None:
        self.say("pause")
        self.wait(0.1, 0.6)
        self.say("resume")

    def mute(self) -> None:
        """What it says is lost. Where the wire counts tokens the client sees that; where it
        does not, a muted engine must not be heard again."""
        self.say("mute")
        self.wait(0.05, 0.5)
        if self._unmutes:
            self.say("unmute")
            self.wait(0.05, 0.3)
        self.restart()  # an end that was lost never comes

    def one_bad_message(self) -> None:
        self.say(self._chance.choice(["garbage c1", "garbage 93010203,00ff", "garbage ddffffffff"]))

    def only_bad_messages(self) -> None:
        self.say("pause")
        for _ in range(6):
            self.say("garbage c1ff")
        self.wait(0.2, 0.5)
        self.say("resume")  # if it was not believed dead: what came between was readable
        self.wait(0.1, 0.2)

    def raise_(self) -> None:
        self.say("raise because it was told to")
        self._wait_for_exit()
        self.restart()

    def crash(self) -> None:
        self.say("exit 3")
        self._wait_for_exit()
        self.restart()

    def terminate(self) -> None:
        self.fleet.interrupt(self.index)
        self._wait_for_exit()
        self.restart()

    def _wait_for_exit(self) -> None:
        deadline = time.monotonic() + 5.0
        pause = threading.Event()
        while self.fleet.exit_codes[self.index] is None and time.monotonic() < deadline:
            pause.wait(0.01)

    def heal(self) -> None:
        """The end: it is to be well, whatever it was."""
        self.fleet.cont(self.index)
        for command in ("unmute", "resume"):
            self.say(command)
        if not self._is_alive():
            self.restart()


# --- the whole ---------------------------------------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for(what: str, condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds * UNIT
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            fail(f"at the end, after {seconds * UNIT} s: {what}", 3)
        pause.wait(0.02)


def held_by_engine(client: tszmq.Client, index: int) -> int:
    """Requests that the engine works on, as it says itself."""
    client.fleet.send(index, "stats")
    stats: dict[str, Any] = {}
    while "running" not in stats:  # its first line says that it is ready
        line = client.fleet.read_line(index)
        if not line:
            raise Wrong(f"engine {index} ended at the end")
        stats = json.loads(line)
    held: int = stats["running"] + stats["waiting"]
    return held


def start_all(watch: Watch, client: tszmq.Client, threads: int) -> list[threading.Thread]:
    """The callers; as many as wanted, in the proportions of ``CROWD``."""
    works = [work for work, count in CROWD for _ in range(count)]
    crowd = []
    for number, work in zip(range(threads), itertools.cycle(works), strict=False):
        name = f"{work.__name__}-{number}"
        crowd.append(threading.Thread(target=watch.run, args=(work, client), name=name))
    for thread in crowd:
        thread.daemon = True
        thread.start()
    return crowd


def rage(watch: Watch, client: tszmq.Client, options: argparse.Namespace) -> dict[str, int]:
    """Everything at once until the time is over. Returns the resident sizes, in bytes."""
    crowd = start_all(watch, client, options.threads)
    tormentors = [
        Tormentor(watch, client, index, options.protocol == "tokenspeed")
        for index in range(ENGINES)
    ]
    torture = [
        threading.Thread(
            target=watch.run, args=(each.torment,), name=f"tormentor-{each.index}", daemon=True
        )
        for each in tormentors
    ]
    for thread in torture:
        thread.start()
    end = time.monotonic() + options.seconds
    warm_at = time.monotonic() + min(10.0, options.seconds / 3)
    warm = most = 0
    while not watch.stop.wait(0.1) and time.monotonic() < end:
        watch.check_calls()
        most = max(most, resident())
        if time.monotonic() < warm_at:
            warm = most
    watch.stop.set()
    while any(thread.is_alive() for thread in (*crowd, *torture)):
        watch.check_calls()
        next(t for t in (*torture, *crowd) if t.is_alive()).join(0.1)
    if watch.wrong:
        fail("something was wrong", 1, *watch.wrong)
    for each in tormentors:
        each.heal()
    return {"warm": warm, "most": most}


def check_rest(watch: Watch, client: tszmq.Client) -> None:
    """Well again: every engine serves, and nothing is left of all that."""
    _open.clear()
    gc.collect()
    for index in range(ENGINES):
        asked = ask(random.Random(index), 20)
        done = client.generate(asked.prompt, asked.params, data_parallel_rank=index, timeout=20)
        if asked.judge(done) != "length":
            raise Wrong(f"engine {index} is well and ended with {done.finish_reason}")
    indices = range(ENGINES)
    wait_for("requests in flight", lambda: not any(client.inflight(index) for index in indices))
    look_inside(client)
    with client._session.shared.state as flights:
        left = (len(flights.requests), len(flights.places.everyone()))
    if any(left):
        raise Wrong(f"left behind: {left}")
    wait_for(
        "engines still generate what nobody waits for",
        lambda: not any(held_by_engine(client, index) for index in indices),
    )


def summary(watch: Watch, options: argparse.Namespace, sizes: dict[str, int]) -> dict[str, Any]:
    delays = sorted(watch.delays) or [0.0]
    return {
        "protocol": options.protocol,
        "debug": CHECKED,
        "seconds": options.seconds,
        "requests": sum(watch.ends.values()),
        "kills": watch.kills,
        "restarts": watch.restarts,
        "ends": dict(watch.ends.most_common()),
        "faults": dict(watch.faults.most_common()),
        "calls": dict(watch.calls.most_common()),
        "kill_to_error_s": {
            "measured": len(watch.delays),
            "median": round(statistics.median(delays), 4),
            "p99": round(delays[int(0.99 * (len(delays) - 1))], 4),
            "longest": round(delays[-1], 4),
        },
        "latest_return_s": round(watch.latest, 3),
        "rss_mib": {name: round(size / 2**20, 1) for name, size in sizes.items()},
    }


def main(options: argparse.Namespace) -> None:
    faulthandler.enable()
    unraisable: list[Any] = []
    sys.unraisablehook = lambda args: unraisable.append((args.exc_value, args.object))
    threading.excepthook = lambda args: unraisable.append((args.exc_value, args.thread))
    random.seed(options.seed)
    before = descriptors()
    client = tszmq.Client.embedded(
        ENGINES,
        protocol=options.protocol,
        step_ms=2,
        max_num_seqs=64,
        max_inflight=150,
        silence_timeout=SILENCE * UNIT,
        capture=True,
        log_level="CRITICAL",
    )
    watch = Watch()
    sizes = rage(watch, client, options)
    check_rest(watch, client)
    client.close()
    client.fleet.terminate()
    wait_for(
        "threads of the closed client",
        lambda: not [t for t in threading.enumerate() if t.name.startswith("tszmq-")],
    )
    wait_for(
        f"descriptors: {before} before, {descriptors()} after",
        lambda: gc.collect() >= 0 and descriptors() <= before,
    )
    sizes["end"] = resident()
    result = summary(watch, options, sizes)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    if unraisable:
        fail(f"in threads and finalizers: {unraisable[:5]}")
    if sizes["most"] - sizes["warm"] > RSS_GROWTH:
        fail(f"the process has grown: {sizes}")
    idle = [work.__name__ for work, _ in CROWD if not watch.calls[work.__name__]]
    if idle and options.threads >= len(CROWD):
        fail(f"some did nothing at all: {idle}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--protocol", choices=("tokenspeed", "vllm"), default="tokenspeed")
    parser.add_argument("--threads", type=int, default=sum(count for _, count in CROWD))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
