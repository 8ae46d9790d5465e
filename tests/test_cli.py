from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

import tszmq.cli
from tests.mock_engine import MockEngine
from tszmq import jsonl
from tszmq.batch import LOOKAHEAD
from tszmq.errors import EngineDead, HandshakeTimeout, UnsupportedField
from tszmq.sim.options import build_parser as sim_parser
from tszmq.types import Completion, EngineInfo, SamplingParams


def completion(prompt: list[int], params: SamplingParams) -> Completion:
    """An echo: as many tokens as asked for, counted from the prompt's last one."""
    tokens = [prompt[-1] + step for step in range(1, (params.max_tokens or 1) + 1)]
    return Completion(
        None, tokens, "length", None, len(prompt), len(tokens), 0, 1, 0.0, 0.001, 0.002
    )


class FakeClient:
    """As much of a client as the command line uses; ``FakeClient.made`` has every one made."""

    made: ClassVar[list[FakeClient]]
    answer: ClassVar[Callable[[list[int], SamplingParams], Completion | Exception]]
    pick: ClassVar[Callable[[int], int]]
    """Which of so many unfinished requests ends next."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.endpoint, self.options = endpoint, options
        self.closed = False
        self.most_unfinished = 0
        self.engines = tuple(
            EngineInfo(index, True, 4096, 100, 16, "bfloat16", "1.2", instance_id="fake")
            for index in range(options.get("engine_count", 1))
        )
        FakeClient.made.append(self)

    @classmethod
    def embedded(cls, engine_count: int = 1, **options: Any) -> FakeClient:
        return cls("embedded", engine_count=engine_count, **options)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def as_completed(
        self,
        prompts: Iterable[list[int]],
        sampling_params: Iterable[SamplingParams | None],
        *,
        timeout: float | None,
        max_inflight: int,
        errors: str,
    ) -> Iterator[tuple[int, Completion | Exception]]:
        assert errors == "return"
        requests = enumerate(prompts)
        parameters = iter(sampling_params)
        unfinished: list[tuple[int, Completion | Exception]] = []
        while True:
            while len(unfinished) < max_inflight:
                index, prompt = next(requests, (-1, []))
                if index < 0:
                    assert next(parameters, None) is None
                    break
                params = next(parameters)
                assert params is not None
                unfinished.append((index, type(self).answer(prompt, params)))
            self.most_unfinished = max(self.most_unfinished, len(unfinished))
            if not unfinished:
                return
            yield unfinished.pop(type(self).pick(len(unfinished)))

    def generate(self, prompt: list[int], params: SamplingParams, **options: Any) -> Completion:
        result = type(self).answer([options.get("data_parallel_rank", 0)], params)
        if isinstance(result, Exception):
            raise result
        return result

    def generate_many(
        self, prompts: Iterable[list[int]], params: SamplingParams, **_: Any
    ) -> list[Completion]:
        return [completion(prompt, params) for prompt in prompts]


@pytest.fixture
def fake(monkeypatch) -> type[FakeClient]:
    monkeypatch.setattr(tszmq.cli, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "made", [], raising=False)
    monkeypatch.setattr(FakeClient, "answer", staticmethod(completion), raising=False)
    monkeypatch.setattr(FakeClient, "pick", staticmethod(lambda count: 0), raising=False)
    return FakeClient


def request(last: int, **more: Any) -> str:
    fields = {"prompt_token_ids": [1, last], "sampling_params": {"max_tokens": 2}, **more}
    return json.dumps(fields)


@pytest.fixture
def generate(tmp_path) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Runs ``tszmq generate`` from file to file; the exit code and the output lines."""

    def run(text: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_bytes(text.encode("utf-8", "surrogateescape"))
        code = tszmq.cli.main(["generate", *arguments, str(source), "-o", str(target)])
        return code, [json.loads(line) for line in target.read_text().splitlines()]

    return run


# --- generate --------------------------------------------------------------------------------


def test_results_in_the_order_of_the_lines(fake, generate) -> None:
    fake.pick = staticmethod(random.Random(7).randrange)
    lines = [request(number, request_id=f"r{number}") for number in range(500)]
    code, results = generate("\n".join(lines), "--embedded", "2", "--max-inflight", "32")
    assert code == 0
    assert [result["request_id"] for result in results] == [f"r{number}" for number in range(500)]
    assert [result["token_ids"] for result in results] == [[n + 1, n + 2] for n in range(500)]
    (client,) = fake.made
    assert client.options == {"engine_count": 2, "protocol": "tokenspeed"}
    assert client.most_unfinished == 32
    assert client.closed


def test_bad_lines_become_errors_in_their_place(fake, generate, capsys) -> None:
    fake.pick = staticmethod(lambda count: count - 1)
    text = "\n".join(
        [
            request(1),
            "{not json",
            "",
            request(2, request_id="two"),
            '{"prompt_token_ids": [], "request_id": "three"}',
            "   ",
            "\udcff",
            request(4),
        ]
    )
    code, results = generate(text, "--embedded", "1")
    assert code == 1
    assert [result.get("token_ids") for result in results] == [
        [2, 3],
        None,
        [3, 4],
        None,
        None,
        [5, 6],
    ]
    errors = [result["error"] for result in results if "error" in result]
    assert [error.split(":")[0] for error in errors] == ["line 2", "line 5", "line 7"]
    assert results[3]["request_id"] == "three"
    assert set(results[1]) == {"error", "request_id"}
    assert capsys.readouterr().err == "tszmq: 3 of 6 requests failed\n"


def test_errors_of_the_client_become_lines_too(fake, generate) -> None:
    def refuse_odd(prompt: list[int], params: SamplingParams) -> Completion | Exception:
        return UnsupportedField("min_p") if prompt[-1] % 2 else completion(prompt, params)

    fake.answer = staticmethod(refuse_odd)
    code, results = generate("\n".join(map(request, range(4))), "--embedded", "1")
    assert code == 1
    assert [result.get("error") for result in results] == [
        None,
        "UnsupportedField: min_p",
        None,
        "UnsupportedField: min_p",
    ]


def test_the_timeout_is_for_the_whole_input(fake, generate, monkeypatch) -> None:
    """Requests that were sent are the client's to end; what is left fails unsent."""
    now = 100.0
    monkeypatch.setattr("tszmq.batch.time.monotonic", lambda: now)
    timeouts: list[float | None] = []
    original = FakeClient.as_completed

    def as_completed(client: FakeClient, *arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal now
        timeouts.append(options["timeout"])
        yield from original(client, *arguments, **options)
        now += 6.0

    monkeypatch.setattr(FakeClient, "as_completed", as_completed)
    fake.pick = staticmethod(lambda count: count - 1)  # so that rounds end early
    limits = ["--max-inflight", "2", "--timeout", "10"]
    code, results = generate("\n".join(map(request, range(100))), "--embedded", "1", *limits)
    assert timeouts == [10.0, 4.0]
    answered = 2 * 2 * LOOKAHEAD
    assert [result.get("error") for result in results[:answered]] == [None] * answered
    assert len(results) == 100
    assert {result["error"] for result in results[answered:]} == {
        "DeadlineExceeded: the timeout passed before it was sent"
    }
    assert code == 1


def test_an_empty_input_is_no_failure(fake, generate) -> None:
    assert generate("", "--embedded", "1") == (0, [])
    assert generate("\n\n", "--embedded", "1") == (0, [])


def test_max_tokens_is_for_lines_without_their_own(fake, generate) -> None:
    text = request(1) + '\n{"prompt_token_ids": [1]}\n'
    _, results = generate(text, "--embedded", "1", "--max-tokens", "3")
    assert [len(result["token_ids"]) for result in results] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "endpoint", "options"),
    [
        ([], "tcp://127.0.0.1:30500", {"engine_count": 1, "protocol": "tokenspeed"}),
        (
            ["--endpoint", "ipc:///run/e.sock", "--engines", "3", "--protocol", "vllm"],
            "ipc:///run/e.sock",
            {"engine_count": 3, "protocol": "vllm"},
        ),
        (
            ["--connect-timeout", "5", "--allow-remote"],
            "tcp://127.0.0.1:30500",
            {"connect_timeout": 5.0, "allow_remote": True},
        ),
        (
            ["--model", "/m", "--eos-token-id", "2", "--eos-token-id", "7"],
            "tcp://127.0.0.1:30500",
            {"model": "/m", "eos_token_id": [2, 7]},
        ),
        (
            ["--embedded", "2", "--connect-timeout", "5", "--eos-token-id", "0"],
            "embedded",
            {"engine_count": 2, "connect_timeout": 5.0, "eos_token_id": [0]},
        ),
    ],
)
def test_where_it_connects(fake, generate, arguments, endpoint, options) -> None:
    generate(request(1), *arguments)
    (client,) = fake.made
    assert client.endpoint == endpoint
    assert options.items() <= client.options.items()


