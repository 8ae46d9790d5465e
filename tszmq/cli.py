"""The command line: ``tszmq generate``, ``probe``, ``sim`` and ``bench``.

Exit codes: 0 when all went well, 1 when something failed, 2 for wrong usage, 130 after Ctrl-C,
143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

import attrs

from tszmq import __version__
from tszmq.arguments import DEFAULT_ENDPOINT, build_parser
from tszmq.batch import Batch
from tszmq.client import Client
from tszmq.errors import TszmqError
from tszmq.jsonl import LineSource, write_all
from tszmq.types import Completion, EngineInfo, SamplingParams

__all__ = ["main"]

PROGRESS_INTERVAL = 0.1
"""Seconds between two counts on a terminal."""


class Ended(KeyboardInterrupt):
    """A scheduler ends the process, or its terminal has gone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class UsageError(Exception):
    """The command cannot be carried out as it was given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; the process's own by default.

    Returns:
        The exit code. Wrong arguments and ``--help`` raise ``SystemExit``, as in argparse.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with _somewhere_to_complain():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        if words[:1] == ["sim"]:  # it has a parser of its own
            from tszmq.sim.__main__ import main as run_sim

            return run_sim(words[1:], prog="tszmq sim")
        args = _parser().parse_args(words)
        with _ending_in_order():
            code: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        _complain("interrupted")
        return 128 + (interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT)
    except BrokenPipeError:
        _drop_standard_output()
        return 1
    except UsageError as error:
        _complain(str(error))
        return 2
    except Exception as error:  # whatever it is: a line for people, not a traceback
        known = isinstance(error, (TszmqError, OSError))
        _complain(str(error) if known else f"{type(error).__name__}: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    commands = {"generate": _generate, "probe": _probe, "bench": _bench}
    return build_parser(__version__, commands)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP as Ctrl-C, unless they are ignored (``nohup``): the engines hear of it.

    The second one ends the process at once.
    """
    changed = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                changed.append(number)
                signal.signal(number, _ended)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _ended(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)


@contextlib.contextmanager
def _somewhere_to_complain() -> Iterator[None]:
    """Where standard error was closed, complaints, usage and progress go nowhere.

    ``print`` and ``argparse`` would put them on standard output, among the results.
    """
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tszmq: {' '.join(text.split())}", file=sys.stderr)


def _drop_standard_output() -> None:
    """Nobody reads it any more; without this the interpreter's last flush complains again."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- connection ------------------------------------------------------------------------------


def _connect(args: argparse.Namespace) -> Client:
    given = {
        "connect_timeout": args.connect_timeout,
        "model": args.model,
        "eos_token_id": args.eos_token_id,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if args.embedded:
        if args.engines:
            raise UsageError("--embedded says how many engines there are: leave out --engines")
        if args.allow_remote:
            raise UsageError("--embedded engines are local: leave out --allow-remote")
        return Client.embedded(args.embedded, protocol=args.protocol, **options)
    with _told_who_is_missing():
        return Client(
            args.endpoint or DEFAULT_ENDPOINT,
            engine_count=args.engines or 1,
            protocol=args.protocol,
            allow_remote=args.allow_remote,
            **options,
        )


@contextlib.contextmanager
def _told_who_is_missing() -> Iterator[None]:
    """Show what the client logs while it waits for engines."""
    logger, handler = logging.getLogger("tszmq"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


# --- generate --------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    with ExitStack() as files:
        source = _open_input(args.input, files)
        output = _open_output(args, files)
        if _is_input(output, source):
            name = "standard output" if args.output == "-" else args.output
            raise UsageError(f"{name} is the input: name another output file")
        lines = LineSource(source)
        with _connect(args) as client:
            if args.output != "-":
                _empty(output)  # not before: what is there may be dear, and no engine come
            progress = Progress(sys.stderr)
            batch = Batch(
                lines,
                output,
                max_tokens=args.max_tokens,
                max_inflight=args.max_inflight,
                timeout=args.timeout,
                progress=progress.show,
            )
            try:
                batch.run(client)
            finally:
                progress.end()
    if batch.failed:
        _complain(f"{batch.failed} of {batch.done} requests failed")
    return 1 if batch.failed else 0


def _open_input(path: str, files: ExitStack) -> int:
    if path == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed: name an input file")
        return sys.stdin.fileno()
    try:
        return files.enter_context(open(path, "rb", buffering=0)).fileno()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _open_output(args: argparse.Namespace, files: ExitStack) -> TextIO:
    if args.output == "-":
        return _standard_output("name an output file with -o")
    try:
        return files.enter_context(open(args.output, "w", encoding="ascii", opener=_open_whole))
    except OSError as error:
        raise UsageError(f"cannot write {args.output}: {error.strerror}") from None


def _open_whole(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _empty(output: TextIO) -> None:
    if stat.S_ISREG(os.fstat(output.fileno()).st_mode):
        os.ftruncate(output.fileno(), 0)


def _say(text: str) -> None:
    write_all(_standard_output(), text + "\n")


def _standard_output(instead: str = "redirect it to a file") -> TextIO:
    if sys.stdout is None:
        raise UsageError(f"standard output is closed: {instead}")
    return sys.stdout


def _is_input(output: TextIO, source: int) -> bool:
    """Whether both are one file, by whatever names: what is written would be read, or read no
    more."""
    try:
        written, read = os.fstat(output.fileno()), os.fstat(source)
    except io.UnsupportedOperation:  # it only lives in memory
        return False
    return stat.S_ISREG(read.st_mode) and os.path.samestat(written, read)


class Progress:
    """Counts on a terminal, on one line that is written over; nothing elsewhere."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal if terminal.isatty() else None
        self._started = self._shown = time.monotonic()
        self._text = ""

    def show(self, done: int, failed: int) -> None:
        now = time.monotonic()
        self._text = (
            f"\r{done} done, {failed} failed, {done / max(now - self._started, 1e-9):.1f}/s"
        )
        if now - self._shown >= PROGRESS_INTERVAL:
            self._shown = now
            self._write(self._text)

    def end(self) -> None:
        """Leave the last counts on a line of their own."""
        if self._text:
            self._write(self._text + "\n")

    def _write(self, text: str) -> None:
        if self._terminal:
            with contextlib.suppress(OSError, ValueError):  # it has hung up: the results matter
                self._terminal.write(text)
                self._terminal.flush()


