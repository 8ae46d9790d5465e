"""What all tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="module")
def even_few_rows_are_kept_together() -> Iterator[None]:
    """Two or three rows show everything that many would."""
    with mock.patch("tszmq.core.rows._FEWEST_KEPT", 1):
        yield
