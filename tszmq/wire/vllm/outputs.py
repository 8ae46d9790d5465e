"""vLLM's output messages: one ``EngineCoreOutputs`` array a scheduler step.

Elements, in order (0.33): engine_index, outputs, scheduler_stats, timestamp, utility_output,
finished_requests, wave_complete, start_wave, weight_version. An output is an array, too; its
places are named below. Both have grown at the tail: missing elements are nil, further ones are
skipped. Large arrays are in frames after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from tszmq.codec import preview, unpack
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import (
    EngineBatch,
    StartWave,
    UtilityResult,
    WaveComplete,
)
from tszmq.wire.described import described
from tszmq.wire.startup import MAX_ENGINE_INDEX
from tszmq.wire.vllm.arrays import ArrayReader
from tszmq.wire.vllm.rows import read_rare
from tszmq.wire.vllm.utility import Opaque, read_result

__all__ = ["VllmDecoder"]

_SHORTEST = 2
_ELEMENTS = 9  # through weight_version
_COUNT_LIMIT = 2**32
_WAVE_LIMIT = 2**62  # the client counts on from it, and what it sends has 64 bits
_LONGEST_VERSION = 1000  # characters: requests keep it
_RAW_VIEW = 3  # the extension type of an array's bytes

# Places in an output.
_REQUEST_ID, _TOKENS = 0, 1
_ROW = 19  # elements
_ROW_SHORTEST = 2

# new_logprobs, new_prompt_logprobs_tensors, finish_reason, stop_reason, kv_transfer_params,
# prefill_stats, error
_rare = itemgetter(2, 3, 5, 6, 8, 11, 18)
_request_id = itemgetter(_REQUEST_ID)
_tokens = itemgetter(_TOKENS)
_NOTHING_RARE = (None,) * 7


class VllmDecoder:
    """Reads output messages; keeps nothing between them."""

    def decode(self, frames: Sequence[bytes]) -> EngineBatch:
        """One message: the outputs in frame 0, large arrays in the others.

        Raises:
            DecodeError: The bytes are not a whole and consistent message.
        """
        if not frames:
            raise DecodeError("expected an output message, got no frames")
        message = unpack(
            frames[0], "an EngineCoreOutputs array", ext_hook=_read_extension, int_keys=True
        )
        if type(message) is not list or len(message) < _SHORTEST or type(message[1]) is not list:
            raise DecodeError(f"expected an EngineCoreOutputs array, got {preview(frames[0])}")
        if len(message) < _ELEMENTS:
            message += [None] * (_ELEMENTS - len(message))
        index, outputs, stats, _, utility, finished, complete, start, version, *_ = message
        if type(index) is not int or not 0 <= index <= MAX_ENGINE_INDEX:
            raise DecodeError(
                f"engine_index must be an int in [0, {MAX_ENGINE_INDEX}], got {described(index)}"
            )
        batch = _read_rows(index, outputs, frames) if outputs else EngineBatch(index, [], [])
        if finished is not None:
            _add_finished(batch, finished)
        if stats is not None:
            batch.load = _read_load(stats)
        if not (utility is None and complete is None and start is None):
            batch.signals = _read_signals(utility, complete, start)
        if version is not None:
            batch.weight_version = _read_version(version)
        return batch


def _read_extension(code: int, data: bytes) -> object:
    return data if code == _RAW_VIEW else Opaque(code)


def _read_rows(index: int, outputs: list[Any], frames: Sequence[bytes]) -> EngineBatch:
    """The outputs as columns, in a few passes of C code but for the rows with rare elements."""
    try:
        rare = list(map(_rare, outputs))
        ids = list(map(_request_id, outputs))
        tokens = list(map(_tokens, outputs))
        "".join(ids)  # proves str
        kinds = set(map(type, chain(outputs, tokens)))
        item_kinds = set(map(type, chain.from_iterable(tokens)))
    except (IndexError, KeyError, TypeError):
        return _read_odd_rows(index, outputs, frames)
    if kinds != {list} or not item_kinds <= {int}:
        return _read_odd_rows(index, outputs, frames)
    batch = EngineBatch(index, ids, tokens)
    if rare.count(_NOTHING_RARE) != len(ids):
        rows = [row for row, values in enumerate(rare) if values != _NOTHING_RARE]
        columns = zip(*(rare[row] for row in rows), strict=True)
        read_rare(batch, rows, list(columns), ArrayReader(frames))
    return batch


def _read_odd_rows(index: int, outputs: list[Any], frames: Sequence[bytes]) -> EngineBatch:
    """Outputs some of which are shorter than today's, or are none at all.

    Raises:
        DecodeError: With the first that is none.
    """
    rows = [_whole_row(row) for row in outputs]
    return _read_rows(index, rows, frames)


def _whole_row(row: object) -> list[Any]:
    """An output with today's number of elements at least."""
    if type(row) is not list or len(row) < _ROW_SHORTEST:
        raise DecodeError(
            f"an output must be an array of at least {_ROW_SHORTEST}, got {described(row)}"
        )
    request_id, tokens = row[:_ROW_SHORTEST]
    if type(request_id) is not str:
        raise DecodeError(f"request_id must be text, got {described(request_id)}")
    if type(tokens) is not list:
        raise DecodeError(f"new_token_ids must be an array, got {described(tokens)}")
    wrong = next((token for token in tokens if type(token) is not int), 0)
    if type(wrong) is not int:
        raise DecodeError(f"new_token_ids must hold ints, got {described(wrong)}")
    return row + [None] * (_ROW - len(row))


