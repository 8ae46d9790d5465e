from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator

import attrs
import pytest

from tszmq import jsonl
from tszmq.jsonl import InOrder, LineError, LineSource, RequestLine, error_line, result_line
from tszmq.types import Completion, SamplingParams

COMPLETION = Completion("wire", [1, 2], "stop", None, 3, 2, 1, 4, 0.0, 0.1, 0.2)


def parse(text: str, **defaults: int) -> RequestLine:
    return RequestLine.parse(text.encode(), defaults)


def test_a_full_line() -> None:
    request = parse(
        '{"prompt_token_ids": [1, 2], "request_id": "a",'
        ' "sampling_params": {"max_tokens": 3, "logit_bias": {"7": -1}}}'
    )
    assert request == RequestLine([1, 2], SamplingParams(max_tokens=3, logit_bias={7: -1.0}), "a")


def test_a_short_line_and_nulls() -> None:
    short = parse('{"prompt_token_ids": [1]}')
    assert short == RequestLine([1], SamplingParams(), None)
    assert parse('{"prompt_token_ids": [1], "sampling_params": null, "request_id": null}') == short


def test_defaults_are_for_what_the_line_does_not_say() -> None:
    own = '{"prompt_token_ids": [1], "sampling_params": {"max_tokens": 5}}'
    assert parse(own, max_tokens=9).sampling_params.max_tokens == 5
    assert parse('{"prompt_token_ids": [1]}', max_tokens=9).sampling_params.max_tokens == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "JSON object"),
        ('"text"', "JSON object"),
        ("{}", "prompt_token_ids is missing"),
        ('{"prompt": [1]}', "unknown field 'prompt'"),
        ('{"prompt_token_ids": null}', "prompt_token_ids must be a sequence"),
        ('{"prompt_token_ids": "abc"}', "prompt_token_ids must be a sequence"),
        ('{"prompt_token_ids": {"1": 2}}', "prompt_token_ids must be a sequence"),
        ('{"prompt_token_ids": []}', "must not be empty"),
        ('{"prompt_token_ids": [true]}', "must hold ints"),
        ('{"prompt_token_ids": [1.0]}', "must hold ints"),
        ('{"prompt_token_ids": [-1]}', "must be in"),
        ('{"prompt_token_ids": [1], "sampling_params": []}', "sampling_params must be an object"),
        (
            '{"prompt_token_ids": [1], "sampling_params": {"n": 2}}',
            "unknown sampling parameter 'n'",
        ),
        ('{"prompt_token_ids": [1], "sampling_params": {"top_p": 2}}', "top_p must be"),
        ('{"prompt_token_ids": [1], "sampling_params": {"top_p": NaN}}', "top_p must be"),
        ('{"prompt_token_ids": [1], "sampling_params": {"max_tokens": "5"}}', "max_tokens must be"),
        (
            '{"prompt_token_ids": [1], "sampling_params": {"logit_bias": {"-1": 2}}}',
            "logit_bias keys must be token ids",
        ),
        ('{"prompt_token_ids": [1], "request_id": 5}', "request_id must be text or null, got 5"),
    ],
)
def test_bad_lines_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(LineError, match=message) as caught:
        parse(text)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_no_utf8() -> None:
    with pytest.raises(LineError, match="not JSON"):
        RequestLine.parse(b'{"request_id": "\xff\xfe"}', {})


def test_a_bad_line_keeps_its_label() -> None:
    with pytest.raises(LineError) as caught:
        parse('{"prompt_token_ids": [], "request_id": "mine"}')
    assert caught.value.request_id == "mine"


def test_result_line() -> None:
    assert json.loads(result_line(COMPLETION, "mine")) == {
        "request_id": "mine",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "engine_index": 4,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
    }


def test_result_line_is_json_also_with_numbers_that_json_lacks() -> None:
    completion = attrs.evolve(
        COMPLETION,
        logprobs=[-0.5, -math.inf],
        top_logprobs=[{1: math.nan}, {2: -1.0}],
        prompt_logprobs=[None, {3: math.inf}],
        stop_reason=7,
        weight_versions=[("a", 0, 2)],
    )
    fields = json.loads(result_line(completion, None), parse_constant=pytest.fail)
    assert fields["logprobs"] == [-0.5, None]
    assert fields["top_logprobs"] == [{"1": None}, {"2": -1.0}]
    assert fields["prompt_logprobs"] == [None, {"3": None}]
    assert fields["stop_reason"] == 7
    assert fields["weight_versions"] == [["a", 0, 2]]


def test_lines_hold_no_line_end_and_only_ascii() -> None:
    for line in (error_line("two\nlines \u00e9 \ud800", "\u2028\n"), result_line(COMPLETION, "\n")):
        assert line.isascii()
        assert "\n" not in line
        json.loads(line)


def test_order_is_restored() -> None:
    order = InOrder()
    assert order.put(2, "c") == []
    assert order.put(0, "a") == ["a"]
    assert order.given == 1
    assert order.put(1, "b") == ["b", "c"]
    assert order.given == 3


# --- LineSource ------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[LineSource, int]]:
    reader, writer = os.pipe()
    yield LineSource(reader), writer
    os.close(reader)


def test_waiting_for_ages_is_waiting(pipe) -> None:
    """Longer than poll() can be told."""
    source, writer = pipe
    os.write(writer, b"line\n")
    assert source.next_line(1e15) == b"line"


def test_another_reader_may_be_quicker(pipe, monkeypatch) -> None:
    """The descriptor is shared and does not block: what was there a moment ago may be gone."""
    source, writer = pipe
    os.set_blocking(source._descriptor, False)
    answers = iter([True, True, False])
    monkeypatch.setattr(jsonl, "_wait_for", lambda *_: next(answers))
    assert source.next_line(1.0) is None
    monkeypatch.undo()
    os.write(writer, b"line\n")
    assert source.next_line(1.0) == b"line"


def rest_of(source: LineSource) -> list[bytes]:
    lines = []
    while (line := source.next_line(None)) is not None:
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\n", [b"a\r", b"b"]),
        (b"x" * 200_000 + b"\ny\n", [b"x" * 200_000, b"y"]),
        (b"line\n" * 50_000, [b"line"] * 50_000),
    ],
    ids=len,
)
def test_lines_of_a_file(tmp_path, content: bytes, lines: list[bytes]) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    with open(path, "rb", buffering=0) as file:
        source = LineSource(file.fileno())
        assert rest_of(source) == lines
        assert source.ended


def test_lines_of_a_pipe_come_as_they_are_written(pipe) -> None:
    source, writer = pipe
    assert source.next_line(0) is None
    assert not source.ended
    os.write(writer, b"one\ntw")
    assert source.next_line(0) == b"one"
    assert source.next_line(0) is None
    os.write(writer, b"o\nthree")
    assert source.next_line(0) == b"two"
    assert source.next_line(0) is None
    assert not source.ended
    os.close(writer)
    assert source.next_line(0) == b"three"
    assert source.next_line(0) is None
    assert source.ended


def test_several_lines_of_one_write(pipe) -> None:
    source, writer = pipe
    os.write(writer, b"1\n2\n3\n")
    os.close(writer)
    assert rest_of(source) == [b"1", b"2", b"3"]
