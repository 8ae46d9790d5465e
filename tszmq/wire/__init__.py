"""What the bytes mean: one module an engine protocol, behind the seam in ``base``."""

from __future__ import annotations

from tszmq.errors import InvalidRequest
from tszmq.wire.base import WireProtocol
from tszmq.wire.tokenspeed import TokenSpeed

__all__ = ["find_protocol"]

_PROTOCOLS: dict[str, type[TokenSpeed]] = {"tokenspeed": TokenSpeed}


def find_protocol(name: object) -> WireProtocol:
    """The protocol of that name.

    Raises:
        TypeError, InvalidRequest: There is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"protocol must be a str, got {type(name).__name__}")
    kind = _PROTOCOLS.get(name)
    if kind is None:
        raise InvalidRequest(
            f"protocol must be one of {', '.join(map(repr, _PROTOCOLS))}, got {name!r:.80}"
        )
    return kind()
