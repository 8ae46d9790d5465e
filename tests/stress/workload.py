"""Everything at once against four engines, until the time is over: then nothing may be left.

    python -m tests.stress.workload SECONDS [STALL_SECONDS]

Exit status 0: all went well. 1: something was wrong, in words. 3: a thread made no progress
for STALL_SECONDS; every thread's stack is on standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import tszmq
from tszmq import SamplingParams
from tszmq.ownership import CHECKED
from tszmq.sim import expected_tokens

ENGINES = 4
MAX_TOKENS = 16
LONG = SamplingParams(max_tokens=80)
PROTOCOL = os.environ.get("TSZMQ_STRESS_PROTOCOL", "tokenspeed")
REFUSED = (
    SamplingParams(max_tokens=5, logprobs=True)
    if PROTOCOL == "tokenspeed"
    else SamplingParams(max_tokens=5, temperature=5.0)
)
"""What TokenSpeed's engines here refuse, with an abort that has no tokens; what the client does
not send to vLLM's, which would go deaf of it."""
REFUSALS = (tszmq.RequestRejected, tszmq.InvalidRequest)
END_SECONDS = 20.0 * float(os.environ.get("TSZMQ_TIME_UNIT", "1"))


class Wrong(Exception):
    """A result that must not be."""


class Crowd:
    """The threads, what each has done, and what went wrong in any."""

    def __init__(self, client: tszmq.Client) -> None:
        self.client = client
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.done: Counter[str] = Counter()
        self._moved: dict[str, float] = {}
        self._threads: list[threading.Thread] = []

    def add(self, work: Callable[[Crowd, random.Random, str], object], count: int) -> None:
        """Have so many threads do that over and over."""
        for number in range(count):
            name = f"{work.__name__}-{number}"
            thread = threading.Thread(target=self._run, args=(work, name), name=name, daemon=True)
            self._threads.append(thread)

    def _run(self, work: Callable[[Crowd, random.Random, str], object], name: str) -> None:
        chance = random.Random(name)
        try:
            while not self.stop.is_set():
                work(self, chance, name)
                self.done[work.__name__] += 1
                self._moved[name] = time.monotonic()
        except BaseException:
            self.errors.append(f"{name}: {traceback.format_exc()}")
            self.stop.set()

    def run(self, seconds: float, stall: float) -> None:
        """Start them, watch them, and wait for all of them to end."""
        now = time.monotonic()
        self._moved = {thread.name: now for thread in self._threads}
        end = now + seconds
        for thread in self._threads:
            thread.start()
        while not self.stop.wait(0.05) and time.monotonic() < end:
            self._check_progress(stall)
        self.stop.set()
        while any(thread.is_alive() for thread in self._threads):
            self._check_progress(stall)
            self._threads[-1].join(0.02)
            self._threads.sort(key=threading.Thread.is_alive)

    def _check_progress(self, stall: float) -> None:
        for thread in self._threads:
            if thread.is_alive() and time.monotonic() - self._moved[thread.name] > stall:
                fail(f"{thread.name} made no progress for {stall} s", 3, *self.errors)


def fail(what: str, status: int = 1, *more: str) -> None:
    """Say what was wrong, and end without waiting for anything."""
    sys.stderr.write("\n".join((what, *more)) + "\n")
    if status == 3:
        faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(status)


# --- what the threads do ---------------------------------------------------------------------


def some_prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(1, 1000) for _ in range(chance.randrange(1, 20))]


def some_rank(chance: random.Random) -> int | None:
    return chance.choice([None, None, None, *range(ENGINES)])


def some_params(chance: random.Random) -> SamplingParams:
    return SamplingParams(max_tokens=chance.randrange(1, MAX_TOKENS))


def check(prompt: list[int], ids: Any, whole: int | None) -> None:
    """The tokens are those of the prompt; all of them, or a beginning."""
    if list(ids) != expected_tokens(prompt, len(ids)) or (whole is not None and len(ids) != whole):
        raise Wrong(f"prompt {prompt} gave {len(ids)} tokens for {whole}: {list(ids)[:20]}")


