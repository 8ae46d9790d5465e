"""What a model's directory says of its end tokens: vLLM's engine knows none unless told.

The engine has no tokenizer and reads no model configuration for this; its frontend sends the
ids with every request. Without them generation goes on to ``max_tokens``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from tszmq.checks import MAX_TOKEN_ID, shown
from tszmq.errors import InvalidRequest

__all__ = ["ModelFacts", "end_token_ids", "read_model"]

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_DIGITS = 10  # of an id


@attrs.frozen
class ModelFacts:
    """What requests need to know of a model.

    Attributes:
        eos_token_ids: Its end tokens, the main one first.
        vocab_size: Rows of its embedding, or None when its configuration does not say.
    """

    eos_token_ids: tuple[int, ...]
    vocab_size: int | None


def end_token_ids(value: object, what: str = "eos_token_id") -> tuple[int, ...]:
    """An id, or a sequence of ids, each once.

    Raises:
        TypeError: It is neither.
        InvalidRequest: An id is out of [0, 2**31).
    """
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"{what} must be an int or a sequence of ints, got {shown(value)}")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise TypeError(f"{what} must hold ints, got {shown(item)}")
        if not 0 <= item <= MAX_TOKEN_ID:
            raise InvalidRequest(f"{what} must be in [0, {MAX_TOKEN_ID}], got {shown(item)}")
    return tuple(int(item) for item in dict.fromkeys(items))


def read_model(directory: str | os.PathLike[str], *, ends_needed: bool = True) -> ModelFacts:
    """Read what a model's files say, as vLLM's frontend does.

    It stops at the end token of the tokenizer, which is the main one, and at those of
    ``generation_config.json`` or, where there is no such file, of ``config.json``. Where the
    tokenizer's cannot be told from its JSON files, those of both configurations count, the main
    one first.

    Args:
        directory: Of a model, on this machine.
        ends_needed: Whether it is an error that none is named.

    Raises:
        TypeError: Not a path.
        InvalidRequest: There is no such model, its files cannot be read, or none of them names
            an end token.
    """
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise TypeError(f"model must be a path, got {shown(directory)}")
    config = _read_json(path, _CONFIG)
    if config is None:
        raise InvalidRequest(
            f"model={path!r:.200} must be the directory of a model on this machine: it has no "
            f"{_CONFIG}"
        )
    generation = _read_json(path, _GENERATION)
    configured = _ids_in(_value(config, "eos_token_id"), path, _CONFIG)
    generated = _ids_in((generation or {}).get("eos_token_id"), path, _GENERATION)
    vocab_size = _vocab_size(config, path)
    main = _tokenizer_end(path) if ends_needed else None
    # Tokenizers may have tokens that the model cannot generate.
    if main is None or (vocab_size is not None and main >= vocab_size):
        ids = (*configured, *generated)
    else:
        ids = (main, *(configured if generation is None else generated))
    if ends_needed and not ids:
        raise InvalidRequest(
            f"neither {_CONFIG} nor {_GENERATION} in {path!r:.200} has an eos_token_id: give "
            "eos_token_id=... (or eos_token_id=[] if there is none)"
        )
    return ModelFacts(tuple(dict.fromkeys(ids)), vocab_size)


def _tokenizer_end(directory: str) -> int | None:
    """The id of the tokenizer's end token; None where its JSON files do not tell."""
    tokenizer = _tokenizer_file(directory, "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    for found in _ids_of(token, tokenizer.get("added_tokens_decoder"), directory):
        if type(found) is int and 0 <= found <= MAX_TOKEN_ID:
            return found
    return None


def _tokenizer_file(directory: str, name: str) -> dict[str, Any]:
    """The object in it; empty where there is none that can be read: nobody has to have one."""
    try:
        return _read_json(directory, name) or {}
    except InvalidRequest:
        return {}


def _ids_of(token: str, added: object, directory: str) -> Iterator[object]:
    """What the files of a tokenizer call a token, the small ones first."""
    if isinstance(added, Mapping):
        for key, entry in added.items():
            if isinstance(entry, Mapping) and entry.get("content") == token:
                yield int(key) if key.isdecimal() and len(key) <= _DIGITS else None
    whole = _tokenizer_file(directory, "tokenizer.json")
    entries = whole.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token:
            yield entry.get("id")
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        yield vocabulary.get(token)
    elif isinstance(vocabulary, list):  # pieces and their scores
        pieces = enumerate(vocabulary)
        yield from (at for at, piece in pieces if isinstance(piece, list) and piece[:1] == [token])


def _read_json(directory: str, name: str) -> dict[str, Any] | None:
    """The object in a file; None when there is no file."""
    path = os.path.join(directory, name)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path!r:.200} cannot be read: {error!s:.200}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path!r:.200} must hold an object, got {type(content).__name__}")
    return content


def _value(config: Mapping[str, Any], name: str) -> object:
    """A key of the language model, which multimodal models have inside ``text_config``."""
    value = config.get(name)
    inner = config.get("text_config")
    if value is None and isinstance(inner, Mapping):
        return inner.get(name)
    return value


def _ids_in(value: object, directory: str, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        return end_token_ids(value)
    except (TypeError, InvalidRequest) as error:
        raise InvalidRequest(f"{os.path.join(directory, name)!r:.200}: {error}") from None


def _vocab_size(config: Mapping[str, Any], directory: str) -> int | None:
    size = _value(config, "vocab_size")
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        path = os.path.join(directory, _CONFIG)
        raise InvalidRequest(f"{path!r:.200}: vocab_size must be a positive int, got {shown(size)}")
    return size
