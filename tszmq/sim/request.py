"""What goes into the simulator's scheduler and what comes out of it.

Token ``k`` (from 0) of prompt ``p`` is ``(sum(p) * 31 + 7 * k + len(p)) % vocab_size``; its
logprob is ``-0.5 - 0.001 * k`` as a float32 number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

__all__ = [
    "EngineFault",
    "SimLoad",
    "SimRequest",
    "SimStep",
    "expected_logprobs",
    "expected_tokens",
]


class EngineFault(RuntimeError):
    """What makes a real engine raise in its loop: the engine dies of it."""


def expected_tokens(prompt: Sequence[int], n: int, vocab_size: int = 32000) -> list[int]:
    """The first ``n`` tokens that any simulator engine answers ``prompt`` with."""
    base = sum(prompt) * 31 + len(prompt)
    return [(base + 7 * k) % vocab_size for k in range(n)]


def expected_logprobs(n: int) -> list[float]:
    """The logprobs of the first ``n`` tokens, whatever the prompt: float32 numbers."""
    return array("f", (-0.5 - 0.001 * k for k in range(n))).tolist()


@attrs.define(eq=False)
class SimRequest:
    """One request: what was asked for, and how far it is.

    Attributes:
        request_id: The wire id.
        prompt: Token ids.
        max_new_tokens: Finish "length" at this many; None fills the context.
        stop_token_ids: The matching token is output, then "stop". Not looked at with ignore_eos.
        min_new_tokens: The first this many tokens stop nothing.
        stream: False: token 1, every 50th, and the rest with the finish.
        stream_interval: With stream, tokens 1, n + 1, 2n + 1, ... and the rest with the finish.
        logprobs: Whether rows carry logprobs.
        tag: The protocol's own; not looked at here.
    """

    request_id: str
    prompt: Sequence[int]
    max_new_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stream: bool = True
    stream_interval: int = 1
    logprobs: bool = False
    tag: object = None

    prompt_tokens: int = attrs.field(init=False, default=0)
    cached_tokens: int = attrs.field(init=False, default=0)
    generated: int = attrs.field(init=False, default=0)
    sent: int = attrs.field(init=False, default=0)
    aborted: bool = attrs.field(init=False, default=False)
    pages: int = attrs.field(init=False, default=0)
    # Tokens that still fit into the held pages.
    room: int = attrs.field(init=False, default=0)
    # Tokens left to prefill, and tokens to make in this step.
    unfilled: int = attrs.field(init=False, default=0)
    width: int = attrs.field(init=False, default=0)
    base: int = attrs.field(init=False, default=0)
    limit: int = attrs.field(init=False, default=0)
    stops: frozenset[int] = attrs.field(init=False, default=frozenset())
    # A row is due when generated % every == phase.
    every: int = attrs.field(init=False, default=1)
    phase: int = attrs.field(init=False, default=0)
    # A token a step, a row a token, and nothing but the length to end it.
    simple: bool = attrs.field(init=False, default=False)


@attrs.frozen
class SimLoad:
    """A load sample. ``running`` does not count the waiting ones; pages are in KV pages."""

    running: int = 0
    waiting: int = 0
    active_pages: int = 0
    total_pages: int = 0


@attrs.define(eq=False)
class SimStep:
    """What one step puts out: columns of equal length, one place a row.

    Attributes:
        load: Sampled before this step's finishes were committed.
        requests: Whose row it is; prompt and cached counts are found there.
        tokens: New token ids.
        reasons: "" while running, else "stop", "length" or "abort".
        completion: Tokens made so far.
        logprobs: Beside ``tokens`` for requests that asked, else empty lists.
    """

    load: SimLoad
    requests: list[SimRequest] = attrs.field(factory=list)
    tokens: list[list[int]] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    completion: list[int] = attrs.field(factory=list)
    logprobs: list[list[float]] = attrs.field(factory=list)
