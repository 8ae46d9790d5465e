"""What a simulator engine can be told, as arguments and as a command line."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from tszmq.checks import boolean, int_or_none, integer, number, plain_float, plain_int, shown, text
from tszmq.errors import InvalidRequest

__all__ = ["MAX_INDEX", "EngineOptions", "build_parser", "command_line"]


_PROTOCOLS = ("tokenspeed", "vllm")
_ERAS = (9, 10, 14)
MAX_INDEX = 65535
"""Of an engine: its ZMQ identity has 16 bits."""

Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _word(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is None:
        raise TypeError(f"{attribute.name} must be a str, got None")
    text(_, attribute, value)
    if "\0" in value:  # no process can be started with it
        raise InvalidRequest(f"{attribute.name} must hold no NUL, got {shown(value)}")


def _one_of(choices: Sequence[object]) -> Check:
    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in choices:
            raise InvalidRequest(
                f"{attribute.name} must be one of {', '.join(map(repr, choices))}, "
                f"got {shown(value)}"
            )

    return check


def _level(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    levels = logging.getLevelNamesMapping()
    if value.upper() not in levels:
        raise InvalidRequest(
            f"{attribute.name} must be one of {', '.join(map(repr, levels))}, got {shown(value)}"
        )


# Fields by their kind. What an option's check lets pass, the command line carries to the engine.


def _option(
    default: object, help_text: str, checks: list[Any], *, more: Any = (), **kind: Any
) -> Any:
    return attrs.field(
        default=default, metadata={"help": help_text, **dict(more)}, validator=checks, **kind
    )


def _count(default: int, help_text: str, low: int = 1) -> Any:
    return _option(default, help_text, [integer(low)], converter=plain_int)


def _count_or_none(help_text: str, low: int, **more: object) -> Any:
    return _option(None, help_text, [integer(low, optional=True)], more=more, converter=int_or_none)


def _time(help_text: str) -> Any:
    return _option(0.0, help_text, [number(0.0)], converter=plain_float)


def _switch(help_text: str) -> Any:
    return _option(False, help_text, [boolean])


@attrs.define(kw_only=True)
class EngineOptions:
    """One engine's options; each field is the command-line flag of that name.

    Raises:
        TypeError: An option is of a wrong type: an int is no float and no bool.
        InvalidRequest: An option's value is out of range.
    """

    handshake: str = _option("", "address of the frontend's handshake socket", [_word])
    protocol: str = _option(
        "tokenspeed", "wire protocol", [_word, _one_of(_PROTOCOLS)], more={"choices": _PROTOCOLS}
    )
    index: int = _option(
        0, "engine index: the ZMQ identity", [integer(0, MAX_INDEX)], converter=plain_int
    )
    ranks: int = _count(0, "engines to run as child processes, --index upwards; 0: one, in this", 0)
    dp_rank: int = _count(0, "data_parallel_rank of the registration", 0)
    dp_size: int = _count(1, "data_parallel_size of the registration")
    step_ms: float = _time("time of one step in milliseconds, 0: as fast as it goes")
    step_us_per_row: float = _time("further step time per output row in microseconds")
    max_num_seqs: int = _count(256, "running requests at most")
    kv_pages: int = _count(4000, "KV pages")
    page_size: int = _count(64, "tokens a KV page")
    max_model_len: int = _count(8192, "prompt and output tokens of one request at most")
    vocab_size: int = _count(32000, "token ids are below this")
    eos_token_id: int | None = _count_or_none("the model's end token (default: none)", 0)
    prefill_tokens_per_step: int | None = _count_or_none(
        "prompt tokens a step (default: no bound)", 1
    )
    spec_tokens: int = _count(1, "tokens of one request in a step at most")
    prefix_cache: bool = _switch("count whole pages of a prompt seen before as cached")
    era: int = _option(
        14,
        "elements of an output batch (tokenspeed)",
        [integer(0), _one_of(_ERAS)],
        more={"choices": _ERAS},
        converter=plain_int,
    )
    no_output_logprobs: bool = _switch("refuse logprobs, as the real engine's default does")
    lockstep: bool = _switch("park when idle, wake on START_DP_WAVE (vllm)")
    instance_id: str = _option("sim", "model name of the registration", [_word])
    control: bool = _switch("read commands from standard input")
    die_with_parent: int | None = _count_or_none(
        "end when standard input ends or the parent (this pid, or the starter) is gone",
        0,
        nargs="?",
        const=0,
        metavar="PID",
    )
    log_level: str = _option("WARNING", "what goes to standard error", [_word, _level])

    def __attrs_post_init__(self) -> None:
        if self.ranks and self.control:
            raise InvalidRequest("several ranks cannot share one standard input for commands")


_TYPES = {"int": int, "float": float, "str": str, "int | None": int}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose namespace holds the fields of ``EngineOptions``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="A simulator engine: the engine side of the wire, no GPU. It dials a client, "
        "and waits for one that has not started yet; Ctrl-C ends it.",
    )
    for field in attrs.fields(EngineOptions):
        settings = dict(field.metadata)
        kind = str(field.type)  # annotations are text here
        if kind == "bool":
            settings["action"] = "store_true"
        else:
            settings.update(type=_TYPES[kind], default=field.default)
            if field.default not in (None, ""):
                settings["help"] += " (default: %(default)s)"
        if field.name == "handshake":
            settings["required"] = True
        parser.add_argument(_flag(field.name), **settings)
    return parser


def command_line(options: EngineOptions) -> Sequence[str]:
    """The arguments that make ``build_parser`` give these options again."""
    words: list[str] = []
    for field in attrs.fields(EngineOptions):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        words.append(_flag(field.name) if value is True else f"{_flag(field.name)}={value}")
    return words