def test_who_waits_is_told_for_what(capsys, monkeypatch, tmp_path, unit: float) -> None:
    monkeypatch.setattr("tszmq.bound._FIRST_PROGRESS", 0.05)
    address = f"ipc://{tmp_path}/h"
    limit = 2.0 * unit
    arguments = ["probe", "--endpoint", address, "--connect-timeout", str(limit)]
    assert tszmq.cli.main(arguments) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    waiting = rf"tszmq: waiting at {re.escape(address)} for \d+ s: 1 of 1 engines missing"
    assert re.match(waiting, first)
    assert last.startswith(f"tszmq: after {limit} s at {address}")
    assert not logging.getLogger("tszmq").handlers


def test_requests_are_read_as_they_are_needed(fake, monkeypatch, tmp_path) -> None:
    """When the first result is written, only what is in flight has been read."""
    parsed: list[int] = []
    original = jsonl.RequestLine.parse

    def parse(line: bytes, defaults: Any) -> Any:
        parsed.append(len(parsed))
        return original(line, defaults)

    monkeypatch.setattr(jsonl.RequestLine, "parse", parse)
    behind: list[int] = []

    def pick(count: int) -> int:
        behind.append(len(parsed))
        return 0

    fake.pick = staticmethod(pick)
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(request, range(100))))
    arguments = ["--embedded", "1", "--max-inflight", "4", str(source), "-o", os.devnull]
    assert tszmq.cli.main(["generate", *arguments]) == 0
    assert behind[0] == 4
    assert behind == [min(4 + done, 100) for done in range(100)]


