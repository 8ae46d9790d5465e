"""What a simulator engine can be told, as arguments and as a command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import attrs

from tszmq.checks import shown

__all__ = ["EngineOptions", "build_parser", "command_line"]


_PROTOCOLS = ("tokenspeed", "vllm")
_ERAS = (9, 10, 14)
_AT_LEAST_1 = (
    "dp_size",
    "max_num_seqs",
    "kv_pages",
    "page_size",
    "max_model_len",
    "vocab_size",
    "spec_tokens",
)


def _option(default: object, text: str, **more: object) -> Any:
    return attrs.field(default=default, metadata={"help": text, **more})


@attrs.define(kw_only=True)
class EngineOptions:
    """One engine's options; each field is the command-line flag of that name."""

    handshake: str = _option("", "address of the frontend's handshake socket")
    protocol: str = _option("tokenspeed", "wire protocol", choices=_PROTOCOLS)
    index: int = _option(0, "engine index: the ZMQ identity")
    ranks: int = _option(0, "run this many engines as child processes, --index upwards")
    dp_rank: int = _option(0, "data_parallel_rank of the registration")
    dp_size: int = _option(1, "data_parallel_size of the registration")
    step_ms: float = _option(0.0, "time of one step in milliseconds, 0: as fast as it goes")
    step_us_per_row: float = _option(0.0, "further step time per output row in microseconds")
    max_num_seqs: int = _option(256, "running requests at most")
    kv_pages: int = _option(4000, "KV pages")
    page_size: int = _option(64, "tokens a KV page")
    max_model_len: int = _option(8192, "prompt and output tokens of one request at most")
    vocab_size: int = _option(32000, "token ids are below this")
    eos_token_id: int | None = _option(None, "the model's end token (default: none)")
    prefill_tokens_per_step: int | None = _option(None, "prompt tokens a step (default: no bound)")
    spec_tokens: int = _option(1, "tokens of one request in a step at most")
    prefix_cache: bool = _option(False, "count whole pages of a prompt seen before as cached")
    era: int = _option(14, "elements of an output batch (tokenspeed)", choices=_ERAS)
    no_output_logprobs: bool = _option(False, "refuse logprobs, as the real engine's default does")
    lockstep: bool = _option(False, "park when idle, wake on START_DP_WAVE (vllm)")
    instance_id: str = _option("sim", "model name of the registration")
    control: bool = _option(False, "read commands from standard input")
    die_with_parent: int | None = _option(
        None,
        "end when standard input ends or the parent (this pid, or the starter) is gone",
        nargs="?",
        const=0,
        metavar="PID",
    )
    log_level: str = _option("WARNING", "what goes to standard error")

    def __attrs_post_init__(self) -> None:
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {shown(getattr(self, name))}")
        for name in ("step_ms", "step_us_per_row"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a time, got {shown(getattr(self, name))}")
        if not 0 <= self.index < 1 << 16:
            raise ValueError(f"index must be in [0, 65535], got {shown(self.index)}")
        if self.prefill_tokens_per_step is not None and self.prefill_tokens_per_step < 1:
            raise ValueError("prefill_tokens_per_step must be at least 1, or None for no bound")
        if self.protocol not in _PROTOCOLS or self.era not in _ERAS:
            raise ValueError(
                f"there is no protocol {shown(self.protocol)} of era {shown(self.era)}"
            )
        if self.ranks and self.control:
            raise ValueError("several ranks cannot share one standard input for commands")


_TYPES = {"int": int, "float": float, "str": str, "int | None": int}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose namespace holds the fields of ``EngineOptions``."""
    parser = argparse.ArgumentParser(
        prog=prog, description="A simulator engine: the engine side of the wire, no GPU."
    )
    for field in attrs.fields(EngineOptions):
        settings = dict(field.metadata)
        kind = str(field.type)  # annotations are text here
        if kind == "bool":
            settings["action"] = "store_true"
        else:
            settings.update(type=_TYPES[kind], default=field.default)
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