# --- probe -----------------------------------------------------------------------------------


def _probe(args: argparse.Namespace) -> int:
    _standard_output()
    with _connect(args) as client:
        rows = [_probe_engine(client, engine, args.timeout) for engine in client.engines]
    if args.json:
        _say(json.dumps({"engines": rows}, default=str, indent=2))
    else:
        _say("\n".join(map(_probe_text, rows)))
    return 1 if any(row["error"] for row in rows) else 0


def _probe_engine(client: Client, engine: EngineInfo, timeout: float) -> dict[str, Any]:
    """What an engine registered, and how long one token took it."""
    row = attrs.asdict(engine, recurse=False)
    row.update(latency_seconds=None, error=None)
    started = time.perf_counter()
    try:
        client.generate(
            [1],
            SamplingParams(max_tokens=1),
            data_parallel_rank=engine.engine_index,
            timeout=timeout,
        )
        row["latency_seconds"] = time.perf_counter() - started
    except TszmqError as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def _probe_text(row: dict[str, Any]) -> str:
    answer = (
        f"no answer: {row['error']}"
        if row["error"]
        else f"answered in {row['latency_seconds'] * 1000:.1f} ms"
    )
    return (
        f"engine {row['engine_index']}: {row['instance_id'] or 'unnamed'} {row['engine_version']}, "
        f"{row['dtype']}, {row['max_model_len']} tokens, "
        f"{row['num_gpu_blocks']} blocks of {row['block_size']}; {answer}"
    )


# --- bench -----------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> int:
    _standard_output()
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    prompt = list(range(1, args.prompt_tokens + 1))
    with Client.embedded(args.engines, protocol=args.protocol) as client:
        client.generate(prompt, params)  # the first request pays for imports and connections
        started = time.perf_counter()
        results = client.generate_many(
            itertools.repeat(prompt, args.requests), params, max_inflight=args.max_inflight
        )
        seconds = time.perf_counter() - started
    _print_figures(_figures(args, results, seconds), args.json)
    return 0


def _figures(
    args: argparse.Namespace, results: Sequence[Completion], seconds: float
) -> dict[str, float]:
    first = sorted(result.first_token for result in results if result.first_token is not None)
    tokens = sum(len(result.token_ids) for result in results)
    figures = {"engines": args.engines, "requests": len(results), "tokens": tokens}
    return {
        **figures,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "requests_per_second": round(len(results) / seconds, 1),
        "ttft_p50_ms": round(1000 * _quantile(first, 0.5), 3),
        "ttft_p99_ms": round(1000 * _quantile(first, 0.99), 3),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all are not above (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def _print_figures(figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        _say(json.dumps(figures))
        return
    _say("\n".join(f"{name:20} {value:>14,}" for name, value in figures.items()))