def test_results_held_back_are_bounded(fake, generate, monkeypatch) -> None:
    held = 0
    original = jsonl.InOrder.put

    def put(order: Any, position: int, text: str) -> list[str]:
        nonlocal held
        ready = original(order, position, text)
        held = max(held, len(order._held))
        return ready

    monkeypatch.setattr(jsonl.InOrder, "put", put)
    fake.pick = staticmethod(lambda count: count - 1)  # the oldest one comes last
    code, results = generate(
        "\n".join(map(request, range(1000))), "--embedded", "1", "--max-inflight", "2"
    )
    assert (code, len(results)) == (0, 1000)
    assert 2 < held <= 2 * LOOKAHEAD


def test_a_pipe_gets_its_answer_before_the_next_line(fake, monkeypatch) -> None:
    """A program that writes one request and waits for its result must get it."""
    ours, theirs = os.pipe(), os.pipe()
    answers = []

    def ask() -> None:
        with os.fdopen(ours[1], "w") as questions, os.fdopen(theirs[0]) as results:
            for number in range(3):
                questions.write(request(number) + "\n")
                questions.flush()
                answers.append(json.loads(results.readline())["token_ids"])

    program = threading.Thread(target=ask)
    with os.fdopen(ours[0], "rb") as stdin, os.fdopen(theirs[1], "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        program.start()
        assert tszmq.cli.main(["generate", "--embedded", "1"]) == 0
    program.join()
    assert answers == [[1, 2], [2, 3], [3, 4]]


def test_a_pipe_that_does_not_block_gets_everything(fake, monkeypatch) -> None:
    """Event loops make their ends of a pipe such, and the other end may be the same file."""
    count = 4000
    question, (read, write) = os.pipe(), os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(question[0], False)
    lines = "".join(request(number) + "\n" for number in range(count)).encode()
    assert len(lines) > 1 << 16  # more than a pipe holds
    results: list[str] = []

    def ask() -> None:
        with os.fdopen(question[1], "wb") as questions:
            questions.write(lines)

    def read_all() -> None:
        with os.fdopen(read) as answers:
            results.extend(answers)

    writer, reader = threading.Thread(target=ask), threading.Thread(target=read_all)
    with os.fdopen(question[0], "rb") as stdin, os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        writer.start()
        # Nobody reads until the pipe is full.
        full = threading.Event()
        original = jsonl._wait_for

        def wait_for(descriptor: int, what: int, timeout: float | None) -> bool:
            if descriptor == write and not full.is_set():
                full.set()
                reader.start()
            return original(descriptor, what, timeout)

        monkeypatch.setattr(jsonl, "_wait_for", wait_for)
        assert tszmq.cli.main(["generate", "--embedded", "1"]) == 0
    reader.join()
    writer.join()
    assert full.is_set()
    assert [json.loads(line)["token_ids"] for line in results] == [
        [number, number + 1] for number in range(1, count + 1)
    ]


def test_a_terminal_that_hangs_up_costs_no_result(fake, generate, monkeypatch) -> None:
    class HungUp(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", HungUp())
    monkeypatch.setattr(tszmq.cli, "PROGRESS_INTERVAL", 0.0)
    code, results = generate("\n".join(map(request, range(100))), "--embedded", "1")
    assert (code, len(results)) == (0, 100)


@pytest.mark.parametrize("how", ["input by name", "output by name", "neither"])
def test_the_input_is_never_the_output(fake, monkeypatch, capfd, tmp_path: Path, how: str) -> None:
    """Also where the shell opened one of them, or both."""
    path = tmp_path / "both.jsonl"
    text = request(0) + "\n"
    path.write_text(text)
    arguments = ["generate", "--embedded", "1"]
    with open(path, "rb") as stdin, open(path, "a") as stdout:
        if how == "input by name":
            arguments.append(str(path))
        else:
            monkeypatch.setattr(sys, "stdin", stdin)
        if how == "output by name":
            arguments += ["-o", str(path)]
        else:
            monkeypatch.setattr(sys, "stdout", stdout)
        assert tszmq.cli.main(arguments) == 2
    assert "is the input: name another output file" in capfd.readouterr().err
    assert path.read_text() == text


def test_results_of_before_stay_until_there_are_engines(
    fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that never comes has cost nothing, and what is written is not mixed with it."""
    old, text = "old\n" * 1000, request(0) + "\n"
    target = tmp_path / "out.jsonl"
    target.write_text(old)
    (tmp_path / "in.jsonl").write_text(text)
    arguments = ["generate", "--embedded", "1", str(tmp_path / "in.jsonl"), "-o", str(target)]

    def nobody_comes(*_: object, **__: object) -> FakeClient:
        raise HandshakeTimeout("nobody came")

    with monkeypatch.context() as without_engines:
        without_engines.setattr(FakeClient, "embedded", nobody_comes)
        assert tszmq.cli.main(arguments) == 1
    assert target.read_text() == old
    assert tszmq.cli.main(arguments) == 0
    assert json.loads(target.read_text())["token_ids"] == [1, 2]


def test_progress_is_for_terminals(fake, generate, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "\n".join(map(request, range(3))) + "\nbad"
    for stderr, shown in ((Terminal(), "\r4 done, 1 failed, "), (io.StringIO(), None)):
        monkeypatch.setattr(sys, "stderr", stderr)
        generate(text, "--embedded", "1")
        if shown:
            assert shown in stderr.getvalue()
        else:
            assert stderr.getvalue() == "tszmq: 1 of 4 requests failed\n"


# --- what goes wrong -------------------------------------------------------------------------


def fails(capsys, *arguments: str) -> tuple[int, str]:
    """Run a command that goes wrong: its exit code and its one line of complaint."""
    code = tszmq.cli.main(list(arguments))
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("tszmq: ")
    return code, error


def test_a_missing_input_is_wrong_usage(fake, capsys, tmp_path) -> None:
    code, error = fails(capsys, "generate", str(tmp_path / "missing.jsonl"))
    assert code == 2
    assert "missing.jsonl: No such file" in error
    assert not fake.made


def test_a_directory_is_no_file(fake, capsys, tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    assert fails(capsys, "generate", str(tmp_path))[0] == 2
    assert fails(capsys, "generate", str(source), "-o", str(tmp_path))[0] == 2


def test_the_input_is_not_overwritten(fake, capsys, tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request(1))
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output in (source, link):
        code, error = fails(capsys, "generate", str(source), "-o", str(output))
        assert code == 2
        assert "is the input" in error
    assert source.read_text() == request(1)


def test_embedded_engines_are_counted_once(fake, capsys, tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    code, error = fails(capsys, "generate", "--embedded", "2", "--engines", "2", str(source))
    assert (code, "--engines" in error) == (2, True)
    code, error = fails(capsys, "generate", "--embedded", "2", "--allow-remote", str(source))
    assert (code, "--allow-remote" in error) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["generate", "--embedded", "0"],
        ["generate", "--embedded", "many"],
        ["generate", "--embedded", "1", "--endpoint", "tcp://127.0.0.1:1"],
        ["generate", "--protocol", "http"],
        ["generate", "--timeout", "nan"],
        ["generate", "--timeout", "-1"],
        ["generate", "--eos-token-id", "-1"],
        ["generate", "a", "b"],
        ["bench", "--requests", "-5"],
    ],
    ids=" ".join,
)
def test_wrong_arguments(fake, capsys, arguments) -> None:
    with pytest.raises(SystemExit) as caught:
        tszmq.cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: tszmq" in capsys.readouterr().err
    assert not fake.made


@pytest.mark.parametrize(
    ("arguments", "text"), [(["generate"], "with -o"), (["probe"], ""), (["bench"], "")]
)
def test_output_needs_somewhere_to_go(fake, capsys, monkeypatch, arguments, text) -> None:
    """Nobody would see what is done: said before anything is."""
    with open(os.devnull, "rb") as stdin, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        patched.setattr(sys, "stdout", None)
        code, error = fails(capsys, *arguments)
    assert code == 2
    assert error.startswith("tszmq: standard output is closed: ")
    assert text in error
    assert not fake.made


def test_results_in_a_file_need_no_standard_output(fake, generate, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        code, results = generate(request(1), "--embedded", "1")
    assert (code, len(results)) == (0, 1)


def test_without_standard_error_nothing_else_is_said(fake, capsys, monkeypatch, tmp_path) -> None:
    """Least of all on standard output, among the results."""
    source = tmp_path / "in.jsonl"
    source.write_text(request(1) + "\nbroken\n")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None)
        assert tszmq.cli.main(["generate", "--embedded", "1", str(source)]) == 1
        out = capsys.readouterr().out
        assert ["error" in json.loads(line) for line in out.splitlines()] == [False, True]
        assert tszmq.cli.main(["generate", str(tmp_path / "missing")]) == 2
        with pytest.raises(SystemExit):
            tszmq.cli.main(["generate", "--nonsense"])
        assert sys.stderr is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (HandshakeTimeout("engines 0, 1\nare missing"), 1, "engines 0, 1 are missing"),
        (EngineDead("every engine is dead"), 1, "every engine is dead"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_fails_is_one_line(fake, capsys, monkeypatch, error, code, text) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FakeClient, "__init__", fail)
    assert fails(capsys, "probe", "--embedded", "1") == (code, f"tszmq: {text}\n")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of every command."""
    [commands] = [
        action
        for action in tszmq.cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return {**commands.choices, "sim": sim_parser("tszmq sim")}


@pytest.mark.parametrize("command", ["generate", "probe", "bench", "sim"])
def test_every_option_has_a_text_and_tells_its_default(command) -> None:
    parser = parsers()[command]
    assert parser.description
    for action in parser._actions:
        assert action.help, action.dest
        text = action.help % vars(action)
        if type(action.default) in (int, float):
            assert text.endswith(f"(default: {action.default})"), text
        elif action.nargs is None and not action.required and action.dest != "embedded":
            assert "default: " in text, text


def test_help_of_generate_tells_every_field_of_a_line(capsys) -> None:
    """The fields of requests, results and errors, and no others."""
    with pytest.raises(SystemExit):
        tszmq.cli.main(["generate", "--help"])
    text = capsys.readouterr().out
    source, result, error = re.findall(r"^a line [^:]*:\n(.*?)\n\n", text, re.S | re.M)
    assert re.findall(r"^  (\w+)  ", source, re.M) == list(jsonl._FIELDS)
    detailed = attrs.evolve(
        completion([1], SamplingParams()),
        stop_reason=2,
        logprobs=[0.0],
        top_logprobs=[{1: 0.0}],
        prompt_logprobs=[None],
        weight_versions=[("a", 0, 1)],
    )
    fields = json.loads(jsonl.result_line(detailed, "a"))
    assert set(re.findall(r"\w+_\w+|logprobs", result)) == set(fields)
    assert set(re.findall(r"^  (\w+)", error, re.M)) == set(json.loads(jsonl.error_line("", "")))
    [example] = re.findall(r"^  (\{.*\})$", text, re.M)
    assert jsonl.RequestLine.parse(example.encode(), {}).request_id == "a"


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        tszmq.cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tszmq {tszmq.__version__}\n"


# --- probe, bench, sim -----------------------------------------------------------------------


def test_probe_tells_of_each_engine(fake, capsys) -> None:
    assert tszmq.cli.main(["probe", "--engines", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("engine 0: fake 1.2, bfloat16, 4096 tokens, 100 blocks of 16; answered")
    assert second.startswith("engine 1: ")


def test_probe_fails_when_an_engine_does_not_answer(fake, capsys) -> None:
    def dead_one(prompt: list[int], params: SamplingParams) -> Completion | Exception:
        return EngineDead("engine 1 is dead", 1) if prompt == [1] else completion(prompt, params)

    fake.answer = staticmethod(dead_one)
    assert tszmq.cli.main(["probe", "--engines", "3", "--json"]) == 1
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert [engine["engine_index"] for engine in engines] == [0, 1, 2]
    assert [engine["error"] for engine in engines] == [None, "EngineDead: engine 1 is dead", None]
    assert [engine["latency_seconds"] is None for engine in engines] == [False, True, False]
    assert engines[0]["max_model_len"] == 4096


def test_bench_as_json_and_as_a_table(fake, capsys) -> None:
    arguments = ["bench", "--engines", "2", "--requests", "10", "--max-tokens", "4"]
    assert tszmq.cli.main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["engines"], figures["requests"], figures["tokens"]) == (2, 10, 40)
    assert figures["ttft_p50_ms"] == figures["ttft_p99_ms"] == 1.0
    assert figures["tokens_per_second"] > figures["requests_per_second"] > 0
    assert tszmq.cli.main(arguments) == 0
    assert capsys.readouterr().out.split()[:4] == ["engines", "2", "requests", "10"]


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1), (0.0, 1)]
)
def test_quantiles_are_values_that_were_measured(share: float, value: int) -> None:
    assert tszmq.cli._quantile(range(1, 101), share) == value


def test_sim_gets_its_own_arguments(monkeypatch) -> None:
    import tszmq.sim.__main__ as sim

    called: list[Any] = []

    def run_sim(argv: list[str], prog: str) -> int:
        called.append((argv, prog))
        return 7

    monkeypatch.setattr(sim, "main", run_sim)
    assert tszmq.cli.main(["sim", "--handshake", "tcp://127.0.0.1:1", "--help"]) == 7
    assert called == [(["--handshake", "tcp://127.0.0.1:1", "--help"], "tszmq sim")]


# --- the real thing --------------------------------------------------------------------------


def tszmq_command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tszmq", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        **options,
    )


@contextlib.contextmanager
def running(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = tszmq_command(*arguments, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.embedded
@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
def test_generate_end_to_end(protocol: str, unit: float) -> None:
    lines = [request(number, request_id=str(number)) for number in range(200)]
    lines[50] = "broken"
    with running("generate", "--embedded", "2", "--protocol", protocol) as process:
        out, error = process.communicate("\n".join(lines), timeout=30 * unit)
    assert error == "tszmq: 1 of 200 requests failed\n"
    assert process.returncode == 1
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == 200
    assert results.pop(50)["error"].startswith("line 51: not JSON")
    assert [result["request_id"] for result in results] == [str(n) for n in range(200) if n != 50]
    assert {len(result["token_ids"]) for result in results} == {2}
    assert {result["engine_index"] for result in results} == {0, 1}


@pytest.mark.embedded
def test_generate_answers_a_program_that_waits(unit: float) -> None:
    with running("generate", "--embedded", "1") as process:
        assert process.stdin
        assert process.stdout
        for number in range(3):
            process.stdin.write(request(number, request_id=str(number)) + "\n")
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
            assert (result["request_id"], len(result["token_ids"])) == (str(number), 2)
        out, error = process.communicate(timeout=10 * unit)
        assert (process.returncode, out, error) == (0, "", "")


@pytest.mark.embedded
def test_a_closed_pipe_is_quiet(unit: float) -> None:
    with running("generate", "--embedded", "1") as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(request(0) + "\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write(request(1) + "\n")
        process.stdin.close()
        assert process.wait(10 * unit) == 1
        assert process.stderr.read() == ""


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("closed", "code", "lines", "complaint"),
    [
        ("2>&-", 1, 2, ""),
        (">&-", 2, 0, "tszmq: standard output is closed: name an output file with -o\n"),
        (">&- 2>&-", 2, 0, ""),
    ],
)
def test_closed_streams(tmp_path, unit: float, closed, code, lines, complaint) -> None:
    """As a shell closes them."""
    source = tmp_path / "in.jsonl"
    source.write_text(request(1) + "\nbroken\n")
    command = [sys.executable, "-m", "tszmq", "generate", "--embedded", "1", str(source)]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *command],
        capture_output=True,
        text=True,
        timeout=30 * unit,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (code, lines)
    assert done.stderr == complaint


@pytest.mark.embedded
def test_ctrl_c_is_one_line(unit: float) -> None:
    with running("generate", "--embedded", "1", start_new_session=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(request(0) + "\n")
        process.stdin.flush()
        assert process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the engines as well
        assert process.wait(10 * unit) == 130
        assert process.stderr.read() == "tszmq: interrupted\n"


@pytest.fixture
def default_signals() -> Iterator[None]:
    """As programs find them that are not started under nohup, which the tests may be."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_schedulers_and_terminals_end_it_in_order(
    tmp_path: Path, unit: float, number: int, code: int
) -> None:
    """The engine is told to stop, and no files stay behind."""
    address = f"ipc://{tmp_path}/h/handshake.sock"
    private = tmp_path / "private"
    private.mkdir()
    environ = {**os.environ, "TMPDIR": str(private)}
    engine = MockEngine(address, 0)
    with (
        contextlib.closing(engine),
        running("generate", "--endpoint", address, env=environ) as process,
    ):
        assert process.stdin
        assert process.stderr
        process.stdin.write(request(0) + "\n")
        process.stdin.flush()
        engine.connect()
        rid = engine.recv_add().rid
        process.send_signal(number)
        assert process.wait(10 * unit) == code
        assert process.stderr.read().endswith("tszmq: interrupted\n")
        assert engine.recv_abort() == [rid]
    assert list(private.iterdir()) == []
    assert list((tmp_path / "h").iterdir()) == []


def test_a_program_that_runs_a_command_keeps_its_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def probe(_: argparse.Namespace) -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr("tszmq.cli._probe", probe)
    assert tszmq.cli.main(["probe"]) == 0
    assert seen != before[:1]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_is_ignored_stays_so(unit: float) -> None:
    """As under nohup."""
    script = (
        "import signal, sys; from tszmq.cli import main; "
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "code = main(['generate', '/dev/null', '--embedded', '1']); "
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=30 * unit, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.embedded
def test_probe_and_bench_end_to_end(unit: float) -> None:
    with running("probe", "--embedded", "2", "--json") as process:
        out, error = process.communicate(timeout=30 * unit)
    assert (process.returncode, error) == (0, "")
    assert [engine["engine_index"] for engine in json.loads(out)["engines"]] == [0, 1]
    with running("bench", "--requests", "50", "--max-tokens", "8", "--json") as process:
        out, error = process.communicate(timeout=30 * unit)
    assert (process.returncode, error) == (0, "")
    assert json.loads(out)["tokens"] == 400


@pytest.mark.embedded
def test_engines_of_the_sim_command_serve_probe(tmp_path, unit: float) -> None:
    address = f"ipc://{tmp_path}/handshake.sock"
    with running("sim", "--handshake", address, "--ranks", "2") as engines:
        with running("probe", "--endpoint", address, "--engines", "2") as process:
            out, error = process.communicate(timeout=30 * unit)
        assert process.returncode == 0
        assert all("registered" in line or "waiting" in line for line in error.splitlines())
        assert [line.split(":")[0] for line in out.splitlines()] == ["engine 0", "engine 1"]
        engines.send_signal(signal.SIGTERM)
        engines.wait(10 * unit)


def test_nobody_dials_in(tmp_path, unit: float) -> None:
    address = f"ipc://{tmp_path}/handshake.sock"
    with running("probe", "--endpoint", address, "--connect-timeout", "0.2") as process:
        out, error = process.communicate(timeout=10 * unit)
    assert (process.returncode, out) == (1, "")
    assert error.splitlines()[-1].startswith("tszmq: ")
    assert "Traceback" not in error
