"""Who may touch what: values behind locks, locks in a fixed order, sockets with one owner.

``mutex(level, value)`` gives a guard that owns its value: ``with guard as value:`` is the only
way in. A thread may take a lock only while it holds none of the same or a later ``Level``.

Two builds share that interface. The plain one is a bare lock: its ``__enter__`` and
``__exit__`` are C functions, which costs what ``threading.Lock`` costs and leaves no bytecode
between taking the lock and entering the block at which a KeyboardInterrupt could strand it (for
Python 3.14 see ``_enter``).
The checked one (``TSZMQ_DEBUG=1`` or ``python -X dev``, decided once at import) reports a
wrong order *before* it blocks, a lock taken twice, and a value used after its block ended.
"""

from __future__ import annotations

import enum
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar, cast

from tszmq.errors import LockOrderError

__all__ = ["CHECKED", "Level", "Mutex", "holds_a_lock", "lock", "mutex", "unranked_lock"]

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
    guard: Mutex[T] = _checked(level, value) if CHECKED else _plain(value)
    _guards.add(weakref.ref(guard, _guards.discard))
    return guard


def lock(level: Level) -> AbstractContextManager[object]:
    """A lock in the order that guards no single value."""
    return _checked(level, None) if CHECKED else unranked_lock()


# A lock that another thread held at the fork is never released there, and threads get its owner's
# id again: the clients of the parent are of no use in a child.
os.register_at_fork(after_in_child=_guards.clear)


def holds_a_lock() -> bool:
    """Whether the calling thread is inside a guarded block of any client.

    A finalizer of the caller's, run by the garbage collector inside such a block, may close a
    stream: it must not take the lock again then (nor another client's, which could deadlock
    with a thread doing the reverse), but post what it wants done.
    """
    # A copy of a set is one step in C; tuple() would allocate between two of its own, and the
    # collector's callbacks would change the set under it.
    for ref in _guards.copy():
        guard = ref()
        if guard is not None and guard.owned():
            return True
    return False


# 3.14 looks for signals between a ``with``'s call of a C function and its block (python/cpython
# issue 148874): what a handler raises there would leave the lock taken. It does not look where a
# function in Python returns, nor where a ``for`` takes its next item.
_LOOKS_AFTER_ENTER = sys.version_info[:2] == (3, 14)


def _enter(entries: Iterator[T]) -> Callable[..., T]:
    """The ``__enter__`` of a class with one instance: it returns the next entry, of which there is
    no end."""
    if not _LOOKS_AFTER_ENTER:
        return entries.__next__

    def enter(_: object) -> T:
        for entry in entries:
            return entry
        raise AssertionError

    return enter


def _unranked() -> Callable[[], AbstractContextManager[object]]:
    if not _LOOKS_AFTER_ENTER:
        return threading.RLock

    def enter(self: Any) -> object:
        for taken in iter(self.acquire, None):
            return taken
        raise AssertionError

    kind: Any = type(threading.RLock())
    return type("Lock", (kind,), {"__slots__": (), "__enter__": enter})


unranked_lock = _unranked()
"""Makes a lock that is not in the order."""


def _plain(value: T) -> Mutex[T]:
    # RLock, because it knows its owner (holds_a_lock); nothing takes it twice.
    raw: Any = threading.RLock()
    # map() over an endless iterator of acquire() calls: one C call takes the lock and returns
    # the value. Bound C methods are not descriptors, so a class per guard can hold them as its
    # __enter__ and __exit__.
    entries = map({True: value}.__getitem__, iter(raw.acquire, None))
    body = {
        "__slots__": (),
        "__enter__": _enter(entries),
        "__exit__": raw.__exit__,
        "owned": staticmethod(raw._is_owned),
    }
    return cast("Mutex[T]", type("Mutex", (Mutex,), body)())


class _Borrow:
    """Stands for a guarded value inside its block, and refuses to afterwards."""

    __slots__ = ("__weakref__", "_guard", "_target")

    def __init__(self, target: object, guard: _Checked[Any]) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_guard", guard)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_target_of(self), attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(_target_of(self), attribute, value)


