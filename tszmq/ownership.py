"""Who may touch what: values behind locks, locks in a fixed order, sockets with one owner.

``mutex(level, value)`` gives a guard that owns its value: ``with guard as value:`` is the only
way in. A thread may take a lock only while it holds none of the same or a later ``Level``.

Two builds share that interface. The plain one is a bare lock: its ``__enter__`` and
``__exit__`` are C functions, which costs what ``threading.Lock`` costs and leaves no bytecode
between taking the lock and entering the block at which a KeyboardInterrupt could strand it.
The checked one (``TSZMQ_DEBUG=1`` or ``python -X dev``, decided once at import) reports a
wrong order *before* it blocks, a lock taken twice, and a value used after its block ended.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from tszmq.errors import LockOrderError

__all__ = ["CHECKED", "Level", "Mutex", "holds_a_lock", "lock", "mutex"]

T = TypeVar("T")

_setting = os.environ.get("TSZMQ_DEBUG", "")
CHECKED: bool = _setting != "0" if _setting else sys.flags.dev_mode
"""Whether locks and sockets are checked in this process."""


class Level(enum.IntEnum):
    """Every lock of a client, outermost first; a thread only moves down this list.

    Locks of two clients have the same levels, so that holding one client's while taking the
    other's is reported too.
    """

    READERS = 10
    """A stream's read position: which tokens were handed out. Held for a slice."""
    STATE = 20
    """Requests, load and in-flight ids, together. Nothing is waited for, sent or logged inside."""


class Mutex(Generic[T]):
    """A value with its lock and its place in the order; made by ``mutex()``."""

    __slots__ = ("__weakref__",)

    def __enter__(self) -> T:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def owned(self) -> bool:
        """Whether the calling thread holds it."""
        raise NotImplementedError


_guards: set[weakref.ref[Mutex[Any]]] = set()


def mutex(level: Level, value: T) -> Mutex[T]:
    """A guard that owns ``value``; keep no other reference to it."""
    guard: Mutex[T] = _Checked(level, value) if CHECKED else _plain(value)
    _guards.add(weakref.ref(guard, _guards.discard))
    return guard


def lock(level: Level) -> AbstractContextManager[object]:
    """A lock in the order that guards no single value."""
    return _Checked(level, None) if CHECKED else threading.RLock()


def holds_a_lock() -> bool:
    """Whether the calling thread is inside a guarded block of any client.

    A finalizer of the caller's, run by the garbage collector inside such a block, may close a
    stream: it must not take the lock again then (nor another client's, which could deadlock
    with a thread doing the reverse), but post what it wants done.
    """
    # tuple() copies in one C call: other threads may add and remove meanwhile.
    return any(guard is not None and guard.owned() for guard in [ref() for ref in tuple(_guards)])


def _plain(value: T) -> Mutex[T]:
    # RLock, because it knows its owner (holds_a_lock); nothing takes it twice.
    raw: Any = threading.RLock()
    # map() over an endless iterator of acquire() calls: one C call takes the lock and returns
    # the value. Bound C methods are not descriptors, so a class per guard can hold them as its
    # __enter__ and __exit__.
    entries = map({True: value}.__getitem__, iter(raw.acquire, None))
    body = {
        "__slots__": (),
        "__enter__": entries.__next__,
        "__exit__": raw.__exit__,
        "owned": staticmethod(raw._is_owned),
    }
    return cast("Mutex[T]", type("Mutex", (Mutex,), body)())


class _Borrow:
    """Stands for a guarded value inside its block, and refuses to afterwards."""

    __slots__ = ("_name", "_target")

    def __init__(self, target: object, name: str) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_target_of(self), attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(_target_of(self), attribute, value)


_ENDED = object()


def _target_of(borrow: _Borrow) -> object:
    target = object.__getattribute__(borrow, "_target")
    if target is _ENDED:
        name = object.__getattribute__(borrow, "_name")
        raise LockOrderError(f"the value of {name} was used after its block ended")
    return target


class _Held:
    """One lock that a thread holds, where it took it, and the value it lent."""

    __slots__ = ("borrow", "guard", "where")

    def __init__(self, guard: _Checked[Any], where: str, borrow: _Borrow) -> None:
        self.guard = guard
        self.where = where
        self.borrow = borrow

    def __str__(self) -> str:
        return f"{self.guard.name} (taken at {self.where})"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.held: list[_Held] = []


_this_thread = _PerThread()


class _Checked(Mutex[T]):
    """The guard of debug builds."""

    __slots__ = ("_level", "_raw", "_value", "name")

    def __init__(self, level: Level, value: T) -> None:
        self._level = level
        self._raw: Any = threading.RLock()
        self._value = value
        self.name = f"{level.name} lock {id(self):#x}"

    def __enter__(self) -> T:
        frame = sys._getframe(1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        self._check_order(where)
        borrow = _Borrow(self._value, self.name)
        held = _Held(self, where, borrow)
        try:
            self._raw.acquire()
            _this_thread.held.append(held)
        except BaseException:
            # A signal handler raised right after the lock was taken.
            if self._raw._is_owned():
                _forget(held)
                self._raw.release()
            raise
        return cast(T, borrow)

    def __exit__(self, *_: object) -> None:
        for held in reversed(_this_thread.held):
            if held.guard is self:
                object.__setattr__(held.borrow, "_target", _ENDED)
                _forget(held)
                break
        self._raw.release()

    def owned(self) -> bool:
        return bool(self._raw._is_owned())

    def _check_order(self, where: str) -> None:
        held = _this_thread.held
        if not held:
            return
        if any(entry.guard is self for entry in held):
            problem = f"{self.name} is taken twice by one thread"
        elif max(entry.guard._level for entry in held) >= self._level:
            problem = f"{self.name} is taken against the order"
        else:
            return
        raise LockOrderError(
            f"{problem} at {where}, while thread {threading.current_thread().name!r} holds "
            + ", ".join(map(str, held))
            + "; the order is "
            + ", ".join(level.name for level in Level)
        )


def _forget(held: _Held) -> None:
    if held in _this_thread.held:
        _this_thread.held.remove(held)
