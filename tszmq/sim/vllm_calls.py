"""vLLM's UTILITY calls, and the pausing that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tszmq.sim.request import EngineFault, SimRequest
from tszmq.sim.scheduler import Scheduler
from tszmq.sim.vllm_output import ABORT, Writer, finish_row

__all__ = ["Calls"]

_MODES = ("abort", "wait", "keep")

Messages = list[list[bytes]]


class Calls:
    """Answers calls; stands between incoming requests and the scheduler while paused.

    Args:
        scheduler: What is paused.
        writer: Writes the answers.
    """

    def __init__(self, scheduler: Scheduler, writer: Writer) -> None:
        self._scheduler = scheduler
        self._writer = writer
        self._mode: str | None = None
        self._asleep = False
        self._held: list[SimRequest] = []
        self._waiting_calls: list[int] = []
        self._sent: Messages = []
        self.rejects_new = False

    @property
    def holds_steps(self) -> bool:
        """Whether nothing runs: paused with "keep", or asleep."""
        return self._mode == "keep" or self._asleep

    @property
    def num_held(self) -> int:
        """Requests that came while paused."""
        return len(self._held)

    def admit(self, request: SimRequest) -> None:
        """Queue a request; while paused it is kept aside until the engine resumes."""
        if self._mode is None:
            self._scheduler.add(request)
        else:
            self._held.append(request)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget these requests at once; nobody is told."""
        unknown = set(self._scheduler.abort(request_ids, at_once=True))
        self._held = [request for request in self._held if request.request_id not in unknown]

    def abort_all(self) -> Messages:
        """End every unfinished request with "abort"."""
        ids = self._scheduler.unfinished()
        self._scheduler.abort(ids, at_once=True)
        ids += [request.request_id for request in self._held]
        self._held = []
        return [self._writer.ends([finish_row(name, ABORT) for name in ids])] if ids else []

    def drained(self) -> Messages:
        """Answers that waited for the last running request."""
        if not (self._waiting_calls and self._scheduler.idle):
            return []
        calls, self._waiting_calls = self._waiting_calls, []
        return [self._writer.utility(call_id, None, None) for call_id in calls]

    def call(self, call_id: int, name: Any, args: Any) -> Messages:
        """Run a call; the messages to send, its answer last unless that has to wait."""
        self._sent = []
        try:
            result = self._method(name)(*args)
        except EngineFault:
            raise
        except Exception as exc:  # as the real one: whatever it was, the caller is told
            failure = f"Call to {name} method failed: {exc}"
            return [*self._sent, self._writer.utility(call_id, failure, None)]
        if self._mode == "wait" and name in ("pause_scheduler", "pause_generation", "sleep"):
            self._waiting_calls.append(call_id)
            return self.drained()
        return [*self._sent, self._writer.utility(call_id, None, result)]

    def _method(self, name: Any) -> Callable[..., Any]:
        methods: dict[str, Callable[..., Any]] = {
            "collective_rpc": self._collective_rpc,
            "get_supported_tasks": lambda: ["generate"],
            "get_weight_version": lambda: self._writer.weights,
            "is_scheduler_paused": lambda: self._mode is not None,
            "is_sleeping": lambda: self._asleep or self._mode is not None,
            "pause_generation": self._pause_generation,
            "pause_scheduler": self._pause,
            "reset_encoder_cache": lambda: None,
            "reset_mm_cache": lambda: None,
            "reset_prefix_cache": self._reset_prefix_cache,
            "resume_scheduler": self._resume,
            "set_weight_version": self._set_weight_version,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }
        if name not in methods:
            raise AttributeError(f"'EngineCoreProc' object has no attribute {name!r}")
        return methods[name]

    def _collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
    ) -> list[Any]:
        """An echo: what the one worker was asked."""
        return [{"method": method, "args": args, "kwargs": kwargs or {}}]

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in _MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self._sent += self.abort_all()
        self._mode = mode
        if clear_cache:
            self._scheduler.forget_prefixes()

    def _pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._pause(mode, clear_cache)
        self.rejects_new = mode != "keep"

    def _resume(self) -> None:
        self._mode = None
        self.rejects_new = False
        held, self._held = self._held, []
        for request in held:
            self._scheduler.add(request)

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._pause(mode, level >= 1)
        self._asleep = level >= 1

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        if tags is None or set(tags) - {"scheduling"}:
            self._asleep = False
        if not self._asleep:
            self._resume()
        return not self._asleep

    def _reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if self._scheduler.active_pages:
            return False  # pages in use stay
        self._scheduler.forget_prefixes()
        return True

    def _set_weight_version(self, version: str) -> None:
        self._writer.weights = version
