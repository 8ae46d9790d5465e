"""What callers give, checked and made plain: the validators and converters of ``tszmq.types``.

Nothing but plain ints, floats, bools and text reaches an encoder: an engine that cannot read
one field of a request drops it in silence, or dies.
"""

from __future__ import annotations

import json
import marshal
import math
import sys
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any, cast

import attrs

from tszmq.errors import InvalidRequest

MAX_TOKEN_ID = 2**31 - 1  # token ids are int32 inside the engines
_MAX_COUNT = 2**31 - 1  # so are lengths and ranks
MAX_SEED = 2**63 - 1  # the engines keep seeds as int64
MAX_TOKENS = 2**24  # in one sequence, where no engine says less: a bound for what is copied
_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """A value for an error text: bounded, and never an error of its own."""
    try:
        words = repr(value)
    except Exception:  # an int of more than 4,300 digits, or somebody's __repr__
        return f"a value of type {type(value).__name__}"
    return words if len(words) <= _SHOWN_CHARS else f"{words[: _SHOWN_CHARS - 3]}..."


def engines_listed(indices: Iterable[int]) -> str:
    """For an error about an index that none of them has."""
    return f"the engines are: {', '.join(map(str, sorted(indices))) or 'none'}"


def _plain(value: Any) -> Any:
    """The Python number in a numpy or torch scalar or an enum; anything else as it is."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value


# Converters, one a type, so that type checkers see the type of the argument.


def plain_int(value: int) -> int:
    return value if type(value) is int else cast(int, _plain(value))


def int_or_none(value: int | None) -> int | None:
    return value if value is None or type(value) is int else cast(int, _plain(value))


def plain_bool(value: bool) -> bool:
    return value if type(value) is bool else cast(bool, _plain(value))


def plain_float(value: float) -> float:
    """As float, also when an int is given: that is how the engines read these fields."""
    if type(value) is float:
        return value
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        return cast(float, plain)
    try:
        return float(plain)
    except OverflowError:
        return math.inf if plain > 0 else -math.inf


def whole_number(value: object, what: str, *, or_none: bool = False) -> int:
    """An argument that is an int, or numpy's; ``or_none``: None would do, which was looked for.

    Raises:
        TypeError: It is neither.
    """
    plain = value if type(value) is int else _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        kind = "an int or None" if or_none else "an int"
        raise TypeError(f"{what} must be {kind}, got {shown(value)}")
    return plain


def plain_number(value: object) -> object:
    """A number as Python's own; anything else as it is."""
    return value if type(value) in (int, float) else _plain(value)


# Validators.


def integer(low: int, high: int = _MAX_COUNT, *, optional: bool = False) -> Any:
    """An attrs validator: an int (no bool) within [low, high]."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{attribute.name} must be an int, got {shown(value)}")
        if not low <= value <= high:
            raise InvalidRequest(f"{attribute.name} must be in [{low}, {high}], got {shown(value)}")

    return check


def number(low: float, high: float = math.inf, *, above_low: bool = False) -> Any:
    """An attrs validator: a finite float within [low, high] or (low, high]."""
    if math.isinf(high):
        wanted = f"finite and {'above' if above_low else 'at least'} {low}"
    else:
        wanted = f"in {'(' if above_low else '['}{low}, {high}]"

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, float):
            raise TypeError(f"{attribute.name} must be a number, got {shown(value)}")
        # Written so that NaN fails it.
        if not (math.isfinite(value) and low <= value <= high and not (above_low and value == low)):
            raise InvalidRequest(f"{attribute.name} must be {wanted}, got {value}")

    return check


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{attribute.name} must be True or False, got {shown(value)}")


def text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{attribute.name} is not valid Unicode text: {error}") from None
    if "\0" in value:  # xgrammar takes a regex up to there, or ends the engine's process
        raise InvalidRequest(f"{attribute.name} must not have a NUL character, got {shown(value)}")


def token_tuple(value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (set, frozenset)):  # here, unlike in a prompt, no order is lost
        value = sorted(value)
    return tuple(_token_ids(value, "stop_token_ids"))


def schema_text(value: str | Mapping[str, Any] | None) -> str | None:
    """A JSON schema may be given as the mapping itself."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema cannot be written as JSON: {error}") from None
    except TypeError as error:  # a value, or a key, that JSON has no word for
        raise TypeError(f"json_schema cannot be written as JSON: {error}") from None


def bias_map(value: Mapping[int, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {type(value).__name__}")
    tokens = _token_ids(list(value), "logit_bias keys")
    return dict(zip(tokens, map(_bias, tokens, value.values()), strict=True))


def _bias(token: int, bias: object) -> float:
    plain = plain_float(cast(float, bias))
    if not isinstance(plain, float):
        raise TypeError(f"logit_bias values must be numbers, got {shown(bias)} for {token}")
    if not math.isfinite(plain):
        raise InvalidRequest(f"logit_bias values must be finite, got {plain} for {token}")
    return plain


def extra_map(value: Mapping[str, Any] | None) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"extra must be a mapping, got {type(value).__name__}")
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"extra must map wire names to values, got the name {shown(name)}")
    return dict(value)


