"""Wire ids: ours, unique for ever, and recognisable.

The caller's ``request_id`` is a label and never reaches an engine: engines key everything by
id, die of one that is still in flight, and some match ids by prefix. A wire id is ASCII of a
fixed length, so that none is a prefix of another; 64 random bits name the client, a counter
the request. 28 characters keep it a msgpack fixstr.
"""

from __future__ import annotations

import itertools

__all__ = ["WireIds"]

_COUNTER_DIGITS = 12


class WireIds:
    """Makes ids; any thread may call.

    Args:
        nonce: Names this client among all that ever were, such as 16 random hex digits.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._length = len(nonce) + _COUNTER_DIGITS
        self._count = itertools.count(1)

    def new(self) -> str:
        """An id never given before; later ids compare greater."""
        # next() on a count is one C call: no two threads get the same number.
        return f"{self._nonce}{next(self._count):0{_COUNTER_DIGITS}x}"

    def since(self, wire_id: str, first: str) -> bool:
        """Whether ``wire_id`` is one of ours and no older than ``first``."""
        return len(wire_id) == self._length and wire_id.startswith(self._nonce) and wire_id >= first
