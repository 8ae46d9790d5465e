"""A continuous-batching scheduler that makes up its tokens.

No sockets, no clock, no protocol. The rules, all in this file:

* FIFO admission, while there is a slot, KV pages for the prompt and the token in the making, and
  prefill budget. Preempted requests are older than any waiting one, so they go in front.
* Each running request makes a token a step (up to ``spec_tokens`` after the first).
* A request that needs a page when none is free preempts the youngest running one, itself at
  worst. What the victim had made is kept, its prompt and tokens are prefilled again.
* The load is sampled after planning and before the step's finishes are committed.
* An aborted request keeps its place until its next token is due, and then goes in silence.
* A finished id counts as in flight until the next step begins, or ``forget_finished``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable

from tszmq.sim.prefix import PrefixCache
from tszmq.sim.request import EngineFault, SimLoad, SimRequest, SimStep, expected_logprobs

__all__ = ["Scheduler"]

_TOKEN_LIMIT = 2**31  # token ids are int32
_NO_LOGPROBS: list[float] = []  # shared: nobody changes a step's columns


class Scheduler:
    """The scheduler of one engine. One thread uses it.

    Args:
        vocab_size: Token ids are below it.
        max_num_seqs: Running requests at most.
        kv_pages: Usable KV pages.
        page_size: Tokens a page.
        max_model_len: Prompt and output tokens of one request at most.
        reserve: Tokens of the context that no request gets.
        length_first: Whether a stop token in the last place ends with "length".
        eos_token_id: The model's end token, or None for a model that never ends.
        prefill_tokens_per_step: Prompt tokens one step can take, or None for no bound.
        spec_tokens: Tokens that one request makes in a step at most.
        prefix_cache: Whether whole pages of a prompt seen before count as cached.
    """

    def __init__(
        self,
        vocab_size: int = 32000,
        *,
        max_num_seqs: int = 256,
        kv_pages: int = 1000,
        page_size: int = 64,
        max_model_len: int = 8192,
        reserve: int = 2,
        length_first: bool = True,
        eos_token_id: int | None = None,
        prefill_tokens_per_step: int | None = None,
        spec_tokens: int = 1,
        prefix_cache: bool = False,
    ) -> None:
        sizes = (vocab_size, max_num_seqs, kv_pages, page_size, max_model_len, spec_tokens)
        if min(*sizes, prefill_tokens_per_step or 1) < 1:
            raise ValueError("sizes must be at least 1")
        self.vocab_size = vocab_size
        self.context = min(max_model_len, kv_pages * page_size) - reserve
        self.load = SimLoad()
        self._length_first = length_first
        self._max_num_seqs = max_num_seqs
        self._page_size = page_size
        self._total_pages = self._free_pages = kv_pages
        self._eos = frozenset() if eos_token_id is None else frozenset((eos_token_id,))
        self._prefill_budget = prefill_tokens_per_step or sys.maxsize
        self._spec_tokens = spec_tokens
        self._prefix_cache = PrefixCache(page_size, kv_pages) if prefix_cache else None
        self._rounds = 0
        self._running: list[SimRequest] = []
        self._waiting: deque[SimRequest] = deque()
        self._known: dict[str, SimRequest] = {}
        self._finished: set[str] = set()
        self._logprobs = expected_logprobs(256)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def active_pages(self) -> int:
        """KV pages held."""
        return self._total_pages - self._free_pages

    def unfinished(self) -> list[str]:
        """Ids that run or wait, those of aborted requests aside."""
        return [r.request_id for r in (*self._running, *self._waiting) if not r.aborted]

    def forget_finished(self) -> None:
        """Let the ids of the last step's finishes be used again."""
        for request_id in self._finished:
            self._known.pop(request_id, None)
        self._finished.clear()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def in_flight(self, request_id: str) -> bool:
        """Whether the id may not be used: unfinished, or finished in the last step."""
        return request_id in self._known

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            EngineFault: What a real engine dies of: an id in flight, an empty prompt, one longer
                than the context, a token id outside int32.
        """
        if request.request_id in self._known:
            raise EngineFault(f"request id {request.request_id!r} is in flight")
        prompt = request.prompt
        if not prompt:
            raise EngineFault("tokens must not be empty")
        if max(prompt) >= _TOKEN_LIMIT or min(prompt) < -_TOKEN_LIMIT:
            raise EngineFault("token id outside int32")
        room = self.context - len(prompt)
        if room < 0 or len(prompt) // self._page_size >= self._total_pages:
            raise EngineFault(f"prompt of {len(prompt)} tokens, the context holds {self.context}")
        asked = request.max_new_tokens
        request.limit = max(1, room if asked is None else min(asked, room))
        request.prompt_tokens = len(prompt)
        request.base = sum(prompt) * 31 + len(prompt)
        if not request.ignore_eos:
            request.stops = self._eos | request.stop_token_ids
        if request.stream:
            request.every = request.stream_interval
            request.phase = int(request.every > 1)
        else:
            request.every = 50
        request.simple = not (
            request.stops or request.logprobs or request.every != 1 or self._spec_tokens > 1
        )
        self._known[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str], *, at_once: bool = False) -> list[str]:
        """Emit nothing for these ids from now on.

        Args:
            request_ids: Ids, known or not.
            at_once: Free slot and pages now, not when the next token would be due.

        Returns:
            Those that are not in flight here.
        """
        unknown = []
        for request_id in request_ids:
            request = self._known.get(request_id)
            if request is None or request_id in self._finished:
                unknown.append(request_id)
                continue
            request.aborted = True
            request.limit = request.generated  # so that its next token ends it
            if at_once:
                (self._running if request.pages else self._waiting).remove(request)
                self._release(request)
                del self._known[request_id]
        return unknown

    def refusal(self, request: SimRequest) -> SimStep:
        """A step of one row, "abort", for a request that is never queued."""
        request.prompt_tokens = len(request.prompt)
        return SimStep(self.load, [request], [[]], ["abort"], [0], [[]])

    def step(self) -> SimStep:
        """Plan, sample the load, make a token for every running request, commit the finishes."""
        self.forget_finished()
        self._plan()
        self.load = SimLoad(
            len(self._running), len(self._waiting), self.active_pages, self._total_pages
        )
        out = SimStep(self.load)
        kept = []
        vocab = self.vocab_size
        for request in self._running:
            made = request.generated + 1
            if request.simple and request.width and made < request.limit:
                # What _make_tokens and _put_row come down to for nearly all rows.
                request.generated = request.sent = made
                request.room -= 1
                out.requests.append(request)
                out.tokens.append([(request.base + 7 * made - 7) % vocab])
                out.reasons.append("")
                out.completion.append(made)
                out.logprobs.append(_NO_LOGPROBS)
            elif request.width:
                reason = self._make_tokens(request)
                made = request.generated
                if reason or made % request.every == request.phase or made == 1:
                    if not request.aborted:
                        self._put_row(out, request, reason)
                    if reason:
                        self._finished.add(request.request_id)
                        self._release(request)
                        continue
            kept.append(request)
        self._running = kept
        return out

    def _make_tokens(self, request: SimRequest) -> str:
        start = request.generated
        end = start + request.width
        reason = ""
        if request.stops:
            base, vocab = request.base, self.vocab_size
            for k in range(max(start, request.min_new_tokens), end):
                if (base + 7 * k) % vocab in request.stops:
                    end = k + 1
                    reason = "stop"
                    break
        if end >= request.limit and (end > request.limit or self._length_first or not reason):
            end = request.limit
            reason = "length"
        request.generated = end
        request.room -= end - start
        return reason

    def _put_row(self, out: SimStep, request: SimRequest, reason: str) -> None:
        sent, made = request.sent, request.generated
        request.sent = made
        base, vocab = request.base, self.vocab_size
        if made - sent == 1:
            tokens = [(base + 7 * sent) % vocab]
        else:
            tokens = [(base + 7 * k) % vocab for k in range(sent, made)]
        out.requests.append(request)
        out.tokens.append(tokens)
        out.reasons.append(reason)
        out.completion.append(made)
        if request.logprobs:
            if made > len(self._logprobs):
                self._logprobs = expected_logprobs(2 * made)
            out.logprobs.append(self._logprobs[sent:made])
        else:
            out.logprobs.append(_NO_LOGPROBS)

    def _plan(self) -> None:
        self._rounds += 1
        budget = self._prefill_budget
        running, spec = self._running, self._spec_tokens
        index = 0
        while index < len(running):  # preemption shortens it from the end
            request = running[index]
            if request.unfilled:
                budget = self._prefill(request, budget)
            else:
                width = 1
                if spec > 1:  # how many drafts are accepted varies, predictably
                    left = request.limit - request.generated
                    width = max(1, min(1 + (self._rounds + index) % spec, left))
                request.width = width
                if request.room < width and not self._grow(request):
                    break
            index += 1
        self._admit(budget)

    def _prefill(self, request: SimRequest, budget: int) -> int:
        taken = min(request.unfilled, budget)
        request.unfilled -= taken
        request.width = 0 if request.unfilled else 1
        return budget - taken

    def _grow(self, request: SimRequest) -> bool:
        """Pages for the request's next tokens; False when it was preempted itself."""
        size = self._page_size
        needed = (request.width - request.room + size - 1) // size
        while self._free_pages < needed:
            victim = self._running.pop()
            self._release(victim)
            self._waiting.appendleft(victim)
            if victim is request:
                return False
        self._hold(request, needed)
        return True

    def _admit(self, budget: int) -> None:
        size = self._page_size
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._max_num_seqs and budget > 0:
            request = waiting[0]
            length = request.prompt_tokens + request.generated
            needed = length // size + 1  # the token in the making included
            if needed > self._free_pages:
                break
            waiting.popleft()
            running.append(request)
            request.room = -length
            self._hold(request, needed)
            request.unfilled = length
            if self._prefix_cache is not None and not request.generated:
                request.cached_tokens = self._prefix_cache.admit(request.prompt)
                request.unfilled -= request.cached_tokens
            budget = self._prefill(request, budget)

    def _hold(self, request: SimRequest, pages: int) -> None:
        self._free_pages -= pages
        request.pages += pages
        request.room += pages * self._page_size

    def _release(self, request: SimRequest) -> None:
        self._free_pages += request.pages
        request.pages = request.room = 0
