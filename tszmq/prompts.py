"""What a batch call is given: prompts, and the parameters of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from tszmq.errors import InvalidRequest
from tszmq.types import SamplingParams

__all__ = ["Prompts"]

_NO_MORE: Any = object()


class Prompts:
    """Prompts, pulled one by one from whatever the caller has, each with its parameters.

    Args:
        prompts: An iterable of prompts.
        params: One ``SamplingParams`` or None for all, or an iterable with one for each.
        check: Called whenever code of the caller's has run, which may have forked.

    Attributes:
        total: How many prompts there are; None when they do not say.
        pulled: How many have been pulled, or passed over.

    Raises:
        TypeError, InvalidRequest: They are something else, or not as many.
    """

    def __init__(
        self, prompts: Iterable[object], params: object, check: Callable[[], None]
    ) -> None:
        self._prompts = _numbered(prompts)
        self.total = _length(prompts)
        self._params = _each(params, self.total)
        self._checks_params = isinstance(params, Sized)  # an iterator may have more, or no end
        self._check = check
        self.pulled = 0

    def pull(self) -> tuple[int, object]:
        """The next prompt and its index, which is -1 when there is none."""
        index, prompt = next(self._prompts, (-1, None))
        self._check()
        if index >= 0:
            self.pulled = index + 1
        return index, prompt

    def params_of(self, index: int) -> SamplingParams | None:
        """The parameters of the prompt that was pulled last.

        Raises:
            InvalidRequest: There are none.
        """
        params = next(self._params, _NO_MORE)
        self._check()
        if params is _NO_MORE:
            raise InvalidRequest(f"prompt {index} has no sampling_params: there are no more")
        return params

    def check_end(self) -> None:
        """There are no more prompts.

        Raises:
            InvalidRequest: There are more parameters.
        """
        if self._checks_params and next(self._params, _NO_MORE) is not _NO_MORE:
            raise InvalidRequest(f"{self.pulled} prompts came, and more sampling_params")

    def skip_rest(self) -> range:
        """The indices of those that will not be pulled, as far as their number is known."""
        rest = range(self.pulled, max(self.pulled, self.total or 0))
        self.pulled = rest.stop
        return rest


def _numbered(prompts: Iterable[object]) -> Iterator[tuple[int, object]]:
    kind = type(prompts)
    if issubclass(kind, (str, bytes)) or not (
        hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    ):
        raise TypeError(f"prompts must be an iterable of prompts, got {kind.__name__}")
    return enumerate(prompts)


def _length(prompts: Iterable[object]) -> int | None:
    """How many there are; None when they do not say."""
    try:
        return len(prompts) if isinstance(prompts, Sized) else None
    except TypeError:  # such as a loader of a stream
        return None


def _each(params: object, total: int | None) -> Iterator[SamplingParams | None]:
    """The parameters of each prompt, in their order.

    Where the number of prompts is known they are all checked now; else they are pulled beside
    the prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return itertools.repeat(params)
    if isinstance(params, (str, bytes, Mapping)) or not isinstance(params, Iterable):
        raise TypeError(
            "sampling_params must be SamplingParams, or an iterable with one for each prompt; "
            f"got {type(params).__name__}"
        )
    if total is None:
        return iter(params)
    given = list(params if isinstance(params, Sized) else itertools.islice(params, total))
    for index, each in enumerate(given):
        if each is not None and not isinstance(each, SamplingParams):
            raise TypeError(
                f"sampling_params[{index}] must be SamplingParams, got {type(each).__name__}"
            )
    if len(given) != total:
        raise InvalidRequest(f"there are {total} prompts and {len(given)} sampling_params")
    return iter(given)
