"""An engine for benchmarks: TokenSpeed's side of the wire, every batch encoded beforehand.

It registers, takes requests, and serves one of these modes:

    burst   waits for ``--total`` requests, encodes every step, says ``ready`` on standard
            output, waits for a line on standard input, and sends at full speed
    stamps  the same, but a step every ``--step-ms``, encoded when it is due; each token is the
            time of that in microseconds, see ``stamp``
    silent  reads requests and never answers

It ignores the requests' ``stream``: each running request gets a token a step, so that clients
that ask differently are compared on the same messages. It runs as a program of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import ormsgpack
import zmq

VOCABULARY = 32000
_MODEL_LEN = 1 << 20
_STAMP_RANGE = 1 << 31


def tokens_of(number: int, count: int) -> list[int]:
    """What request ``number`` (the first token of its prompt) is answered."""
    return [(number * 7919 + at * 10473) % VOCABULARY for at in range(count)]


def stamp() -> int:
    """Now in microseconds, as a token id."""
    return time.monotonic_ns() // 1000 % _STAMP_RANGE


def age_of(token: int) -> float:
    """Microseconds since a stamp."""
    return (time.monotonic_ns() // 1000 - token) % _STAMP_RANGE


def schedule(lengths: list[int], running: int) -> Iterator[list[tuple[int, int]]]:
    """The steps: each a list of (place in ``lengths``, position of the token). First come,
    first served, at most ``running`` at once."""
    waiting = deque(range(len(lengths)))
    rows: list[tuple[int, int]] = []
    while True:
        rows = [(place, at + 1) for place, at in rows if at + 1 < lengths[place]]
        while waiting and len(rows) < running:
            rows.append((waiting.popleft(), 0))
        if not rows:
            return
        yield rows


class Sender:
    """The engine's sockets, and the requests that came."""

    def __init__(self, handshake: str, index: int = 0) -> None:
        self._context = zmq.Context()
        self._identity = index.to_bytes(2, "little")
        self._index = index
        hello = self._dealer(handshake)
        hello.send(_status("HELLO"))
        addresses = ormsgpack.unpackb(hello.recv_multipart()[-1])["addresses"]
        hello.send(_status("READY"))
        self._input = self._dealer(addresses["inputs"][0])
        self._input.send(ormsgpack.packb(_REGISTRATION))
        self._output = self._context.socket(zmq.PUSH)
        self._output.connect(addresses["outputs"][0])
        self.rids: list[str] = []
        self.numbers: list[int] = []
        self.prompts: list[int] = []
        self.lengths: list[int] = []

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        dealer.connect(address)
        return dealer

    def take(self, total: int) -> None:
        """Wait for that many requests."""
        while len(self.rids) < total:
            kind, payload = self._input.recv_multipart()[:2]
            if kind == b"\x00":
                values = ormsgpack.unpackb(payload)
                self.rids.append(values[1])
                self.numbers.append(values[4][0])
                self.prompts.append(len(values[4]))
                self.lengths.append(values[5][0])

    def ignore(self) -> None:
        """Read and throw away for ever."""
        while True:
            self._input.recv_multipart()

    def messages(self, running: int, stamped: bool = False) -> Iterator[bytes]:
        """The batches of all steps."""
        answers = [
            tokens_of(number, 0 if stamped else length)
            for number, length in zip(self.numbers, self.lengths, strict=True)
        ]
        for rows in schedule(self.lengths, running):
            now = stamp()
            yield self._batch(
                rows, [[now] if stamped else [answers[place][at]] for place, at in rows]
            )

    def _batch(self, rows: list[tuple[int, int]], tokens: list[list[int]]) -> bytes:
        lengths = self.lengths
        empty: list[list[int]] = [[]] * len(rows)
        columns: list[Any] = [
            "BatchTokenIDOutSlim",
            [self.rids[place] for place, _ in rows],
            tokens,
            ["length" if at + 1 == lengths[place] else "" for place, at in rows],
            [self.prompts[place] for place, _ in rows],
            [at + 1 for _, at in rows],
            [0] * len(rows),
            empty,
            empty,
            self._index,
            len(rows),
            0,
            1000 + rows[0][1] // 64,
            4000,
        ]
        return ormsgpack.packb(columns)

    def send(self, message: bytes) -> None:
        """One batch; waits for room."""
        self._output.send(message)


def _status(status: str) -> bytes:
    return ormsgpack.packb(
        {"status": status, "local": True, "headless": True, "parallel_config_hash": None}
    )


_REGISTRATION = {
    "max_model_len": _MODEL_LEN,
    "num_gpu_blocks": 1 << 20,
    "prefix_granularity": 64,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "vllm_version": "benchmark",
    "world_size": 1,
    "data_parallel_size": 1,
    "data_parallel_rank": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 0,
    "instance_id": "benchmark",
    "kv_cache_size_tokens": 1 << 26,
}


def main() -> None:
    """Serve one client, until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("handshake")
    parser.add_argument("mode", choices=("burst", "stamps", "silent"))
    parser.add_argument("--total", type=int, default=1)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    go = threading.Event()
    threading.Thread(target=_listen, args=(go,), daemon=True).start()
    sender = Sender(args.handshake)
    if args.mode == "silent":
        sender.ignore()
    sender.take(args.total)
    if args.mode == "burst":
        messages: Any = list(sender.messages(args.running))
    else:
        messages = sender.messages(args.running, stamped=True)
    print("ready", flush=True)
    go.wait()
    for message in _paced(messages, args.step_ms / 1000):
        sender.send(message)
    threading.Event().wait()


def _listen(go: threading.Event) -> None:
    """The first line starts the sending, the end of standard input ends the process."""
    for _ in sys.stdin:
        go.set()
    os._exit(0)


def _paced(messages: Any, step: float) -> Iterator[bytes]:
    steps, due = iter(messages), time.monotonic()
    while True:
        if step:
            due += step
            time.sleep(max(0.0, due - time.monotonic()))
        message = next(steps, None)  # a stamped one is encoded here
        if message is None:
            return
        yield message


if __name__ == "__main__":
    main()
