"""Simulator engines as child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import site
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from tszmq.checks import shown, whole_number
from tszmq.errors import InvalidRequest
from tszmq.ownership import unranked_lock
from tszmq.sim.options import MAX_INDEX, EngineOptions, command_line

__all__ = ["Fleet"]

_ROOT = str(Path(__file__).resolve().parents[2])


class Fleet:
    """N simulator engines, each a child process that ends with this one.

    The children run in sessions of their own: Ctrl-C, Ctrl-Z and the hang-up of the terminal
    reach this process only, which decides what becomes of them. They cannot be left behind
    for it: each ends when its standard input does, and when it is no longer our child.

    Every method may be called from any thread. In a forked child they do nothing.

    Args:
        count: Engines, at least 1; no index may exceed 65535.
        first_index: Engine index of the first; the others count up.
        capture: Give each child's standard output to ``read_line`` instead of dropping it.
        **options: Fields of ``EngineOptions`` for all of them. ``dp_size`` is ``count`` and
            ``dp_rank`` counts up unless given.

    Raises:
        TypeError: An option that does not exist, or of a wrong type.
        InvalidRequest: An option's value is out of range.
    """

    def __init__(
        self, count: int = 1, *, first_index: int = 0, capture: bool = False, **options: Any
    ) -> None:
        first_index = _int_within(first_index, "first_index", 0, MAX_INDEX)
        count = _int_within(count, "the number of engines", 1, MAX_INDEX + 1 - first_index)
        if not isinstance(capture, bool):
            raise TypeError(f"capture must be True or False, got {shown(capture)}")
        reserved = {"handshake", "index", "ranks", "control", "die_with_parent"} & set(options)
        if reserved:
            raise TypeError(f"set by the fleet itself: {', '.join(sorted(reserved))}")
        EngineOptions(**options)  # refuses what is wrong before anything is started
        self._count = count
        self._first_index = first_index
        self._capture = capture
        self._options = options
        self._address = ""
        self._pid = os.getpid()
        # Guards the list. Nothing is waited for under it.
        self._lock = unranked_lock()
        # Held while a pipe is written to, which a child that does not read holds up, or closed,
        # which is done when the child is dead. Taken before the other.
        self._writing = unranked_lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._closed = False
        _fleets.add(self)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminate()

    def start(self, address: str) -> None:
        """Start the engines; returns at once, they dial ``address``.

        Raises:
            OSError: A process could not be started; those that were are ended.
            RuntimeError: It was started or terminated before.
        """
        if self._foreign():
            return
        with self._lock:
            if self._closed or self._children:
                raise RuntimeError("a fleet is started once")
            self._address = address
            try:
                for number in range(self._count):
                    self._children.append(self._spawn(number))
                return
            except OSError as exc:
                failure = exc
        self.terminate(timeout=0)
        raise failure

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, those of ended children included."""
        with self._lock:
            return tuple(child.pid for child in self._children)

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status of each child, None while it runs, -N when signal N ended it."""
        with self._lock:
            children = tuple(self._children)
        return tuple(child.poll() for child in children)

    def send(self, number: int, command: str) -> None:
        """Give the ``number``-th child a command line.

        ``mute``, ``unmute``, ``pause``, ``resume``, ``garbage HEX[,HEX]``, ``raise [TEXT]``,
        ``exit [CODE]``, ``step-ms X``, ``stats`` (one JSON line on its standard output).

        Raises:
            OSError: The child is gone.
        """
        if self._foreign():
            return
        with self._writing:
            with self._lock:
                pipe = self._children[number].stdin
            if pipe is None or pipe.closed:
                raise BrokenPipeError("the fleet was terminated")
            rest = command.encode() + b"\n"
            while rest:  # a child that ends meanwhile has taken a part
                rest = rest[pipe.write(rest) :]

    def read_line(self, number: int) -> bytes:
        """The next line of the child's standard output, empty at its end. Needs ``capture``."""
        pipe = self._children[number].stdout
        if pipe is None:
            raise RuntimeError("the fleet was made without capture=True")
        return pipe.readline()

    def kill(self, number: int) -> None:
        """SIGKILL, and wait for the end."""
        if self._foreign():
            return
        child = self._children[number]
        child.kill()
        child.wait()

    def stop(self, number: int) -> None:
        """SIGSTOP: the child lives and does nothing."""
        self._signal(number, signal.SIGSTOP)

    def cont(self, number: int) -> None:
        """SIGCONT after ``stop``."""
        self._signal(number, signal.SIGCONT)

    def interrupt(self, number: int) -> None:
        """SIGTERM: the child says that it is going and ends."""
        self._signal(number, signal.SIGTERM)

    def _signal(self, number: int, signum: int) -> None:
        if not self._foreign():
            self._children[number].send_signal(signum)

    def restart(self, number: int) -> None:
        """Kill the child if it lives, and start one with the same index in its place."""
        if self._foreign():
            return
        child = self._children[number]
        self.kill(number)
        with self._writing, self._lock:
            if self._closed or self._children[number] is not child:
                return  # somebody else was faster
            _close_pipes(child)
            self._children[number] = self._spawn(number)

    def terminate(self, timeout: float = 5.0) -> None:
        """End all children and wait for them; again and from several threads at once is fine.

        Args:
            timeout: Seconds they have to say goodbye before they are killed.
        """
        if self._foreign():
            return
        with self._lock:
            self._closed = True
            children = tuple(self._children)
        for child in children:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)  # a stopped one would not see it
        deadline = time.monotonic() + timeout
        try:
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        finally:  # Ctrl-C in the wait leaves no zombies either
            for child in children:
                child.kill()  # nothing, for one that has ended
                child.wait()
        with self._writing:
            for child in children:
                _close_pipes(child)

    def _foreign(self) -> bool:
        return os.getpid() != self._pid

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        settings = {"dp_rank": number, "dp_size": self._count, **self._options}
        options = EngineOptions(
            handshake=self._address,
            index=self._first_index + number,
            control=True,
            die_with_parent=self._pid,
            **settings,
        )
        return subprocess.Popen(
            [sys.executable, "-m", "tszmq.sim", *command_line(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._capture else subprocess.DEVNULL,
            bufsize=0,
            env=_environment(),
            start_new_session=True,
        )

    def _disown(self) -> None:
        """In a forked child: these are not our processes, and not our pipes."""
        # They may have been held by threads that are not here.
        self._lock, self._writing = unranked_lock(), unranked_lock()
        for child in self._children:
            child.returncode = 0  # keeps Popen from waiting for it, or warning about it
            _close_pipes(child)


def _int_within(value: object, what: str, low: int, high: int) -> int:
    number = whole_number(value, what)
    if not low <= number <= high:
        raise InvalidRequest(f"{what} must be in [{low}, {high}], got {shown(value)}")
    return number


def _environment() -> dict[str, str]:
    """Let the child find the package where this process found it."""
    env = dict(os.environ)
    # Not the directory it happens to be started in: a file there may shadow a module.
    env["PYTHONSAFEPATH"] = "1"
    if _ROOT not in (*site.getsitepackages(), site.getusersitepackages()):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, env.get("PYTHONPATH"))))
    return env


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _disown_all() -> None:
    # A copy of the write end in a forked child would keep the engines alive after our end.
    for fleet in list(_fleets):
        fleet._disown()


os.register_at_fork(after_in_child=_disown_all)
