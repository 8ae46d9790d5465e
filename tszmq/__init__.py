"""A synchronous, thread-based client for LLM engines that speak msgpack over ZMQ.

>>> from tszmq import Client, SamplingParams
>>> with Client.embedded(2) as client:
...     client.generate([1, 2, 3], SamplingParams(max_tokens=4)).finish_reason
'length'
"""

from tszmq.bound import BoundClient
from tszmq.client import Client
from tszmq.errors import (
    ClientClosed,
    ConnectError,
    DeadlineExceeded,
    DecodeError,
    EngineDead,
    EnginePaused,
    ForkedClient,
    HandshakeTimeout,
    InvalidRank,
    InvalidRequest,
    LockOrderError,
    QueueFull,
    RequestRejected,
    TokensLost,
    TszmqError,
    UnsupportedField,
)
from tszmq.stream import RequestStream
from tszmq.types import (
    Completion,
    Endpoints,
    EngineHealth,
    EngineInfo,
    EngineLoad,
    SamplingParams,
    TokenChunk,
    TokenIds,
)

__version__ = "0.1.0"

__all__ = [
    "BoundClient",
    "Client",
    "ClientClosed",
    "Completion",
    "ConnectError",
    "DeadlineExceeded",
    "DecodeError",
    "Endpoints",
    "EngineDead",
    "EngineHealth",
    "EngineInfo",
    "EngineLoad",
    "EnginePaused",
    "ForkedClient",
    "HandshakeTimeout",
    "InvalidRank",
    "InvalidRequest",
    "LockOrderError",
    "QueueFull",
    "RequestRejected",
    "RequestStream",
    "SamplingParams",
    "TokenChunk",
    "TokenIds",
    "TokensLost",
    "TszmqError",
    "UnsupportedField",
]