def _add_finished(batch: EngineBatch, finished: object) -> None:
    """End the requests that the engine counts as finished, if their rows do not.

    Engines list an id in the step in which its last row goes out, in the same message, or after
    an abort of ours, without a row. An id whose last row is not here will get none any more, so
    that whoever still waits for it must not: to those it is an abort by the engine.
    """
    if type(finished) is not list or not set(map(type, finished)) <= {str}:
        raise DecodeError(f"finished_requests must be an array of texts, got {described(finished)}")
    ended = {batch.request_ids[row] for row in batch.finished}
    missing = [request_id for request_id in dict.fromkeys(finished) if request_id not in ended]
    if not missing:
        return
    first = len(batch.request_ids)
    batch.request_ids += missing
    batch.token_ids += [[] for _ in missing]
    aborted = range(first, first + len(missing))
    batch.finished = {**batch.finished, **dict.fromkeys(aborted, "abort")}
    if batch.logprobs is not None:
        batch.logprobs += [[] for _ in missing]


def _read_load(stats: object) -> EngineLoad:
    """The engine's load. Requests that wait for something of their own (a grammar, a transfer)
    are counted apart from those that wait for their turn; they are requests all the same."""
    if type(stats) is not dict:
        raise DecodeError(f"scheduler_stats must be a map, got {described(stats)}")
    running = _count(stats, "num_running_reqs")
    waiting = _count(stats, "num_waiting_reqs")
    skipped = _count(stats, "num_skipped_waiting_reqs")
    usage = stats.get("kv_cache_usage", 0.0)
    if type(usage) not in (float, int) or not 0 <= usage < _COUNT_LIMIT:
        raise DecodeError(
            f"kv_cache_usage must be a finite number of at least 0, got {described(usage)}"
        )
    return EngineLoad(running, waiting, min(float(usage), 1.0), running + waiting + skipped)


def _count(stats: dict[Any, Any], name: str) -> int:
    value = stats.get(name, 0)
    if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
        raise DecodeError(f"{name} must be an int in [0, 2**32), got {described(value)}")
    return value


def _read_signals(
    utility: object, complete: object, start: object
) -> list[WaveComplete | StartWave | UtilityResult]:
    signals: list[WaveComplete | StartWave | UtilityResult] = []
    if utility is not None:
        signals.append(read_result(utility))
    if complete is not None:
        signals.append(WaveComplete(_wave(complete, "wave_complete")))
    if start is not None:
        signals.append(StartWave(_wave(start, "start_wave")))
    return signals


def _read_version(value: object) -> str:
    if type(value) is not str or len(value) > _LONGEST_VERSION:
        raise DecodeError(
            f"weight_version must be text of at most {_LONGEST_VERSION} characters or nil, got "
            f"{described(value)}"
        )
    return value


def _wave(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < _WAVE_LIMIT:
        raise DecodeError(f"{name} must be an int in [0, 2**62), got {described(value)}")
    return value
