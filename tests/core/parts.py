"""Small things that the tests of the core share."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any

import attrs

from tszmq.core.flights import Flights
from tszmq.core.ids import WireIds
from tszmq.core.policy import Policy
from tszmq.core.request import Group, Request
from tszmq.types import EngineInfo, EngineLoad
from tszmq.wire.base import Counts, EngineBatch, OneEach

NONCE = "0123456789abcdef"


def load(running: int = 0, waiting: int = 0, usage: float = 0.0, requests: int | None = None):
    """A report; counted TokenSpeed's way unless the number of requests is given."""
    return EngineLoad(
        running, waiting, usage, max(running, waiting) if requests is None else requests
    )


def engine_info(index: int) -> EngineInfo:
    """A registration of which only the index matters."""
    return EngineInfo(index, True, 8192, 4000, 64, "bfloat16", "1")


class Waiter:
    """Somebody who waits, and counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Place:
    """A client's state with its engines, and what makes requests and batches for it."""

    def __init__(
        self,
        engines: int = 1,
        *,
        policy: Policy | None = None,
        max_inflight: int | None = None,
    ) -> None:
        self.ids = WireIds(NONCE)
        self.bound = max_inflight or 0
        self.flights = Flights(self.ids, policy, max_inflight)
        self.epochs = [self.flights.register(engine_info(i), 0.0) for i in range(engines)]

    def request(self, prompt_tokens: int = 3, **options: Any) -> Request:
        """A request that is not admitted."""
        gate = options.pop("gate", None) or Waiter()
        return Request(self.ids.new(), prompt_tokens, gate, 0.0, **options)

    def admit(self, pinned: int | None = None, prompt_tokens: int = 3, **options: Any) -> Request:
        """A request that has its place."""
        request = self.request(prompt_tokens, **options)
        assert self.flights.admit(request, pinned, 1.0, request.gate)
        return request

    def batch(self, *rows: tuple[Any, ...], **columns: Any) -> EngineBatch:
        """Rows of (request or id, new tokens[, finish reason]); engine 0 unless said."""
        return EngineBatch(
            engine_index=columns.pop("engine", 0),
            request_ids=[getattr(row[0], "wire_id", row[0]) for row in rows],
            token_ids=[row[1] for row in rows],
            finished={at: row[2] for at, row in enumerate(rows) if len(row) > 2 and row[2]},
            **columns,
        )

    def step(self, *rows: tuple[Any, ...], counts: list[int], **columns: Any) -> EngineBatch:
        """A batch of (request or id, its one new token[, finish reason]), in the form that is
        stored at once."""
        logprobs = columns.get("logprobs")
        batch = self.batch(
            *[(row, [token], *reason) for row, token, *reason in rows],
            completion_tokens=counts,
            **columns,
        )
        batch.one_each = OneEach(
            array("I", [row[1] for row in rows]),
            None if logprobs is None else array("d", [value for [value] in logprobs]),
            Counts.of(counts),
        )
        batch.token_ids, batch.logprobs, batch.completion_tokens = [], None, None
        return batch

    def tokens_of(self, request: Request) -> list[int]:
        """What came for it so far."""
        self.deal_out()
        return request.tokens.tolist()

    def deal_out(self) -> None:
        """Tokens that are kept together go to their requests."""
        self.flights.reveal()
        for rows in self.flights._rows.values():
            rows.spill()

    def apply(self, *rows: tuple[Any, ...], now: float = 2.0, **columns: Any):
        """Apply one batch of such rows and show readers what it brought, as the receiver does
        when no more batches are ready."""
        applied = self.flights.apply(self.batch(*rows, **columns), now)
        return attrs.evolve(applied, wakes=[*self.flights.reveal(), *applied.wakes])

    def check(self) -> None:
        """Requests and places agree, and every sum is what the requests say."""
        self.deal_out()
        routing = self.flights.routing
        placed = [(i, each) for i in routing.indices() for each in routing.inflight_ids(i)]
        assert sorted(placed) == sorted(
            (request.engine_index, wire_id) for wire_id, request in self.flights.requests.items()
        )
        for index in routing.indices():
            here = [r for r in self.flights.requests.values() if r.engine_index == index]
            started = [request for request in here if request.tokens]
            assert routing.view(index) == (
                len(here),
                sum(request.prompt_tokens for request in here if not request.tokens),
                sum(request.prompt_tokens + len(request.tokens) for request in started),
            )
            figures = routing.load(index)
            if figures is not None and not here:
                assert figures == figures.idle()


class Interrupted(BaseException):
    """Raised where a signal handler might."""


def interrupt_everywhere(
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> int:
    """Run a call once for each point at which CPython may run a signal handler in it.

    These are the entry of each Python function and the return of each C function that it
    calls: what the profiler reports. The call is interrupted at the first such point, then
    afresh at the second, and so on until it comes through.

    Args:
        prepare: Sets up afresh; returns the call, and what looks at it afterwards.

    Returns:
        How many points there were.
    """
    for point in range(10_000):
        call, verify = prepare()
        left = point

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            if event in ("call", "c_return"):
                if left == 0:
                    sys.setprofile(None)
                    raise Interrupted
                left -= 1

        try:
            sys.setprofile(profile)
            try:
                call()
            finally:
                sys.setprofile(None)
            came_through = True
        except Interrupted:
            came_through = False
        verify()
        if came_through:
            return point
    raise AssertionError("it never came through")


def group(wake_at: int = 1) -> Group:
    """A group whose thread wants to be woken at that many finished requests."""
    made = Group(Waiter())
    made.wake_at = wake_at
    return made
