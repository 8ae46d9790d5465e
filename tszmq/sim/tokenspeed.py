"""TokenSpeed's wire as the engine speaks it."""

from __future__ import annotations

import logging
import time
from typing import Any

from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError
from tszmq.sim.link import Link
from tszmq.sim.options import EngineOptions
from tszmq.sim.request import EngineFault, SimRequest, SimStep
from tszmq.sim.scheduler import Scheduler
from tszmq.sim.tokenspeed_request import Malformed, read_add, refusal_reason

__all__ = ["TokenSpeedSide"]

logger = logging.getLogger("tszmq.sim")

_TAG = "BatchTokenIDOutSlim"
_ADD, _ABORT = b"\x00", b"\x01"
_INIT_TIMEOUT_S = 600.0
# An abort that came before its request, or after its end, is remembered this long.
_PENDING_ABORT_S = 300.0


class TokenSpeedSide:
    """Reads requests and aborts, writes registration and batches.

    Args:
        options: The engine's.
        scheduler: Fed with what comes in.
    """

    says_dead_when_stopped = True

    def __init__(self, options: EngineOptions, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._pending_aborts: dict[str, float] = {}
        self._counts = {"adds": 0, "aborts": 0, "refused": 0, "malformed": 0}

    def connect(self, link: Link) -> None:
        """HELLO, INIT, READY, then the data sockets. See ``EngineSide``."""
        link.say(_status("HELLO"))
        inputs, outputs = _read_init(link.hear(_INIT_TIMEOUT_S))
        link.say(_status("READY"))
        if not inputs or not outputs:
            raise EngineFault("INIT did not carry both input and output addresses")
        link.open_input(inputs[0], pack(self.registration()))
        link.open_output(outputs[0])
        link.hang_up()

    def registration(self) -> dict[str, Any]:
        """The ready response: what the frontend learns about this engine."""
        options = self._options
        return {
            "max_model_len": options.max_model_len,
            "num_gpu_blocks": options.kv_pages + 1,  # one is reserved as the null page
            "prefix_granularity": options.page_size,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "multimodal_encoder_dtype": None,
            "vllm_version": "tokenspeed-0.1.1+sim",
            "world_size": options.dp_size,
            "data_parallel_size": options.dp_size,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": options.dp_rank,
            "max_num_seqs": options.max_num_seqs * options.dp_size,  # the whole group's
            "max_num_batched_tokens": options.prefill_tokens_per_step or 0,
            "instance_id": options.instance_id,
            "kv_cache_size_tokens": options.kv_pages * options.page_size,
            "kv_cache_max_concurrency": None,
            "kv_events_config": None,
        }

    def receive(self, frames: list[bytes]) -> list[list[bytes]]:
        """Take an add or an abort; what cannot be read is logged and dropped."""
        try:
            if len(frames) < 2:
                raise Malformed(f"needs at least 2 frames, got {len(frames)}")
            if frames[0] == _ADD:
                request, reason = self._read_add(frames[1])
            elif frames[0] == _ABORT:
                self._abort(_read_abort(frames[1]))
                return []
            else:
                raise Malformed(f"unknown type byte {frames[0]!r}")
        except (DecodeError, Malformed) as exc:
            self._counts["malformed"] += 1
            logger.warning("dropping malformed message: %s", exc)
            return []
        return self._add(request, reason)

    def _read_add(self, payload: bytes) -> tuple[SimRequest, str | None]:
        fields, params = read_add(unpack(payload))
        reason = refusal_reason(
            fields,
            params,
            vocab_size=self._options.vocab_size,
            logprobs_enabled=not self._options.no_output_logprobs,
        )
        interval = params["stream_interval"]
        request = SimRequest(
            fields["rid"],
            fields["input_ids"],
            params["max_new_tokens"],
            frozenset(params["stop_token_ids"] or ()),
            ignore_eos=params["ignore_eos"],
            stream=fields["stream"],
            stream_interval=1 if interval is None else interval,
            logprobs=fields["return_logprob"],
        )
        return request, reason

    def _add(self, request: SimRequest, reason: str | None) -> list[list[bytes]]:
        self._counts["adds"] += 1
        if self._scheduler.in_flight(request.request_id):
            raise EngineFault(f"request id {request.request_id!r} is in flight")
        if reason is not None:
            self._counts["refused"] += 1
            logger.warning("aborting invalid request %s: %s", request.request_id, reason)
            return self.batch(self._scheduler.refusal(request))
        self._scheduler.add(request)
        if self._pending_aborts:
            until = self._pending_aborts.pop(request.request_id, 0.0)
            if until > time.monotonic():  # it runs for one forward and says nothing
                self._scheduler.abort([request.request_id])
        return []

    def _abort(self, request_ids: list[str]) -> None:
        self._counts["aborts"] += len(request_ids)
        now = time.monotonic()
        pending = self._pending_aborts
        while pending and (oldest := next(iter(pending))) and pending[oldest] < now:
            del pending[oldest]
        for request_id in self._scheduler.abort(request_ids):
            pending.pop(request_id, None)  # so that the order is that of the times
            pending[request_id] = now + _PENDING_ABORT_S

    def ready(self) -> bool:
        """TokenSpeed's ranks never park."""
        return True

    def batch(self, step: SimStep) -> list[list[bytes]]:
        """One ``BatchTokenIDOutSlim``: columns, then who sends it and its load."""
        requests = step.requests
        if not requests:
            return []
        load = step.load
        columns = [
            _TAG,
            [request.request_id for request in requests],
            step.tokens,
            step.reasons,
            [request.prompt_tokens for request in requests],
            step.completion,
            [request.cached_tokens for request in requests],
            step.logprobs,
            [
                ids if request.logprobs else []
                for ids, request in zip(step.tokens, requests, strict=True)
            ],
            self._options.index,
            load.running + load.waiting,  # every admitted request, as the real one counts
            load.waiting,
            load.active_pages,
            load.total_pages,
        ]
        return [[pack(columns[: self._options.era])]]

    def idle(self) -> list[list[bytes]]:
        """TokenSpeed says nothing; its idle rounds forget the finished ids."""
        self._scheduler.forget_finished()
        return []

    def last_words(self) -> list[list[bytes]]:
        """TokenSpeed ends nobody's request on SIGTERM."""
        return []

    def counts(self) -> dict[str, int]:
        """Messages taken so far."""
        return dict(self._counts)


def _status(status: str) -> bytes:
    return pack({"status": status, "local": True, "headless": True, "parallel_config_hash": None})


def _read_init(payload: bytes | None) -> tuple[list[str], list[str]]:
    if payload is None:
        raise EngineFault("no INIT came")
    try:
        addresses = unpack(payload)["addresses"]
        inputs, outputs = addresses.get("inputs", []), addresses.get("outputs", [])
        if all(type(address) is str for address in [*inputs, *outputs]):
            return inputs, outputs
    except (DecodeError, LookupError, TypeError, AttributeError) as exc:
        raise EngineFault(f"INIT cannot be read: {exc!r}") from exc
    raise EngineFault("INIT cannot be read: an address is not a string")


def _read_abort(payload: bytes) -> list[str]:
    ids = unpack(payload)
    if type(ids) is not list or not all(type(item) is str for item in ids):
        raise Malformed("an abort is an array of strings")
    return ids
