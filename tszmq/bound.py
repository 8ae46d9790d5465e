"""A client whose engines have not come yet: addresses that are bound, and the wait for them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tszmq.errors import ConnectError, HandshakeTimeout
from tszmq.net.session import Session
from tszmq.prepare import check_timeout
from tszmq.types import Endpoints

if TYPE_CHECKING:
    from tszmq.client import Client

__all__ = ["CLOSE_SECONDS", "BoundClient"]

_log = logging.getLogger("tszmq")
_LOOK_SECONDS = 0.1  # between two looks of whoever started the engines
_FIRST_PROGRESS = 1.0  # second after which it is said who is missing
_PROGRESS_SECONDS = 10.0  # between two such lines after that
CLOSE_SECONDS = 10.0
"""What ``close`` waits for its threads unless told otherwise."""


class BoundClient:
    """Addresses that are bound, engines that have not come yet; made by ``Client.bind``.

    Any thread may call any method.
    """

    def __init__(self, session: Session, connect_timeout: float, kind: type[Client]) -> None:
        self._session = session
        self._connect_timeout = connect_timeout
        self._kind = kind
        self._look: Callable[[], object] | None = None
        """What whoever starts the engines looks at while they are waited for; may raise."""

    @property
    def endpoints(self) -> Endpoints:
        """The addresses actually bound."""
        return self._session.endpoints

    def connect(self, timeout: float | None = None) -> Client:
        """Wait until every engine has registered; once.

        Args:
            timeout: Seconds; None for the client's ``connect_timeout``.

        Raises:
            HandshakeTimeout: With the stage and the engines missing; everything is released.
            ConnectError: An engine says that it failed to start; everything is released. Or
                connected before: the client that the first call returned goes on.
            ClientClosed: Closed meanwhile by another thread.
        """
        session = self._session
        # A thread that a signal kept from giving it back can take it again.
        if not session.claim.acquire(blocking=False):  # another thread waits
            raise self._connected_before()
        try:
            self._require_unclaimed()
            self._wait(timeout)
            self._require_unclaimed()  # by a signal handler
            return self._kind._connected(session)
        finally:
            session.claim.release()

    def _require_unclaimed(self) -> None:
        if self._session.claimed:
            raise self._connected_before()

    def _connected_before(self) -> ConnectError:
        return ConnectError(
            f"{self.endpoints.handshake} was connected before, or is being: use the client that "
            "the first connect() returns"
        )

    def _wait(self, timeout: float | None) -> None:
        session = self._session
        session.check_process()
        limit = self._connect_timeout
        if timeout is not None:
            limit = check_timeout(timeout, "timeout")
        try:
            _wait_for_engines(session, limit, self._look)
        except BaseException:
            session.close(CLOSE_SECONDS)
            raise

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Free the addresses; a ``connect`` that waits elsewhere raises ClientClosed.

        The client that ``connect`` returned has the same addresses: it is closed as well.
        """
        self._session.close(check_timeout(timeout, "timeout", optional=False))

    def __repr__(self) -> str:
        closed = ", closed" if self._session.shared.ended.is_set() else ""
        return f"<tszmq.BoundClient at {self.endpoints.handshake}{closed}>"

    def __enter__(self) -> BoundClient:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._session.claimed:
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a BoundClient cannot be copied or pickled: it owns sockets and threads")


def _wait_for_engines(session: Session, timeout: float, look: Callable[[], object] | None) -> None:
    shared = session.shared
    started = time.monotonic()
    deadline, next_told = started + timeout, started + _FIRST_PROGRESS
    now, told = started, 0.0

    def settled() -> bool:
        readiness = shared.readiness
        return readiness.missing == 0 or readiness.failed is not None or session.is_closed()

    while not shared.arrivals.wait(
        settled, min(deadline, next_told, now + _LOOK_SECONDS if look else math.inf)
    ):
        if look is not None:
            look()
        now = time.monotonic()
        where, text = session.endpoints.handshake, shared.readiness.text
        if now >= deadline:
            advice = shared.readiness.advice
            more = f". {advice}" if advice else ""
            raise HandshakeTimeout(f"after {timeout} s at {where}: {text}{more}")
        if now >= next_told:
            next_told = now + _PROGRESS_SECONDS
            # Somebody who starts them by hand has to see what is missing, once at least.
            level = logging.WARNING if now - started >= _PROGRESS_SECONDS > told else logging.INFO
            told = now - started
            _log.log(level, "tszmq: waiting at %s for %.0f s: %s", where, told, text)
    session.raise_if_closed()
    if shared.readiness.missing and shared.readiness.failed is not None:
        raise ConnectError(f"{shared.readiness.failed}; {shared.readiness.text}")