def token_id_list(ids: object, *, what: str = "token ids", at_most: int = MAX_TOKENS) -> list[int]:
    """A caller's token ids as a fresh list of plain ints.

    Args:
        ids: Any sequence or array-like of integers, one-dimensional.
        what: What the error messages call it.
        at_most: How many there may be; more are refused before they are copied.

    Raises:
        TypeError: Not a sequence of integers (bools, floats, text and nesting included).
        InvalidRequest: Empty, too many, or an id out of [0, 2**31).
    """
    tokens = _token_ids(ids, what, at_most)
    if not tokens:
        raise InvalidRequest(f"{what} must not be empty")
    return tokens


_NOT_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping, Set)


def _token_ids(ids: object, what: str, at_most: int = MAX_TOKENS) -> list[int]:
    """As ``token_id_list``, but may be empty."""
    items: Any = ids if type(ids) is list else _sequence(ids, what, at_most)
    _check_length(items, what, at_most)
    # Of another's type, no more than that: its length need not be true.
    tokens = list(items if type(items) in _HONEST else islice(items, at_most + 1))
    _check_length(tokens, what, at_most)
    if _are_plain(tokens):
        return tokens
    if tokens and set(map(type, tokens)) != {int}:
        tokens = [_token_id(token, position, what) for position, token in enumerate(tokens)]
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high > MAX_TOKEN_ID:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{what} must be in [0, {MAX_TOKEN_ID}], got {shown(wrong)} "
            f"at position {tokens.index(wrong)}"
        )
    return tokens


def _sequence(ids: object, what: str, at_most: int) -> Any:
    """What of a caller's has items and a length."""
    tolist = getattr(ids, "tolist", None)
    items: Any = ids
    if isinstance(ids, _NOT_SEQUENCES):
        items = None
    elif callable(tolist):
        _check_shape(ids, what)
        _check_length(ids, what, at_most)
        items = tolist()
        if not isinstance(items, list):
            raise TypeError(f"{what} must be one-dimensional, got a single value: {shown(items)}")
    # An iterator is refused: it may be endless, and is empty when the call is tried again.
    if not (hasattr(type(items), "__iter__") and hasattr(type(items), "__len__")):
        hint = ", which a tokenizer has to turn into token ids" if isinstance(ids, str) else ""
        raise TypeError(
            f"{what} must be a sequence of ints such as a list, got {type(ids).__name__}{hint}"
        )
    return items


_HONEST = (list, tuple, range)
# Of a list as ``marshal`` writes it: a letter and the length, then a letter and 32 bits an int.
_HEADER = _ITEM = 5
_FIRST_VERSION = 0  # of its format: an item that comes again is written again


def _are_plain(tokens: list[Any]) -> bool:
    """Whether all are ints, of that very type, in [0, 2**31): seen in two passes of C code.

    ``marshal`` writes such an int as ``i`` and four bytes, the lowest first. Everything else
    starts with another letter, or is refused: so where an ``i`` starts, the next item starts
    five bytes on.
    """
    if not tokens or type(tokens[0]) is not int:  # nothing large is written just to be refused
        return False
    try:
        table = marshal.dumps(tokens, _FIRST_VERSION)
    except ValueError:
        return False
    return (
        table[_HEADER::_ITEM] == b"i" * len(tokens)
        and table[_HEADER + _ITEM - 1 :: _ITEM].isascii()
    )


def _check_shape(ids: object, what: str) -> None:
    """An array of few rows can have any number of items."""
    dimensions = getattr(ids, "ndim", 1)
    if isinstance(dimensions, int) and dimensions > 1:
        raise TypeError(f"{what} must be one-dimensional, got {dimensions} dimensions")


def _check_length(ids: Any, what: str, at_most: int) -> None:
    """Before anything is copied: a range takes no memory, the list of its items may take all."""
    try:
        length = len(ids)
    except TypeError:  # an array of no dimension, or one that does not say
        return
    except OverflowError:
        raise InvalidRequest(
            f"the length of {what} must be at most {at_most}, got more than {sys.maxsize}"
        ) from None
    if length > at_most:
        raise InvalidRequest(f"the length of {what} must be at most {at_most}, got {length}")


def _token_id(token: object, position: int, what: str) -> int:
    """One item that may be no plain int: numpy scalars and the like pass, bools do not."""
    plain = _plain(token)
    index = getattr(type(plain), "__index__", None)
    # An array of one value has __index__ too; inside a sequence it means nesting.
    if isinstance(plain, bool) or index is None or hasattr(plain, "__len__"):
        hint = ""
        if position == 0 and isinstance(token, (list, tuple)):
            hint = ": for several prompts, call generate_many"
        raise TypeError(
            f"{what} must hold ints, got {type(token).__name__} ({shown(token)}) "
            f"at position {position}{hint}"
        )
    return int(index(plain))
