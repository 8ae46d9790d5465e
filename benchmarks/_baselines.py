"""Ways of receiving that the client is compared with, each written as well as its design allows.

Each takes a connected ``BareFrontend``, the prompts, their lengths and the number of batches
that will come, sends the requests, and returns the tokens of each request by its number.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import attrs
import msgspec
import ormsgpack
import zmq

from benchmarks._frontend import BareFrontend, bare_rids

Outputs = dict[int, list[int]]


def _submit(frontend: BareFrontend, prompts: list[list[int]], lengths: list[int]) -> list[str]:
    rids = bare_rids(len(prompts))
    for rid, prompt, length in zip(rids, prompts, lengths, strict=True):
        frontend.add(rid, prompt, length)
    return rids


def floor(
    frontend: BareFrontend, prompts: list[list[int]], lengths: list[int], batches: int
) -> None:
    """One thread, recv and unpackb, nothing else: what any client pays."""
    _submit(frontend, prompts, lengths)
    recv, unpackb = frontend.output.recv, ormsgpack.unpackb
    for _ in range(batches):
        unpackb(recv())


class Columns(msgspec.Struct, array_like=True, tag="BatchTokenIDOutSlim", gc=False):
    """The message as msgspec is told of it."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    logprobs: list[list[float]]
    logprob_ids: list[list[int]]
    engine_index: int
    num_running: int
    num_waiting: int
    active: int
    total: int


class Row(msgspec.Struct, gc=False):
    """One request's share of a message."""

    rid: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def vllm_way(
    frontend: BareFrontend, prompts: list[list[int]], lengths: list[int], batches: int
) -> Outputs:
    """vLLM's SyncMPClient and the loop over its outputs, on this wire.

    Its rows are Structs that msgspec decodes; here they are made of the decoded columns, in
    the thread, in one C loop.
    """
    outputs: queue.Queue[list[Row]] = queue.Queue()
    decode = msgspec.msgpack.Decoder(Columns).decode

    def receive() -> None:
        poller = zmq.Poller()
        poller.register(frontend.output, zmq.POLLIN)
        for _ in range(batches):
            poller.poll()
            frames = frontend.output.recv_multipart(copy=False)
            batch = decode(frames[0].buffer)
            rows = map(
                Row,
                batch.rids,
                batch.output_ids,
                batch.finished_reasons,
                batch.prompt_tokens,
                batch.completion_tokens,
                batch.cached_tokens,
            )
            outputs.put_nowait(list(rows))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    rids = _submit(frontend, prompts, lengths)
    unfinished: dict[str, list[int]] = {rid: [] for rid in rids}
    finished: dict[str, list[int]] = {}
    while unfinished:
        for row in outputs.get():
            tokens = unfinished[row.rid]
            tokens += row.token_ids
            if row.finish_reason:
                finished[row.rid] = unfinished.pop(row.rid)
    thread.join()
    return {number: finished[rid] for number, rid in enumerate(rids)}


@attrs.define
class Chunk:
    """What a stream's queue holds."""

    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def simple_queues(
    frontend: BareFrontend, prompts: list[list[int]], lengths: list[int], batches: int
) -> Outputs:
    """A SimpleQueue a stream, a thread a stream: how one would first write it."""
    rids = bare_rids(len(prompts))
    queues: dict[str, Any] = {rid: queue.SimpleQueue() for rid in rids}
    outputs: Outputs = {}

    def receive() -> None:
        for _ in range(batches):
            _, ids, tokens, reasons, prompt, done, cached, *_ = ormsgpack.unpackb(
                frontend.output.recv()
            )
            chunks = map(Chunk, tokens, reasons, prompt, done, cached)
            for rid, chunk in zip(ids, chunks, strict=True):
                queues[rid].put(chunk)

    def read(number: int) -> None:
        tokens: list[int] = []
        get = queues[rids[number]].get
        while True:
            chunk = get()
            tokens += chunk.token_ids
            if chunk.finish_reason:
                break
        outputs[number] = tokens

    threads = [threading.Thread(target=receive)]
    threads += [threading.Thread(target=read, args=(number,)) for number in range(len(rids))]
    for thread in threads:
        thread.start()
    _submit(frontend, prompts, lengths)
    for thread in threads:
        thread.join()
    return outputs
