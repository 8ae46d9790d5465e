"""What stays in memory: for a waiting request, for a token that came, and after many requests.

``waiting`` counts the bytes that Python holds for a request of ``generate_many``, and for a
stream, that nobody has answered, the prompt and libzmq's buffers apart; beside it the same for
what one might give each request instead. ``token`` is what a token takes until its request is
dropped, to a list of ints. ``RSS`` is the memory of the process after the last of many equal
rounds of requests to that after the second: 1 is flat.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import resource
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._frontend import engine
from benchmarks._harness import Bench, short_directory, start
from benchmarks.decode import make_load, new_flights
from tszmq import Client, SamplingParams, TszmqError
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

PROMPT = list(range(1000))


def bytes_each(make: Callable[[], object], count: int, settle: Callable[[], object]) -> float:
    """Bytes of Python memory that each object keeps."""
    settle()
    gc.collect()
    tracemalloc.start()
    made = [make() for _ in range(count)]
    settle()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (size - sys.getsizeof(made)) / count


def waiting(bench: Bench) -> None:
    """Streams of an engine that never answers."""
    count = 200 if bench.quick else 5000
    with ExitStack() as stack:
        bound = Client.bind(f"ipc://{stack.enter_context(short_directory())}/h", connect_timeout=30)
        stack.enter_context(engine(bound.endpoints.handshake, "silent"))
        client = stack.enter_context(bound.connect())
        streams = [client.stream(PROMPT) for _ in range(100)]  # tables grow once

        def settle() -> None:
            time.sleep(1)  # the control thread sends what was posted

        each = bytes_each(lambda: client.stream(PROMPT), count, settle)
        del streams
        settle()
        batch = bytes_each(lambda: start_batch(client, count, settle), 1, settle) / count
    others: dict[str, Callable[[], object]] = {
        "queue.SimpleQueue": queue.SimpleQueue,
        "collections.deque": deque,
        "threading.Event": threading.Event,
        "queue.Queue": queue.Queue,
        "asyncio.Queue": asyncio.Queue,
    }
    sizes = {"tszmq, of generate_many": batch, "tszmq stream": each}
    sizes |= {name: bytes_each(make, count, gc.collect) for name, make in others.items()}
    table = bench.table(
        "A waiting request, beside its prompt: ratios to queue.Queue", "what", "bytes", "ratio"
    )
    for name, size in sizes.items():
        table.add(name, size, size / sizes["queue.Queue"])
    bench.show(table)
    bench.judge("a waiting request, of 600 bytes", batch / 600, most=1.0)
    bench.judge("a waiting stream, to queue.Queue", each / sizes["queue.Queue"], most=1.0)


def start_batch(client: Client, count: int, settle: Callable[[], object]) -> threading.Thread:
    """A bulk call of so many requests, none of which is answered."""

    def call() -> None:
        with suppress(TszmqError):
            client.generate_many([PROMPT] * count, max_inflight=count)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while client.inflight(0) < count:
        settle()
    return thread


def received(bench: Bench) -> None:
    """Tokens of requests that run."""
    count = 250 if bench.quick else 2000
    load = make_load(64, 1, False, "steady", count)
    flights, decoder = new_flights(load), TokenSpeedDecoder()
    gc.collect()
    tracemalloc.start()
    for message in load.messages:
        flights.apply(decoder.decode([message]), 0.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = 64 * count
    tracemalloc.start()
    lists: list[list[int]] = [[] for _ in range(64)]
    for step in range(count):
        for row in lists:
            row.append(1000 + step % 31000)
    naive, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    table = bench.table("A token that came: ratio to a list of ints", "what", "bytes", "ratio")
    table.add("tszmq", size / tokens, size / naive)
    table.add("list of ints", naive / tokens, 1.0)
    bench.show(table)
    bench.judge("a token, to a list of ints", size / naive, most=0.3)


def flat(bench: Bench) -> None:
    """RSS after rounds of the same requests."""
    rounds, requests = (3, 200) if bench.quick else (12, 4000)
    sizes = []
    with Client.embedded(1) as client:
        for _ in range(rounds):
            params = SamplingParams(max_tokens=32, ignore_eos=True)
            client.generate_many((PROMPT[:100] for _ in range(requests)), params)
            gc.collect()
            sizes.append(resident())
    table = bench.table(
        f"RSS after rounds of {requests:,} requests: ratio to the second", "round", "MB", "ratio"
    )
    for number, size in enumerate(sizes, 1):
        table.add(number, size / 1e6, size / sizes[1])
    bench.show(table)
    bench.judge("RSS at the end, to that after the second round", sizes[-1] / sizes[1], most=1.05)


def resident() -> float:
    """Bytes of this process in memory; the most it ever had, where the system tells no more."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return float(statm.read_text().split()[1]) * resource.getpagesize()
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    """All three."""
    bench = start(__file__, __doc__)
    waiting(bench)
    received(bench)
    flat(bench)
    bench.finish()


if __name__ == "__main__":
    main()
