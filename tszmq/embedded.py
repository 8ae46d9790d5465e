"""A client with engines of its own: simulators in child processes."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from tszmq.errors import ConnectError
from tszmq.sim import Fleet
from tszmq.sim.options import EngineOptions

if TYPE_CHECKING:
    from tszmq.client import Client

__all__ = ["start_embedded"]

# From 3.14 on annotations are evaluated when they are asked for, which may be impossible.
_AS_WRITTEN: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    _AS_WRITTEN["annotation_format"] = Format.STRING


def start_embedded(kind: type[Client], engine_count: int, options: dict[str, Any]) -> Client:
    """Bind, start the engines, connect; whatever fails, nothing stays behind.

    Args:
        kind: ``Client`` or a subclass.
        engine_count: How many engines.
        options: Mixed: those that ``Client.bind`` names are its own, the rest the engines'.

    Raises:
        TypeError, InvalidRequest: An option that does not exist, or cannot be served.
        ConnectError: An engine's process ended instead of connecting.
        HandshakeTimeout: Not every engine connected in time.
    """
    given = ("endpoints", "engine_count")
    names = inspect.signature(kind.bind, **_AS_WRITTEN).parameters
    bind_names = [name for name in names if name[0] != "_" and name not in given]
    client_options = {name: options[name] for name in options if name in bind_names}
    engine_options = {name: options[name] for name in options if name not in bind_names}
    known = {field.name for field in attrs.fields(EngineOptions)} | {"first_index", "capture"}
    unknown = sorted(set(engine_options) - known)
    if unknown:
        raise TypeError(
            f"{unknown[0]!r} is no option: there are those of Client ({', '.join(bind_names)}) "
            f"and those of the engines ({', '.join(sorted(known))})"
        )
    client_options.setdefault("connect_timeout", 60.0)
    engine_options["protocol"] = client_options.get("protocol", "tokenspeed")
    fleet = Fleet(engine_count, **engine_options)
    bound = kind.bind(
        "tcp://127.0.0.1:*",
        engine_count=engine_count,
        # Killed, not asked: they hold nothing that anybody wants to keep.
        _on_closed=[partial(fleet.terminate, 0.0)],
        **client_options,
    )
    try:
        try:
            fleet.start(bound.endpoints.handshake)
        except OSError as error:
            raise ConnectError(f"an engine's process cannot be started: {error}") from error
        bound._look = partial(_require_alive, fleet, engine_options.get("first_index", 0))
        client = bound.connect()
    except BaseException:
        bound.close()
        fleet.terminate()
        raise
    client.fleet = fleet
    return client


def _require_alive(fleet: Fleet, first_index: int) -> None:
    """A process that has ended is not waited for."""
    for index, code in enumerate(fleet.exit_codes, first_index):
        if code is not None:
            raise ConnectError(
                f"engine {index} ended with exit code {code} before all engines had connected: "
                "its standard error says why"
            )
