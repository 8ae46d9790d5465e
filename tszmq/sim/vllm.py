"""vLLM's wire as the engine core speaks it.

Simplified: one client (``client_index`` 0), no coordinator, no aux frames in requests, no LoRA, no
pooling, no structured outputs, and the ranks of a lockstep group park each on its own: there is
no collective between the processes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError
from tszmq.sim.link import Link
from tszmq.sim.options import EngineOptions
from tszmq.sim.request import EngineFault, SimRequest, SimStep
from tszmq.sim.scheduler import Scheduler
from tszmq.sim.vllm_calls import Calls
from tszmq.sim.vllm_output import ERROR, Extras, Writer, finish_row
from tszmq.sim.vllm_request import Ask, Unusable, read_add, unpack_any

__all__ = ["VllmSide"]

logger = logging.getLogger("tszmq.sim")

_ADD, _ABORT, _WAVE, _UTILITY, _FAILED, _WAKEUP = (bytes((code,)) for code in range(6))
_INIT_TIMEOUT_S = 300.0
_PAUSED = {
    "code": "engine_paused",
    "message": "Generation is paused. Please retry after it resumes.",
    "retryable": True,
}


class VllmSide:
    """Reads requests, aborts, waves and calls; writes registration and outputs.

    Args:
        options: The engine's.
        scheduler: Fed with what comes in.
    """

    # SIGTERM ends an engine core without a word of its own.
    says_dead_when_stopped = False

    def __init__(self, options: EngineOptions, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._writer = Writer(
            options.index,
            options.vocab_size,
            options.page_size if options.prefix_cache else 0,
        )
        self._calls = Calls(self._scheduler, self._writer)
        self._link: Link | None = None
        # A dense rank is alone in its group, whatever it was started as.
        self._dp_size = options.dp_size if options.lockstep else 1
        self._wave = 0
        self._awake = not options.lockstep
        self._busy = False
        self._prefix_stats = [0, 0, 0]  # requests, tokens asked for, tokens found
        self._counts = {"adds": 0, "aborts": 0, "refused": 0, "malformed": 0, "calls": 0}

    def connect(self, link: Link) -> None:
        """HELLO, INIT, the data sockets, READY. See ``EngineSide``."""
        self._link = link
        link.say(pack({"status": "HELLO", "local": False, "headless": True}))
        inputs, outputs, settings = _read_init(link.hear(_INIT_TIMEOUT_S))
        self._dp_size = settings.get("data_parallel_size", self._dp_size)
        link.open_output(outputs[0], bounded=False)
        link.open_input(inputs[0], pack(self.registration()), bounded=False)
        ready: dict[str, Any] = {"status": "READY", "local": False, "headless": True}
        if self._dp_size > 1:
            ready["parallel_config_hash"] = hashlib.sha256(b"sim").hexdigest()
        link.say(pack(ready))
        link.hang_up()

    def registration(self) -> dict[str, Any]:
        """The ready response: what the frontend learns about this engine."""
        options = self._options
        kv_tokens = options.kv_pages * options.page_size
        return {
            "max_model_len": options.max_model_len,
            "num_gpu_blocks": options.kv_pages,
            "block_size": options.page_size,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": "0.33.0+sim",
            "world_size": 1,
            "data_parallel_size": self._dp_size,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": options.dp_rank if options.lockstep else 0,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.prefill_tokens_per_step or options.max_model_len,
            "instance_id": options.instance_id,
            "supports_lora": False,
            "max_loras": 0,
            "mamba_block_size": None,
            "kv_cache_size_tokens": kv_tokens,
            "kv_cache_max_concurrency": kv_tokens / options.max_model_len,
            "kv_events_config": None,
            "weight_transfer_backend": None,
            "enable_sleep_mode": True,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": options.page_size,
            "coord_store_port": 0,
            "coordinator_input_address": None,
            "coordinator_output_address": None,
        }

    def receive(self, frames: list[bytes]) -> list[list[bytes]]:
        """Take one message. One that cannot be used makes the engine deaf, not dead."""
        try:
            return self._dispatch(frames[0], frames[1] if len(frames) > 1 else b"")
        except Unusable as exc:
            self._counts["malformed"] += 1
            logger.error("the input thread ends: %s", exc)
            if self._link is not None:
                self._link.deafen()
            return []

    def _dispatch(self, kind: bytes, payload: bytes) -> list[list[bytes]]:
        if kind == _ADD:
            return self._add(read_add(payload))
        if kind == _ABORT:
            return self._abort(unpack_any(payload))
        if kind == _WAVE:
            return self._start_wave(unpack_any(payload))
        if kind == _UTILITY:
            return self._utility(unpack_any(payload))
        if kind == _FAILED:
            raise EngineFault("Executor failed.")
        if kind == _WAKEUP:
            return []
        raise Unusable(f"unknown type byte {kind!r}")

    def _add(self, ask: Ask) -> list[list[bytes]]:
        self._counts["adds"] += 1
        self._address(ask.client_index)
        params = ask.params
        if params is None or ask.prompt is None or params["max_tokens"] is None:
            return self._refuse(ask)
        if self._calls.rejects_new:
            return self._refuse(ask, _PAUSED)
        eos, top = params["_eos_token_id"], params["logprobs"]
        stops = {*(params["stop_token_ids"] or ()), *(() if eos is None else (eos,))}
        request = SimRequest(
            ask.request_id,
            ask.prompt,
            params["max_tokens"],
            frozenset(stops),
            min_new_tokens=params["min_tokens"],
            tag=Extras(time.monotonic(), eos, top, params["prompt_logprobs"]),
        )
        self._calls.admit(request)
        return []

    def _refuse(self, ask: Ask, error: dict[str, Any] | None = None) -> list[list[bytes]]:
        self._counts["refused"] += 1
        return [self._writer.ends([finish_row(ask.request_id, ERROR, error)])]

    def _address(self, client_index: int) -> None:
        if client_index != 0 and self._link is not None:
            logger.error("the output thread ends: there is no client %d", client_index)
            self._link.muted = True

    def _abort(self, ids: Any) -> list[list[bytes]]:
        if type(ids) is not list or not all(type(item) is str for item in ids):
            raise Unusable("an abort is an array of strings")
        self._counts["aborts"] += len(ids)
        self._calls.drop(ids)
        return self._calls.drained()

    def _start_wave(self, message: Any) -> list[list[bytes]]:
        if type(message) is not list or len(message) != 2:
            raise Unusable("a wave is an array of two")
        wave, excluded = message
        if self._options.lockstep and excluded != self._options.index and wave >= self._wave:
            self._wave = wave
            self._awake = True
        return []

    def _utility(self, message: Any) -> list[list[bytes]]:
        if type(message) is not list or len(message) != 4:
            raise Unusable("a call is an array of four")
        client_index, call_id, method, args = message
        self._counts["calls"] += 1
        self._address(client_index)
        return self._calls.call(call_id, method, args)

    def ready(self) -> bool:
        """Whether the rank is awake and not paused with its requests kept."""
        return self._awake and not self._calls.holds_steps

    def batch(self, step: SimStep) -> list[list[bytes]]:
        """One ``EngineCoreOutputs``, with statistics from after the step's finishes."""
        self._busy = True
        self._scheduler.forget_finished()
        for request, tokens, made in zip(step.requests, step.tokens, step.completion, strict=True):
            if made == len(tokens):
                self._prefix_stats[0] += 1
                self._prefix_stats[1] += request.prompt_tokens
                self._prefix_stats[2] += request.cached_tokens
        return [self._writer.batch(step, self._stats()), *self._calls.drained()]

    def _stats(self) -> dict[str, Any]:
        scheduler = self._scheduler
        requests, queries, hits = self._prefix_stats
        self._prefix_stats = [0, 0, 0]
        return {
            "num_running_reqs": scheduler.num_running,
            "num_waiting_reqs": scheduler.num_waiting + self._calls.num_held,
            "num_skipped_waiting_reqs": 0,
            "num_kv_fetch_reqs_by_stage": {
                "waiting_to_start": 0,
                "in_progress": 0,
                "completed_waiting": 0,
            },
            "step_counter": 0,
            "current_wave": 0,
            "kv_cache_usage": scheduler.active_pages / self._options.kv_pages,
            "iteration_details": None,
            "prefix_cache_stats": {
                "reset": False,
                "requests": requests,
                "queries": queries,
                "hits": hits,
                "preempted_requests": 0,
                "preempted_queries": 0,
                "preempted_hits": 0,
                "hits_by_source": {},
            },
            "connector_prefix_cache_stats": None,
            "kv_cache_eviction_events": [],
            "spec_decoding_stats": None,
            "kv_connector_stats": None,
            "ec_connector_stats": None,
            "waiting_lora_adapters": {},
            "running_lora_adapters": {},
            "cudagraph_stats": None,
            "perf_stats": None,
        }

    def idle(self) -> list[list[bytes]]:
        """Statistics once after work, and the end of a wave: the rank parks."""
        messages = []
        if self._busy and self._scheduler.idle:
            self._busy = False
            messages.append(self._writer.stats_only(self._stats()))
        if self._options.lockstep and self._awake and self._scheduler.idle:
            messages.append(self._writer.wave_complete(self._wave))
            self._wave += 1
            self._awake = False
        return messages

    def last_words(self) -> list[list[bytes]]:
        """Each unfinished request ends with "abort"."""
        return self._calls.abort_all()

    def counts(self) -> dict[str, int]:
        """Messages taken so far."""
        return {**self._counts, "wave": self._wave}


def _read_init(payload: bytes | None) -> tuple[list[str], list[str], dict[str, Any]]:
    if payload is None:
        raise EngineFault("no INIT came")
    try:
        init = unpack(payload)
        addresses, settings = init["addresses"], init["parallel_config"]
        inputs, outputs = addresses["inputs"], addresses["outputs"]
        if all(type(address[0]) is str for address in (inputs, outputs)):
            return inputs, outputs, dict(settings)
    except (DecodeError, LookupError, TypeError, ValueError) as exc:
        raise EngineFault(f"INIT cannot be read: {exc!r}") from exc
    raise EngineFault("INIT cannot be read: an address is not a string")
