"""End tokens: from a model's directory, and as options of ``find_protocol``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.wire.vllm_vectors import engine, engine_view
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import SamplingParams
from tszmq.wire import find_protocol
from tszmq.wire.base import AddRequest, WireProtocol
from tszmq.wire.tokenspeed import TokenSpeed
from tszmq.wire.vllm import Vllm
from tszmq.wire.vllm.eos import ModelFacts, end_token_ids, read_model


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Makes a model's directory of a configuration and perhaps one for generation."""

    def make(config: Any = None, generation: Any = None) -> Path:
        for name, content in (("config.json", config), ("generation_config.json", generation)):
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("config", "generation", "facts"),
    [
        ({"eos_token_id": 2}, None, ((2,), None)),
        ({"eos_token_id": 2, "vocab_size": 32000}, None, ((2,), 32000)),
        ({"eos_token_id": [7, 9, 8]}, None, ((7, 9, 8), None)),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 2, 4]}, ((2, 3, 4), None)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, ((5,), None)),
        ({}, {"eos_token_id": [5, 5]}, ((5,), None)),
        ({"eos_token_id": 2}, {}, ((2,), None)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, ((2,), None)),
        ({"text_config": {"eos_token_id": 6, "vocab_size": 100}}, None, ((6,), 100)),
        (
            {"eos_token_id": 2, "vocab_size": 9, "text_config": {"eos_token_id": 6}},
            None,
            ((2,), 9),
        ),
        ({"eos_token_id": 2, "text_config": {"vocab_size": 50}}, None, ((2,), 50)),
    ],
)
def test_models(model: Any, config: Any, generation: Any, facts: tuple[Any, ...]) -> None:
    directory = model(config, generation)
    assert read_model(directory) == ModelFacts(*facts)
    assert read_model(str(directory)) == ModelFacts(*facts)


DECODER = {"added_tokens_decoder": {"2": {"content": "</s>"}, "259": {"content": "<|im_end|>"}}}
BPE = {
    "added_tokens": [{"id": 259, "content": "<|im_end|>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "yes": 77}},
}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["</s>", -1.5], ["yes", -2.0]]}}


