"""The whole way over ipc: an engine process sends prepared batches at full speed.

Every row of the table is a way of receiving the same messages, each run in a process of its
own; the time is from the engine's first batch to the last finish seen by a caller, the CPU
that of the receiving process with libzmq's thread. Content is verified after each run.

    floor                  one thread: recv, unpackb, nothing else
    vllm's way             a thread with Poller, recv_multipart(copy=False) and a typed msgspec
                           decode into a queue.Queue; the main thread loops over row Structs
    simple queues          a thread with unpackb, an attrs object a row into a SimpleQueue a
                           stream; a thread a stream reads it
    generate_many, generate, stream, stream_many: the client; a thread a request for the two
                           in the middle, one thread for the others

``tokens/s`` and ``CPU`` are ratios to the floor of the same load, ``v CPU`` and ``v tokens/s``
to vllm's way: medians of interleaved rounds with quartiles. Loads: ``256`` requests in flight
from the first to the last batch; ``1024`` requests of different lengths in flight, of which
the engine runs 256 at a time; ``wide``: the same with all 1024 in each batch.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._baselines import floor, simple_queues, vllm_way
from benchmarks._frontend import BareFrontend, engine
from benchmarks._harness import Bench, in_child, interleave, paired, short_directory, start
from benchmarks._sender import schedule, tokens_of
from tszmq import Client, SamplingParams

RUNNING = {"256": 256, "1024": 256, "wide": 1024}
PROMPT_TOKENS = 16

Outputs = dict[int, list[int]]
"""Request number to its tokens."""


def prompt_of(number: int) -> list[int]:
    """Its first token tells the engine which request it is."""
    return [number, *range(1, PROMPT_TOKENS)]


def lengths_of(load: str, steps: int) -> list[int]:
    """How many tokens each request asks for."""
    if load == "256":
        return [steps] * 256
    spread = random.Random(7)
    return [spread.randint(steps // 8, steps * 3 // 8) for _ in range(1024)]


# --- the client's ways -------------------------------------------------------------------------


def generate_many(client: Client, lengths: list[int]) -> Outputs:
    """One thread, one call."""
    results = client.generate_many(
        [prompt_of(number) for number in range(len(lengths))],
        [SamplingParams(max_tokens=length) for length in lengths],
        max_inflight=len(lengths),
    )
    return {number: done.token_ids for number, done in enumerate(results)}


def generate(client: Client, lengths: list[int]) -> Outputs:
    """A thread a request."""

    def one(number: int) -> list[int]:
        params = SamplingParams(max_tokens=lengths[number])
        return client.generate(prompt_of(number), params).token_ids

    return _in_threads(len(lengths), one)


def stream(client: Client, lengths: list[int]) -> Outputs:
    """A thread a request, which reads chunks."""

    def one(number: int) -> list[int]:
        tokens: list[int] = []
        with client.stream(prompt_of(number), SamplingParams(max_tokens=lengths[number])) as chunks:
            for chunk in chunks:
                tokens += chunk.token_ids
        return tokens

    return _in_threads(len(lengths), one)


def stream_many(client: Any, lengths: list[int]) -> Outputs:
    """One thread that reads the chunks of all."""
    outputs: Outputs = {number: [] for number in range(len(lengths))}
    prompts = [prompt_of(number) for number in range(len(lengths))]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    for index, chunk in client.stream_many(prompts, params, max_inflight=len(lengths)):
        outputs[index] += chunk.token_ids
    return outputs


def _in_threads(count: int, one: Callable[[int], list[int]]) -> Outputs:
    outputs: Outputs = {}

    def run(number: int) -> None:
        outputs[number] = one(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


CLIENT_WAYS: dict[str, Callable[[Client, list[int]], Outputs]] = {
    "generate_many": generate_many,
    "generate": generate,
    "stream": stream,
    "stream_many": stream_many,
}
BASELINES: dict[str, Callable[[BareFrontend, list[list[int]], list[int], int], Outputs | None]] = {
    "floor": floor,
    "vllm's way": vllm_way,
    "simple queues": simple_queues,
}


# --- one run, in a process of its own ---------------------------------------------------------


def run(way: str, load: str, steps: int) -> dict[str, float]:
    """One way, one load, once."""
    lengths = lengths_of(load, steps)
    with short_directory() as directory:
        if way in BASELINES:
            outputs, seconds, cpu = _run_baseline(way, directory, lengths, RUNNING[load])
        else:
            outputs, seconds, cpu = _run_client(way, directory, lengths, RUNNING[load])
    if outputs is not None:
        for number, length in enumerate(lengths):
            assert outputs[number] == tokens_of(number, length), f"request {number} is wrong"
    return {"seconds": seconds, "cpu": cpu, "tokens": sum(lengths)}


def _run_client(
    way: str, directory: Path, lengths: list[int], running: int
) -> tuple[Outputs | None, float, float]:
    bound = Client.bind(f"ipc://{directory}/h", connect_timeout=30)
    options = {"total": len(lengths), "running": running}
    with engine(bound.endpoints.handshake, "burst", **options) as sender:
        with bound.connect() as client:
            sender.go_when_ready()
            outputs = CLIENT_WAYS[way](client, lengths)
            return outputs, *sender.used()


def _run_baseline(
    way: str, directory: Path, lengths: list[int], running: int
) -> tuple[Outputs | None, float, float]:
    frontend = BareFrontend(directory)
    options = {"total": len(lengths), "running": running}
    with engine(frontend.handshake, "burst", **options) as sender:
        frontend.connect()
        sender.go_when_ready()
        batches = sum(1 for _ in schedule(lengths, running))
        prompts = [prompt_of(number) for number in range(len(lengths))]
        outputs = BASELINES[way](frontend, prompts, lengths, batches)
        used = sender.used()
        frontend.close()
        return outputs, *used


def main() -> None:
    """Measure every way on every load."""
    bench = start(__file__, __doc__, ("--one", {"nargs": 3, "metavar": ("WAY", "LOAD", "STEPS")}))
    if bench.args.one:
        way, load, steps = bench.args.one
        print(json.dumps(run(way, load, int(steps))))
        return
    steps = 60 if bench.quick else 1200
    ways = ["floor", "vllm's way", "generate_many"]
    everyone = [*ways, "generate", "stream", "simple queues"]
    if hasattr(Client, "stream_many"):
        everyone.append("stream_many")
    _measure(bench, "256", everyone, steps)
    _measure(bench, "1024", ways, steps)
    if not bench.quick:
        _measure(bench, "wide", ways, steps)
    bench.finish()


def _measure(bench: Bench, load: str, ways: list[str], steps: int) -> None:
    def one(way: str) -> dict[str, float]:
        result: dict[str, float] = in_child(__file__, "--one", way, load, str(steps))
        return result

    samples = interleave({way: partial(one, way) for way in ways}, bench.rounds(9, 1))
    speed = {way: [s["tokens"] / s["seconds"] for s in samples[way]] for way in ways}
    cpu = {way: [s["cpu"] / s["tokens"] for s in samples[way]] for way in ways}
    tokens = samples["floor"][0]["tokens"]
    table = bench.table(
        f"{load} requests, {tokens:,.0f} tokens: ratios, median of rounds (quartiles)",
        *("way", "ktokens/s", "CPU s/Mtoken", "tokens/s", "CPU", "v tokens/s", "v CPU"),
    )
    for way in ways:
        table.add(
            way,
            sorted(speed[way])[len(speed[way]) // 2] / 1e3,
            sorted(cpu[way])[len(cpu[way]) // 2] * 1e6,
            paired(speed[way], speed["floor"]),
            paired(cpu[way], cpu["floor"]),
            paired(speed[way], speed["vllm's way"]),
            paired(cpu[way], cpu["vllm's way"]),
        )
    bench.show(table)
    _judge(bench, load, speed, cpu)


def _judge(
    bench: Bench, load: str, speed: dict[str, list[float]], cpu: dict[str, list[float]]
) -> None:
    def rate(way: str, base: str) -> float:
        return paired(speed[way], speed[base]).median

    bench.judge(
        f"generate_many, {load}: tokens/s to floor", rate("generate_many", "floor"), least=0.8
    )
    share = paired(cpu["generate_many"], cpu["vllm's way"]).median
    bench.judge(f"generate_many, {load}: CPU to vllm's way", share, most=1 / 3)
    if "generate" in speed:
        bench.judge(
            "256 threads in generate: tokens/s to floor", rate("generate", "floor"), least=0.7
        )
        bench.judge(
            "256 streaming threads: tokens/s to floor", rate("stream", "floor"), least=1 / 3
        )
        bench.judge(
            "256 streaming threads: tokens/s to simple queues",
            rate("stream", "simple queues"),
            least=4.0,
        )


if __name__ == "__main__":
    main()
