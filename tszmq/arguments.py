"""The arguments of the command line, and their help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tszmq.types import SamplingParams

__all__ = ["DEFAULT_ENDPOINT", "Command", "build_parser"]

DEFAULT_ENDPOINT = "tcp://127.0.0.1:30500"
Command: TypeAlias = Callable[[argparse.Namespace], int]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _token(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a token id, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def build_parser(version: str, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser.

    Args:
        version: Of the program.
        commands: What carries each command out; ``run`` of what is parsed.
    """
    parser = argparse.ArgumentParser(
        prog="tszmq",
        description="Client for LLM engines over ZMQ.",
        epilog="'tszmq COMMAND --help' tells the options of each.",
    )
    parser.add_argument("--version", action="version", version=f"tszmq {version}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(parsers, commands["generate"])
    _add_probe(parsers, commands["probe"])
    parsers.add_parser("sim", add_help=False, help="run simulator engines")
    _add_bench(parsers, commands["bench"])
    return parser


_GENERATE = """\
Answer the requests of a JSONL file: one line of JSON each in, one line each out, in that order.
Blank lines are skipped. The exit code is 1 when a line failed.
"""
_LINES = """\
a line of the input:
  prompt_token_ids   the prompt, a list of ints
  sampling_params    an object with fields of tszmq.SamplingParams; may be left out
  request_id         a text that the result repeats; may be left out

a line of the output:
  request_id, token_ids, finish_reason, engine_index, prompt_tokens, completion_tokens,
  cached_tokens; where asked for, or told: logprobs, top_logprobs, prompt_logprobs, stop_reason,
  weight_versions (a version of the weights, its first token's index, that behind its last one's)

a line in the place of a result that failed:
  error              what went wrong, with the number of a line that is no request
  request_id

example:
  {"prompt_token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "request_id": "a"}
"""


def _add_generate(parsers: Any, command: Command) -> None:
    parser = parsers.add_parser(
        "generate",
        help="answer the requests of a JSONL file",
        description=_GENERATE,
        epilog=_LINES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_connection(parser)
    parser.add_argument(
        "input",
        nargs="?",
        default="-",
        metavar="INPUT.jsonl",
        help="requests; -: standard input (default: -)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="OUT.jsonl",
        help="results; -: standard output (default: -)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_count,
        metavar="N",
        help=f"for lines without their own (default: {SamplingParams().max_tokens})",
    )
    _add_max_inflight(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="for the whole input (default: no limit)",
    )
    parser.set_defaults(run=command)


def _add_probe(parsers: Any, command: Command) -> None:
    parser = parsers.add_parser(
        "probe",
        help="show the engines that dial in, and try each",
        description="Show the engines that dial in, and let each generate one token.",
    )
    _add_connection(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="for each engine's answer (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=command)


def _add_bench(parsers: Any, command: Command) -> None:
    parser = parsers.add_parser(
        "bench",
        help="measure throughput over simulator engines",
        description="Measure throughput over simulator engines in child processes.",
    )
    for name, default, text in (
        ("--engines", 1, "simulator engines"),
        ("--requests", 1024, "requests in all"),
        ("--prompt-tokens", 128, "tokens of each prompt"),
        ("--max-tokens", 64, "tokens of each completion"),
    ):
        parser.add_argument(
            name, type=_count, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    _add_max_inflight(parser)
    _add_protocol(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=command)


def _add_max_inflight(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-inflight",
        type=_count,
        default=256,
        metavar="N",
        help="unfinished requests at once (default: %(default)s)",
    )


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--protocol",
        choices=("tokenspeed", "vllm"),
        default="tokenspeed",
        help="what the engines speak (default: %(default)s)",
    )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--endpoint",
        metavar="ADDR",
        help=f"address that the engines dial; it is bound here (default: {DEFAULT_ENDPOINT})",
    )
    where.add_argument(
        "--embedded", type=_count, metavar="N", help="start N simulator engines instead"
    )
    parser.add_argument(
        "--engines", type=_count, metavar="N", help="engines to wait for (default: 1)"
    )
    _add_protocol(parser)
    parser.add_argument(
        "--connect-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="to wait for the engines (default: 600; with --embedded 60)",
    )
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="bind tcp beyond loopback: the wire has no authentication",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="directory of the model, to read its end tokens from (vllm; default: none)",
    )
    parser.add_argument(
        "--eos-token-id",
        type=_token,
        action="append",
        metavar="N",
        help="an end token of the model; again for each further one (vllm; default: none)",
    )
