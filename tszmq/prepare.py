"""From a caller's arguments to a request and its frames: everything checked, nothing changed."""

from __future__ import annotations

import math
import time

import attrs

from tszmq.checks import MAX_TOKENS, plain_number, shown, whole_number
from tszmq.core.ids import WireIds
from tszmq.core.request import Group, Request, Wakeable
from tszmq.errors import EngineDead, InvalidRequest
from tszmq.net.shared import Shared
from tszmq.net.submit import Prepared
from tszmq.types import EngineInfo, SamplingParams, token_id_list
from tszmq.wire.base import AddRequest, RowDetail

__all__ = ["Preparer", "check_timeout"]

_MAX_LENGTH = 2**31 - 1  # an engine may say anything
_DEFAULT_PARAMS = SamplingParams()
_PROMPT = "the prompt's token ids"


def check_timeout(timeout: object, what: str, *, optional: bool = True) -> float:
    """A number of seconds, not negative and not NaN.

    Args:
        timeout: The caller's.
        what: Its name.
        optional: Whether None would do, which the caller of this has looked for.

    Raises:
        TypeError, InvalidRequest: It is not.
    """
    timeout = plain_number(timeout)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        or_none = " or None" if optional else ""
        raise TypeError(f"{what} must be a number of seconds{or_none}, got {shown(timeout)}")
    try:
        seconds = float(timeout)
    except OverflowError:  # an int beyond all floats
        seconds = math.inf if timeout > 0 else -math.inf
    if math.isnan(seconds) or seconds < 0:
        raise InvalidRequest(f"{what} must be at least 0 seconds, got {shown(timeout)}")
    return seconds


def _longest(engine: EngineInfo) -> int:
    """What no prompt may exceed; the protocol's own check is narrower."""
    return min(engine.max_model_len, _MAX_LENGTH) if engine.max_model_len > 0 else MAX_TOKENS


class Preparer:
    """Validates and encodes; any thread, under no lock.

    Args:
        ids: Makes the wire ids.
        shared: For the engines' registrations.
    """

    def __init__(self, ids: WireIds, shared: Shared) -> None:
        self._ids = ids
        self._shared = shared

    def prepare(
        self,
        ids: object,
        params: object,
        *,
        label: object,
        rank: object,
        priority: object,
        gate: Wakeable,
        chunks: bool,
        streaming: bool = False,
        group: Group | None = None,
        position: int = 0,
    ) -> Prepared:
        """A request that is not admitted yet.

        Args:
            ids, params, label, rank, priority: The caller's, unchecked.
            gate: Where its end is waited for.
            chunks: Whether the engine should send tokens as they come.
            streaming: Whether somebody reads them as they come.
            group, position: Of a bulk call.

        Raises:
            TypeError, InvalidRequest: With what is wrong.
            EngineDead: The pinned engine is dead, or every engine is.
            ClientClosed, ForkedClient.
        """
        now = time.monotonic()
        pinned = None
        if rank is not None:
            pinned = whole_number(rank, "data_parallel_rank", or_none=True)
        try:
            with self._shared.state as flights:
                engine = flights.limits(pinned)
        except EngineDead:
            token_id_list(ids, what=_PROMPT)  # what is wrong with the call comes first
            raise
        tokens = token_id_list(ids, what=_PROMPT, at_most=_longest(engine))
        if params is None:
            params = _DEFAULT_PARAMS
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if params.logit_bias is not None:
            params = attrs.evolve(params)  # a dict may have changed since it was checked
        if label is not None and not isinstance(label, str):
            raise TypeError(f"request_id must be a str, got {type(label).__name__}")
        if label is not None:
            label = str.__str__(label)  # of a subclass, the plain text: it is compared under a lock
        urgency = None if priority is None else whole_number(priority, "priority")
        protocol = self._shared.protocol
        protocol.check(tokens, params, urgency, engine)
        wire_id = self._ids.new()
        add = AddRequest(wire_id, tokens, params, chunks, urgency, engine, time.time())
        frames = protocol.encode_add(add)
        request = Request(
            wire_id,
            len(tokens),
            gate,
            now,
            label=label,
            logprobs=params.logprobs or params.top_logprobs > 0,
            top_limit=params.top_logprobs,
            streaming=streaming,
            group=group,
            position=position,
        )
        if params.prompt_logprobs is not None and len(tokens) == 1:
            # Nothing predicts a prompt's first token: the engine has nothing to say of it.
            request.detail = RowDetail(prompt_logprobs=[None])
        return Prepared(request, pinned, add, frames)
