"""An engine's sockets, and the waits that a signal or a command ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Protocol

import zmq

from tszmq.sim.request import SimStep

__all__ = ["ENGINE_CORE_DEAD", "EngineSide", "Link", "Stopped", "Wake"]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
_LINGER_MS = 1000


class Stopped(Exception):
    """The engine was asked to stop while it waited."""


class EngineSide(Protocol):
    """A wire protocol as the engine speaks it. Messages are lists of frames.

    Attributes:
        says_dead_when_stopped: Whether SIGTERM makes it send the sentinel, as an error does.
    """

    says_dead_when_stopped: bool

    def connect(self, link: Link) -> None:
        """Shake hands with the frontend and connect the data sockets.

        Raises:
            Stopped: SIGTERM came first.
            EngineFault: The frontend's answer cannot be used, or never came.
        """

    def receive(self, frames: list[bytes]) -> list[list[bytes]]:
        """Take one input message: feed the scheduler.

        Returns:
            Messages to send at once.

        Raises:
            EngineFault: What a real engine dies of.
        """

    def ready(self) -> bool:
        """Whether a step may run."""

    def batch(self, step: SimStep) -> list[list[bytes]]:
        """The messages of a step, none when it has nothing to say."""

    def idle(self) -> list[list[bytes]]:
        """Messages to send before the engine waits because nothing can run."""

    def last_words(self) -> list[list[bytes]]:
        """Messages to send when SIGTERM ends the engine, before the sentinel."""

    def counts(self) -> dict[str, int]:
        """What came in so far, for the control channel."""


class Wake:
    """Ends waits of the main thread, from signal handlers and other threads."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self.stopping = False

    def arm_signals(self, embedded: bool) -> None:
        """SIGTERM stops the engine; so does SIGINT unless ``embedded``. Main thread only."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C in a terminal is the parent's affair: it wants to drain first.
        signal.signal(signal.SIGINT, signal.SIG_IGN if embedded else self._on_signal)

    def arm_child_signal(self) -> None:
        """The end of a child process ends a wait. Main thread only."""
        # The handler only has to exist for the wake-up byte to be written.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_signal(self, *_: object) -> None:
        self.stopping = True

    def fileno(self) -> int:
        """Readable after ``set``."""
        return self._read

    def set(self) -> None:
        """End the current wait, or the next one."""
        with contextlib.suppress(BlockingIOError):  # full: it is set
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Call before looking at what ``set`` announced."""
        try:
            while len(os.read(self._read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def wait(self) -> None:
        """Block until ``set`` or a signal."""
        select.select([self._read], [], [])
        self.clear()

    def sleep(self, seconds: float) -> None:
        """Sleep with microseconds' precision; only a stop ends it early."""
        end = time.monotonic() + seconds
        while seconds > 0 and not self.stopping:
            if select.select([self._read], [], [], seconds)[0]:
                self.clear()  # commands are looked at after the step anyway
            seconds = end - time.monotonic()


class Link:
    """The sockets of one engine. The main thread owns them.

    Args:
        handshake: The frontend's handshake address.
        index: The engine index.
        wake: Ends the waits.
    """

    def __init__(self, handshake: str, index: int, wake: Wake) -> None:
        self._context = zmq.Context()
        self._wake = wake
        self._identity = index.to_bytes(2, "little")
        self._poller = zmq.Poller()
        self._poller.register(wake.fileno(), zmq.POLLIN)
        self._handshake = self._dealer(handshake)
        self._input: zmq.Socket[bytes] | None = None
        self._output: zmq.Socket[bytes] | None = None
        self.muted = False

    def _socket(self, kind: int, bounded: bool) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        if not bounded:
            sock.set_hwm(0)
        return sock

    def _dealer(self, address: str, bounded: bool = True) -> zmq.Socket[bytes]:
        sock = self._socket(zmq.DEALER, bounded)
        sock.setsockopt(zmq.IDENTITY, self._identity)
        sock.setsockopt(zmq.IPV6, "[" in address)
        sock.connect(address)
        return sock

    def say(self, message: bytes) -> None:
        """Send on the handshake socket."""
        self._handshake.send(message)

    def hear(self, seconds: float) -> bytes | None:
        """The next message of the handshake socket, None when none comes in this time."""
        if self._wait(self._handshake, zmq.POLLIN, seconds):
            return self._handshake.recv_multipart()[-1]
        return None

    def open_input(self, address: str, registration: bytes, *, bounded: bool = True) -> None:
        """Connect the input socket and register."""
        self._input = self._dealer(address, bounded)
        self._input.send(registration)
        self._poller.register(self._input, zmq.POLLIN)

    def open_output(self, address: str, *, bounded: bool = True) -> None:
        """Connect the output socket; ``bounded``: a frontend that does not read stops us."""
        self._output = self._socket(zmq.PUSH, bounded)
        self._output.setsockopt(zmq.IPV6, "[" in address)
        self._output.connect(address)

    def hang_up(self) -> None:
        """Close the handshake socket: an engine is done with it after start-up."""
        self._handshake.close()

    def receive(self) -> list[bytes] | None:
        """The next input message, None when there is none."""
        if self._input is None:
            return None
        try:
            return self._input.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def deafen(self) -> None:
        """Close the input socket for good."""
        if self._input is not None:
            self._poller.unregister(self._input)
            self._input.close()
            self._input = None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send on the output socket, waiting for room as long as it takes.

        Raises:
            Stopped: SIGTERM ended the wait; the message is lost.
        """
        assert self._output is not None
        while not self.muted:
            try:
                self._output.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._wait(self._output, zmq.POLLOUT, None)

    def wait_for_input(self) -> None:
        """Block until a message, a command or a signal comes."""
        self._poller.poll()

    def _wait(self, sock: zmq.Socket[bytes], event: int, seconds: float | None) -> bool:
        poller = zmq.Poller()
        poller.register(sock, event)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        end = None if seconds is None else time.monotonic() + seconds
        while not self._wake.stopping:
            left = None if end is None else max(0, int(1000 * (end - time.monotonic())))
            ready = dict(poller.poll(left))
            if sock in ready or not ready:
                return sock in ready
            # Commands wait meanwhile. Only a stop ends this.
            self._wake.clear()
        raise Stopped

    def close(self, sentinel: bool) -> None:
        """Close everything, with a last message unless nobody is connected."""
        if self._output is not None:
            if sentinel:
                with contextlib.suppress(zmq.ZMQError):  # best effort: nobody may be reading
                    self._output.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
            self._output.close()
        if self._input is not None:
            self._input.close()
        self._handshake.close()
        self._context.term()