def _target_of(borrow: _Borrow) -> object:
    guard = object.__getattribute__(borrow, "_guard")
    if not guard.owned() or all(entry.borrow() is not borrow for entry in _this_thread.held):
        raise LockOrderError(
            f"the value of {guard.name} was used after its block ended, or by another thread"
        )
    return object.__getattribute__(borrow, "_target")


class _Held:
    """One lock that a thread holds or is about to take, where, and the value it is lent."""

    __slots__ = ("borrow", "frame", "instruction", "level", "lock", "text")

    def __init__(self, guard: _Checked[Any], where: str, frame: FrameType, borrow: _Borrow) -> None:
        self.lock = guard.raw
        self.level = guard.level
        self.text = f"{guard.name} (taken at {where})"
        self.frame = id(frame)  # not the frame itself: it would keep all that is in it alive
        self.instruction = frame.f_lasti
        # Weak: what a block leaves behind must not keep the value alive.
        self.borrow = weakref.ref(borrow)


def _about_to_be_taken(entries: list[_Held], frame: FrameType | None) -> list[_Held]:
    """Those whose thread a signal handler interrupted while it waited for the lock: it is still
    at the instruction that takes it, somewhere below the handler."""
    waiting = []
    while frame is not None and entries:
        here = id(frame), frame.f_lasti
        waiting += [entry for entry in entries if (entry.frame, entry.instruction) == here]
        frame = frame.f_back
    return waiting


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.held: list[_Held] = []


_this_thread = _PerThread()


def _checked(level: Level, value: T) -> Mutex[T]:
    """The guard of debug builds.

    As in the plain one, no bytecode runs between taking the lock and the block, nor between the
    block and the release: the check comes before, and what a block leaves behind is cleared
    when its thread takes a lock again.
    """
    raw: Any = threading.RLock()
    body = {"__slots__": (), "__exit__": raw.__exit__, "owned": staticmethod(raw._is_owned)}
    kind: Any = type("Mutex", (_Checked,), body)
    guard = kind(level, value, raw)
    # Each entry: check() gives (None, the loan), acquire() gives True, which picks the loan.
    entries = map(operator.getitem, iter(guard.check, None), iter(raw.acquire, None))
    kind.__enter__ = _enter(entries)
    return cast("Mutex[T]", guard)


class _Checked(Mutex[T]):
    __slots__ = ("_value", "level", "name", "raw")

    def __init__(self, level: Level, value: T, raw: Any) -> None:
        self.level = level
        self.raw = raw
        self._value = value
        self.name = f"{level.name} lock {id(self):#x}"

    def check(self) -> tuple[None, _Borrow]:
        """Whether the calling thread may take this lock; the value that it will be lent."""
        frame = sys._getframe(2 if _LOOKS_AFTER_ENTER else 1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        held: list[_Held] = []
        others: list[_Held] = []
        for entry in _this_thread.held:
            if entry.lock._is_owned():
                held.append(entry)
            elif entry.borrow() is not None:  # else its block has ended
                others.append(entry)
        self._check_order(held, where)
        borrow = _Borrow(self._value, self)
        entry = _Held(self, where, frame, borrow)
        _this_thread.held = [*_about_to_be_taken(others, frame.f_back), *held, entry]
        return None, borrow

    def _check_order(self, held: list[_Held], where: str) -> None:
        if not held:
            return
        if any(entry.lock is self.raw for entry in held):
            problem = f"{self.name} is taken twice by one thread"
        elif max(entry.level for entry in held) >= self.level:
            problem = f"{self.name} is taken against the order"
        else:
            return
        raise LockOrderError(
            f"{problem} at {where}, while thread {threading.current_thread().name!r} holds "
            + ", ".join(entry.text for entry in held)
            + "; the order is "
            + ", ".join(level.name for level in Level)
        )
