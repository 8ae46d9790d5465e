"""The handshake socket: HELLO in, INIT out, for as long as the client lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from tszmq.core.startup import Startup
from tszmq.errors import DecodeError
from tszmq.net.addresses import is_tcp, is_wildcard, tcp_host
from tszmq.net.log import Limited, log
from tszmq.net.peers import Connections, local_host
from tszmq.net.sockets import NOWHERE, source_fd
from tszmq.types import Endpoints
from tszmq.wire.startup import (
    FAILED,
    HELLO,
    READY,
    encode_init,
    engine_identity,
    engine_index,
    read_handshake,
)

__all__ = ["Greeter"]


_MESSAGES = 1000


class Greeter:
    """Answers on the handshake socket what ``Startup`` decides.

    Args:
        socket: The handshake ROUTER; the thread that owns it owns this.
        startup: The state machine.
        endpoints: The addresses bound, for INIT.
        parallel_config: For INIT.
        connections: Gives them numbers.
        is_open: Whether this socket has a connection at a descriptor now.
        before_init: Called before an INIT is sent to an engine, which then dials in. False: not
            now; ``send_init`` is called again.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        startup: Startup,
        endpoints: Endpoints,
        parallel_config: Mapping[str, Any],
        connections: Connections,
        is_open: Callable[[int], bool],
        before_init: Callable[[int], bool],
    ) -> None:
        self.socket = socket
        self._before_init = before_init
        self.failed: str | None = None
        """What the first engine said that failed to start."""
        self._strangers = Limited()
        self._engines = Limited()  # apart: what a scanner of ports sends must not hide these
        self._invited: deque[int] = deque()  # to be told where to dial
        self._inviting = False
        self._startup = startup
        self._connections = connections
        self._is_open = is_open
        self._endpoints = endpoints
        self._parallel_config = parallel_config
        self._hosts: dict[int, str] = {}  # engine index -> our host as that engine sees it

    def read(self, limit: int) -> bool:
        """Take at most ``limit`` messages. True when something of an engine's was among them."""
        news = False
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            news |= self._take(frames)
        return news

    def _take(self, frames: list[zmq.Frame]) -> bool:
        index = engine_index(frames[0].bytes)
        if index is None:
            self._ignore(f"a peer that is no engine (identity {frames[0].bytes[:16]!r})")
            return False
        try:
            message = read_handshake([frame.bytes for frame in frames[1:]])
        except DecodeError as error:
            self._ignore(f"engine {index}: {error}")
            return False
        if message.status == HELLO and source_fd(frames[-1]) == NOWHERE:
            self._ignore(f"engine {index}: a peer of a protocol that is too old")
        elif message.status == HELLO:
            self._hello(index, frames[-1])
        elif message.status == READY:
            self._startup.ready(index)
        elif message.status == FAILED:
            self.failed = f"engine {index} says that it failed to start"
            self._fail(index)
        else:
            self._ignore(f"engine {index}: unknown status {message.status!r:.80}")
        return True

    def _ignore(self, what: str) -> None:
        self._startup.ignored += 1
        self._strangers.warning(f"a message on the handshake socket is ignored: {what}")

    def warn(self, text: str) -> None:
        """Of an engine that starts."""
        self._engines.warning(text)

    def _hello(self, index: int, frame: zmq.Frame) -> None:
        fd = source_fd(frame)
        host = local_host(fd)
        if host is not None:
            self._hosts[index] = host
        if self._startup.hello(index, self._connections.number(fd, self._is_open(fd))):
            self.send_init(index)
        else:
            why = (
                "which is taken: it is kept waiting until that place is free"
                if self._startup.is_known(index)
                else f"one more than the {self._startup.expected} expected: start this client "
                "with a larger engine_count"
            )
            self.warn(f"an engine said HELLO with index {index}, {why}")

    def send_init(self, index: int) -> None:
        """Tell an engine where the data sockets are; and the next that waits, if that one is gone,
        and so on."""
        self._invited.append(index)
        if self._inviting:  # further up: hundreds may be gone, one after another
            return
        self._inviting = True
        try:
            while self._invited:
                self._invite(self._invited.popleft())
        finally:
            self._inviting = False

    def _invite(self, index: int) -> None:
        init = encode_init(
            self._address_for(index, self._endpoints.input or ""),
            self._address_for(index, self._endpoints.output or ""),
            self._parallel_config,
        )
        if not self._before_init(index):
            return
        try:
            self.socket.send_multipart([engine_identity(index), init], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, unless it had its INIT before: then it has said READY by now.
            self.read(_MESSAGES)
            if self._startup.is_greeted(index):
                log.info("tszmq: engine %d went away before its INIT: %s", index, error)
                self._fail(index)

    def _address_for(self, index: int, address: str) -> str:
        """A wildcard cannot be dialled: name the host that this engine reached us at."""
        if is_tcp(address) and is_wildcard(tcp_host(address)):
            host = self._hosts.get(index, "127.0.0.1")
            return f"tcp://{host}:{address.rpartition(':')[2]}"
        return address

    def closed(self, connection: int) -> None:
        """A connection closed; one that is not of this socket means nothing."""
        index = self._startup.handshake_closed(connection)
        if index is not None:
            self.warn(f"engine {index} went away during its start-up")
            self._fail(index)

    def replace(self, indices: list[int]) -> None:
        """These start-ups stalled: let their successors in, unless they went on after all."""
        still = self._startup.stalled()
        for index in indices:
            if index in still:
                self.warn(f"engine {index} said READY and never registered")
                self._fail(index)

    def _fail(self, index: int) -> None:
        for served in self._startup.failed(index):
            self.send_init(served)
