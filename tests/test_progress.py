"""The line of ``progress=True``."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from tszmq import Client, SamplingParams
from tszmq.progress import meter


class HungUp(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def closed() -> io.StringIO:
    """A stream that somebody closed."""
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_line_that_ends(monkeypatch) -> None:
    """Written over, not at every call, and the last says all."""
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    line = meter(True)
    assert line is not None
    for done in range(100):
        if line.is_due(done, False):
            line.show(done, 100, False)
    assert line.is_due(99, True)
    line.show(100, 100, True)
    lines = stderr.getvalue().split("\r")
    assert (lines[0], lines[1], lines[-1]) == ("", "0/100 done", "100/100 done\n")
    assert len(lines) < 50


@pytest.mark.embedded
@pytest.mark.parametrize(
    "stderr",
    [None, closed(), object(), HungUp()],
    ids=["none", "closed", "no stream", "hung up"],
)
def test_a_line_that_goes_nowhere_costs_no_result(monkeypatch, stderr) -> None:
    with Client.embedded(1) as client:
        monkeypatch.setattr(sys, "stderr", stderr)
        many = client.generate_many([[1], [2]], SamplingParams(max_tokens=2), progress=True)
    assert [len(done.token_ids) for done in many] == [2, 2]