def generate(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompt, params, rank = some_prompt(chance), some_params(chance), some_rank(chance)
    done = crowd.client.generate(prompt, params, data_parallel_rank=rank)
    check(prompt, done.token_ids, params.max_tokens)
    if rank is not None and done.engine_index != rank:
        raise Wrong(f"pinned to {rank}, served by {done.engine_index}")


def generate_with_deadline(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompt = some_prompt(chance)
    try:
        done = crowd.client.generate(prompt, LONG, timeout=chance.random() * 0.05)
        check(prompt, done.token_ids, LONG.max_tokens)
    except tszmq.DeadlineExceeded as error:
        if error.partial is not None:
            check(prompt, error.partial.token_ids, None)


def generate_aborted(crowd: Crowd, chance: random.Random, name: str) -> None:
    """Somebody else aborts it by its label."""
    prompt = some_prompt(chance)
    done = crowd.client.generate(prompt, LONG, request_id=f"abort me {chance.randrange(2)}")
    check(prompt, done.token_ids, None if done.finish_reason == "abort" else LONG.max_tokens)


def abort(crowd: Crowd, chance: random.Random, name: str) -> None:
    crowd.stop.wait(0.005)
    crowd.client.abort(f"abort me {chance.randrange(2)}")
    if crowd.stop.is_set():
        for number in range(2):
            crowd.client.abort(f"abort me {number}")


def generate_refused(crowd: Crowd, chance: random.Random, name: str) -> None:
    try:
        crowd.client.generate(some_prompt(chance), REFUSED, data_parallel_rank=some_rank(chance))
    except REFUSALS:
        return
    raise Wrong("a request that the engine refuses gave a result")


def read_stream(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompt, params = some_prompt(chance), some_params(chance)
    ids: list[int] = []
    with crowd.client.stream(prompt, params, data_parallel_rank=some_rank(chance)) as stream:
        for chunk in stream:
            ids += chunk.token_ids
    check(prompt, ids, params.max_tokens)


def leave_stream(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompt = some_prompt(chance)
    ids: list[int] = []
    with crowd.client.stream(prompt, LONG, data_parallel_rank=some_rank(chance)) as stream:
        for chunk in itertools.islice(stream, chance.randrange(3)):
            ids += chunk.token_ids
    check(prompt, ids, None)
    check(prompt, stream.result(5).token_ids, None)


class Closes:
    """An object of the caller's whose finalizer closes a stream."""

    def __init__(self, stream: tszmq.RequestStream) -> None:
        self.stream = stream
        self.itself = self

    def __del__(self) -> None:
        self.stream.close()


def drop_stream(crowd: Crowd, chance: random.Random, name: str) -> None:
    """In a cycle, so that the collector finds it: in any thread, inside any block."""
    stream = crowd.client.stream(some_prompt(chance), LONG, data_parallel_rank=some_rank(chance))
    if chance.random() < 0.5:
        next(stream)
    cycle: list[Any] = [Closes(stream) if chance.random() < 0.5 else stream]
    cycle.append(cycle)
    if chance.random() < 0.05:
        gc.collect()
    crowd.stop.wait(0.005)


def drop_generator(crowd: Crowd, chance: random.Random, name: str) -> None:
    """A generator in the middle of its block, in a cycle."""
    prompt = some_prompt(chance)

    def read() -> Any:
        with crowd.client.stream(prompt, LONG) as stream:
            yield from stream

    reading = read()
    check(prompt, next(reading).token_ids, None)
    cycle: list[Any] = [reading]
    cycle.append(cycle)
    del reading
    if chance.random() < 0.05:
        gc.collect()
    crowd.stop.wait(0.005)


def bulk(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompts = [some_prompt(chance) for _ in range(chance.randrange(1, 60))]
    params = [REFUSED if chance.random() < 0.1 else some_params(chance) for _ in prompts]
    results = crowd.client.generate_many(
        prompts, params, errors="return", max_inflight=chance.choice([None, 1, 7])
    )
    for prompt, asked, result in zip(prompts, params, results, strict=True):
        if asked is REFUSED:
            if not isinstance(result, REFUSALS):
                raise Wrong(f"refused, and gave {result!r}")
        else:
            check(prompt, result.token_ids, asked.max_tokens)


def leave_bulk(crowd: Crowd, chance: random.Random, name: str) -> None:
    prompts = [some_prompt(chance) for _ in range(20)]
    results: Any = crowd.client.as_completed(prompts, SamplingParams(max_tokens=20))
    for index, done in itertools.islice(results, chance.randrange(10)):
        check(prompts[index], done.token_ids, 20)
    if chance.random() < 0.5:
        with contextlib.closing(results):
            pass


def look(crowd: Crowd, chance: random.Random, name: str) -> None:
    client = crowd.client
    health = client.health()
    if sorted(health) != list(range(ENGINES)) or not all(h.connected for h in health.values()):
        raise Wrong(f"an engine is gone: {health}")
    for index in range(ENGINES):
        client.inflight(index)
        client.load(index)
    if not client.is_alive or len(client.engines) != ENGINES:
        raise Wrong("the client is not alive")
    look_inside(client)
    crowd.stop.wait(0.003)


def look_inside(client: tszmq.Client) -> None:
    """What must hold at every moment at which another thread can look."""
    problems = []
    with client._session.shared.state as flights:
        routing = flights.routing
        for index in range(ENGINES):
            load, (count, pending, resident) = routing.load(index), routing.view(index)
            unstarted = sum(routing.unstarted(index).values())
            if count == 0 and load is not None and (load.num_running or load.num_waiting):
                problems.append(f"idle engine {index} shows {load}")
            if pending != unstarted or resident < 0 or (count == 0 and resident):
                problems.append(f"engine {index}: {count}, {pending} != {unstarted}, {resident}")
        placed = sum(routing.inflight(index) for index in range(ENGINES))
        if placed != len(flights.requests):
            problems.append(f"{placed} places for {len(flights.requests)} requests")
    if problems:
        raise Wrong("; ".join(problems))


def collect(crowd: Crowd, chance: random.Random, name: str) -> None:
    gc.collect()
    crowd.stop.wait(0.05)


# --- the end -----------------------------------------------------------------------------------


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + END_SECONDS
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            fail(f"at the end, after {END_SECONDS} s: {what}", 3)
        pause.wait(0.01)


def held_by_engine(client: tszmq.Client, number: int) -> int:
    client.fleet.send(number, "stats")
    stats: dict[str, Any] = {}
    while "running" not in stats:  # its first line says that it is ready
        stats = json.loads(client.fleet.read_line(number))
    held: int = stats["running"] + stats["waiting"]
    return held


def main(seconds: float, stall: float) -> None:
    sys.setswitchinterval(0.0005)  # more interleavings than at the usual 5 ms
    unraisable: list[Any] = []
    sys.unraisablehook = unraisable.append
    client = tszmq.Client.embedded(
        ENGINES,
        protocol=PROTOCOL,
        step_ms=0,
        max_num_seqs=64,
        no_output_logprobs=True,
        capture=True,
        log_level="ERROR",
    )
    crowd = Crowd(client)
    for work, count in (
        (generate, 5),
        (generate_with_deadline, 1),
        (generate_aborted, 2),
        (abort, 1),
        (generate_refused, 1),
        (read_stream, 3),
        (leave_stream, 2),
        (drop_stream, 3),
        (drop_generator, 2),
        (bulk, 2),
        (leave_bulk, 1),
        (look, 1),
        (collect, 1),
    ):
        crowd.add(work, count)
    crowd.run(seconds, stall)
    if crowd.errors:
        fail("something went wrong", 1, *crowd.errors)
    gc.collect()
    indices = range(ENGINES)
    wait_for("in flight", lambda: not any(client.inflight(index) for index in indices))
    look_inside(client)
    with client._session.shared.state as flights:
        left = (len(flights.requests), len(flights.places.everyone()))
        views = [flights.routing.view(index) for index in indices]
    loads = [client.load(index) for index in indices]
    if left != (0, 0) or views != [(0, 0, 0)] * ENGINES:
        fail(f"left behind: {left}, {views}")
    if any(load is None or load != load.idle() for load in loads):
        fail(f"idle engines show {loads}")
    wait_for(
        "an engine still generates what nobody waits for",
        lambda: not any(held_by_engine(client, index) for index in indices),
    )
    client.close()
    wait_for(
        "threads of the closed client",
        lambda: not [t for t in threading.enumerate() if t.name.startswith("tszmq-")],
    )
    if unraisable:
        fail(f"in finalizers: {[(each.exc_value, each.object) for each in unraisable[:5]]}")
    idle = [work for work, count in crowd.done.items() if not count]
    if len(crowd.done) != 13 or idle:
        fail(f"some did nothing at all: {crowd.done}")
    sys.stdout.write(f"{'checked' if CHECKED else 'plain'} {dict(crowd.done)}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 15.0)
