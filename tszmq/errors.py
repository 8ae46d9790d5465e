"""Every error that tszmq raises.

    TszmqError
    ├── ConnectError                 sockets could not be bound, or engines did not come
    │   └── HandshakeTimeout         (also TimeoutError) engines are missing
    ├── EngineDead                   an engine was lost with requests in flight, or none is left
    │   └── DecodeError              bytes of an engine could not be read
    ├── ClientClosed                 the client was closed
    ├── ForkedClient                 a client made before fork() was used in the child
    ├── RequestRejected              the engine refused this request
    │   └── EnginePaused             the engine takes no requests just now; may be tried again
    ├── TokensLost                   output of this request was lost on the way
    ├── InvalidRequest               (also ValueError) the caller's arguments cannot be served
    │   ├── InvalidRank              a pin on an engine that does not exist
    │   └── UnsupportedField         this wire protocol cannot carry that field
    ├── QueueFull                    (also TimeoutError) no place within ``max_inflight`` in time
    ├── DeadlineExceeded             (also TimeoutError) the request's ``timeout`` passed
    └── LockOrderError               a lock (debug builds) or socket was used against the rules

Each pickles and unpickles with its attributes: everything beyond the message is an
instance attribute, never a constructor argument that pickle would have to guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tszmq.types import Completion

__all__ = [
    "ClientClosed",
    "ConnectError",
    "DeadlineExceeded",
    "DecodeError",
    "EngineDead",
    "EnginePaused",
    "ForkedClient",
    "HandshakeTimeout",
    "InvalidRank",
    "InvalidRequest",
    "LockOrderError",
    "QueueFull",
    "RequestRejected",
    "TokensLost",
    "TszmqError",
    "UnsupportedField",
]


class TszmqError(Exception):
    """The root of this tree."""


class ConnectError(TszmqError):
    """A socket could not be bound, or the engines did not complete the start-up."""


class HandshakeTimeout(ConnectError, TimeoutError):
    """Not every engine registered in time; the message names the stage and who is missing."""


class EngineDead(TszmqError):
    """An engine was lost while it held the request, or its output was; or no engine is alive.

    Attributes:
        engine_index: The engine, or None when every engine is dead or none can be named.
        reason: What gave its death away.
        partial: A ``Completion`` of what had come, or None when nothing was sent.
    """

    def __init__(
        self,
        message: str,
        engine_index: int | None = None,
        reason: str = "",
        partial: Completion | None = None,
    ) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.reason = reason or message
        self.partial = partial


class DecodeError(EngineDead):
    """Bytes of an engine could not be read as its protocol's messages, or were cut off.

    Where only the connection broke, the engine itself goes on: ``Client.health`` tells.
    """


class ClientClosed(TszmqError):
    """The client was closed before or during the call.

    Attributes:
        partial: A ``Completion`` of what had come, or None when nothing was sent.
    """

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class ForkedClient(TszmqError):
    """The client belongs to the parent process: make a new one after ``fork()``."""


class RequestRejected(TszmqError):
    """The engine refused this request, or gave it up with an error of its own.

    Attributes:
        code: The engine's own code for the refusal, or None where its wire has none.
        retryable: Whether the engine says that trying again later can help.
        partial: A ``Completion`` of what had come, if anything had.
    """

    def __init__(
        self,
        message: str,
        code: str | None = None,
        retryable: bool = False,
        partial: Completion | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.partial = partial


class EnginePaused(RequestRejected):
    """The engine is paused (a weight update, sleep) and refuses requests for now."""


class TokensLost(TszmqError):
    """The engine counts more tokens of this request than arrived: a message was lost.

    Attributes:
        partial: A ``Completion`` of what came before the gap.
    """

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class InvalidRequest(TszmqError, ValueError):
    """Arguments that cannot be served; nothing was reserved and nothing was sent."""


class InvalidRank(InvalidRequest):
    """``data_parallel_rank`` names no engine of this client; the message lists those there are."""


class UnsupportedField(InvalidRequest):
    """The wire protocol in use cannot carry this field."""


class QueueFull(TszmqError, TimeoutError):
    """``max_inflight`` requests were unfinished until the call's ``timeout``; nothing was sent."""


class DeadlineExceeded(TszmqError, TimeoutError):
    """The request's ``timeout`` passed; it was aborted.

    Attributes:
        partial: A ``Completion`` of what had come, or None when nothing was sent.
    """

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class LockOrderError(TszmqError):
    """A socket was taken twice, or used by another thread than took it; in debug builds also: a
    lock was taken against the order or twice, or what it guards was used after its release."""
