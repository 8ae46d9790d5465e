"""Which prompt prefixes an engine has seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Remembers whole pages of prompts, least recently used ones are forgotten.

    A simplification: it tells what would be cached and saves prefill budget, but a request still
    holds all its own pages.

    Args:
        page_size: Tokens a page.
        capacity: Pages remembered at most.
    """

    def __init__(self, page_size: int, capacity: int) -> None:
        self._page_size = page_size
        self._capacity = capacity
        # A page is named by its tokens and all that come before it.
        self._pages: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()

    def admit(self, prompt: Sequence[int]) -> int:
        """Remember the prompt.

        Returns:
            How many of its tokens were known; never all, the last one is always computed.
        """
        size = self._page_size
        known = 0
        chain = 0
        for end in range(size, len(prompt) + 1, size):
            chain = hash((chain, tuple(prompt[end - size : end])))
            if chain in self._pages and known == end - size:
                known = end
            self._pages[chain] = None
            self._pages.move_to_end(chain)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)
        return min(known, (len(prompt) - 1) // size * size)
