"""Simulator engines: child processes that speak the engine side of the wire, without a GPU.

They read and write the bytes on their own account: of the client's code they share the msgpack
codec and the error classes, nothing else, so that a misreading does not cancel itself out.
"""

from __future__ import annotations

from tszmq.sim.fleet import Fleet
from tszmq.sim.request import (
    EngineFault,
    SimLoad,
    SimRequest,
    SimStep,
    expected_logprobs,
    expected_tokens,
)
from tszmq.sim.scheduler import Scheduler

__all__ = [
    "EngineFault",
    "Fleet",
    "Scheduler",
    "SimLoad",
    "SimRequest",
    "SimStep",
    "expected_logprobs",
    "expected_tokens",
]