@pytest.mark.parametrize(
    ("generation", "tokenizer", "whole", "ends"),
    [
        # The tokenizer's is the main one, whatever the configurations call theirs.
        (None, {"eos_token": "<|im_end|>", **DECODER}, None, (259, 2)),
        (None, {"eos_token": {"content": "<|im_end|>"}, **DECODER}, None, (259, 2)),
        (None, {"eos_token": "<|im_end|>"}, BPE, (259, 2)),
        (None, {"eos_token": "yes", **DECODER}, BPE, (77, 2)),
        (None, {"eos_token": "yes"}, UNIGRAM, (2,)),
        ({"eos_token_id": [2, 9]}, {"eos_token": "<|im_end|>"}, BPE, (259, 2, 9)),
        ({"eos_token_id": [9, 259]}, {"eos_token": "<|im_end|>"}, BPE, (259, 9)),
        # A generation configuration replaces the other.
        ({"eos_token_id": 7}, {"eos_token": "yes"}, BPE, (77, 7)),
        ({}, {"eos_token": "yes"}, BPE, (77,)),
        # The tokenizer does not tell: both configurations count.
        ({"eos_token_id": 7}, None, BPE, (2, 7)),
        ({"eos_token_id": 7}, {"eos_token": None}, BPE, (2, 7)),
        ({"eos_token_id": 7}, {"eos_token": "nowhere", **DECODER}, BPE, (2, 7)),
        ({"eos_token_id": 7}, {"eos_token": "nowhere"}, None, (2, 7)),
        # Files of another make.
        (None, {"eos_token": ["yes"]}, BPE, (2,)),
        (None, {"eos_token": "yes", "added_tokens_decoder": ["yes"]}, None, (2,)),
        (
            None,
            {"eos_token": "yes", "added_tokens_decoder": {"7" * 5000: {"content": "yes"}}},
            None,
            (2,),
        ),
        (None, {"eos_token": "yes"}, "version https://git-lfs.github.com/spec/v1", (2,)),
        (None, "version https://git-lfs.github.com/spec/v1", BPE, (2,)),
        (None, ["yes"], BPE, (2,)),
        # A token that the model cannot generate.
        (None, {"eos_token": "yes"}, {"model": {"vocab": {"yes": 1000}}}, (2,)),
        (None, {"eos_token": "yes", "added_tokens_decoder": {"x": {"content": "yes"}}}, None, (2,)),
        (None, {"eos_token": "yes"}, {"added_tokens": {"yes": 5}, "model": "yes"}, (2,)),
        (None, {"eos_token": "yes"}, {"added_tokens": ["yes"], "model": {"vocab": 5}}, (2,)),
        (None, {"eos_token": "yes"}, {"model": {"vocab": {"yes": "77"}}}, (2,)),
        (None, {"eos_token": "yes"}, {"model": {"vocab": {"yes": True}}}, (2,)),
        (None, {"eos_token": "yes"}, {"model": {"vocab": {"yes": -1}}}, (2,)),
        (None, {"eos_token": "yes"}, {"model": {"vocab": [5, [], None, ["yes"]]}}, (3, 2)),
    ],
)
def test_the_end_of_the_tokenizer(
    model: Any, generation: Any, tokenizer: Any, whole: Any, ends: tuple[int, ...]
) -> None:
    """As vLLM's own frontend stops."""
    directory = model({"eos_token_id": 2, "vocab_size": 1000}, generation)
    for name, content in (("tokenizer_config.json", tokenizer), ("tokenizer.json", whole)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text, encoding="utf-8")
    assert read_model(directory).eos_token_ids == ends


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        (None, None, "has no config.json"),
        (None, {"eos_token_id": 2}, "has no config.json"),
        ({}, None, r"eos_token_id=\[\] if there is none"),
        ({"eos_token_id": []}, {"eos_token_id": None}, "neither config.json nor"),
        ({"eos_token_id": "</s>"}, None, "config.json.*eos_token_id must be an int or"),
        ({"eos_token_id": True}, None, "eos_token_id must hold ints, got True"),
        ({"eos_token_id": 2.0}, None, "eos_token_id must be an int or"),
        ({"eos_token_id": [2, None]}, None, "eos_token_id must hold ints, got None"),
        ({"eos_token_id": {"a": 1}}, None, "eos_token_id must be an int or"),
        ({"eos_token_id": -1}, None, "config.json.*must be in"),
        ({"eos_token_id": 2**31}, None, "must be in"),
        ({"eos_token_id": 2}, {"eos_token_id": "x"}, "generation_config.json.*must be an int"),
        ({"eos_token_id": 2, "vocab_size": 0}, None, "vocab_size must be a positive int"),
        ({"eos_token_id": 2, "vocab_size": "9"}, None, "vocab_size must be a positive int"),
        ({"eos_token_id": 2, "vocab_size": True}, None, "vocab_size must be a positive int"),
        ("{", None, "config.json' cannot be read"),
        ("[1]", None, "must hold an object, got list"),
        ("[" * 100_000, None, "cannot be read"),
        ({"eos_token_id": 2}, "nonsense", "generation_config.json' cannot be read"),
    ],
)
def test_models_that_say_nothing_sensible(
    model: Any, config: Any, generation: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_model(model(config, generation))


def test_files_that_are_no_text(model: Any) -> None:
    directory = model({})
    (directory / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_model(directory)


def test_what_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    for path in (tmp_path / "absent", file, "org/model", "nul\0"):
        with pytest.raises(InvalidRequest):
            read_model(path)
    for wrong in (5, b"bytes"):
        with pytest.raises(TypeError):
            read_model(wrong)  # type: ignore[arg-type]


def test_ids_come_once_each_and_in_order() -> None:
    assert end_token_ids(5) == (5,)
    assert end_token_ids([5, 3, 5]) == (5, 3)
    assert end_token_ids(range(3)) == (0, 1, 2)
    assert end_token_ids(()) == ()


# -- find_protocol ------------------------------------------------------------------------


def ends(protocol: WireProtocol) -> list[int]:
    request = AddRequest("r", [1], SamplingParams(), True, None, engine())
    seen: list[int] = engine_view(protocol.encode_add(request))["sampling_params"][
        "_all_stop_token_ids"
    ]
    return seen


def test_protocols_by_name() -> None:
    assert isinstance(find_protocol("tokenspeed"), TokenSpeed)
    assert isinstance(find_protocol("vllm"), Vllm)
    for name in ("tokenspeed", "vllm"):
        assert find_protocol(name).name == name
    with pytest.raises(InvalidRequest, match="'tokenspeed', 'vllm', got 'sglang'"):
        find_protocol("sglang")
    with pytest.raises(TypeError, match="must be a str"):
        find_protocol(None)


def test_options_of_vllm(model: Any) -> None:
    directory = model({"eos_token_id": 2, "vocab_size": 50}, {"eos_token_id": [2, 3]})
    assert ends(find_protocol("vllm")) == []
    assert ends(find_protocol("vllm", eos_token_id=5)) == [5]
    assert ends(find_protocol("vllm", eos_token_id=[5, 4])) == [4, 5]
    assert ends(find_protocol("vllm", model=directory)) == [2, 3]
    assert ends(find_protocol("vllm", model=directory, eos_token_id=5)) == [5]
    assert ends(find_protocol("vllm", model=directory, eos_token_id=[])) == []


def test_the_models_vocabulary_is_known(model: Any) -> None:
    protocol = find_protocol("vllm", model=model({"vocab_size": 50}), eos_token_id=[])
    protocol.check([49], SamplingParams(), None, engine())
    with pytest.raises(InvalidRequest, match="below 50"):
        protocol.check([50], SamplingParams(), None, engine())
    with pytest.raises(InvalidRequest, match="below 50"):
        find_protocol("vllm", model=model({"vocab_size": 50}), eos_token_id=50)


def test_a_model_without_end_tokens_needs_a_word_from_the_caller(model: Any) -> None:
    with pytest.raises(InvalidRequest, match="give eos_token_id"):
        find_protocol("vllm", model=model({}))
    assert ends(find_protocol("vllm", model=model({}), eos_token_id=[])) == []


@pytest.mark.parametrize("wrong", ["2", 2.0, [True], {"a": 1}, {2}])
def test_end_tokens_of_wrong_types(wrong: Any) -> None:
    with pytest.raises(TypeError, match="eos_token_id"):
        find_protocol("vllm", eos_token_id=wrong)


def test_tokenspeed_has_no_use_for_them(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"eos_token_id": 2}, {"eos_token_id": []}, {"model": tmp_path}]
    for option in options:
        with pytest.raises(UnsupportedField, match="TokenSpeed"):
            find_protocol("tokenspeed", **option)
