"""Every chunk of many requests in one thread."""

from __future__ import annotations

import pytest

import tszmq
from tests.mock_engine import UNIT
from tszmq import Client, SamplingParams, TokenChunk
from tszmq.sim import expected_logprobs, expected_tokens


@pytest.fixture(scope="module")
def client():
    with Client.embedded(2) as client:
        yield client


@pytest.fixture
def slow():
    """A client whose engine takes much longer for a long output than a test may stand still."""
    with Client.embedded(1, step_ms=2) as client:
        yield client


def test_chunks_joined_are_the_whole_outputs(client):
    """With logprobs beside them, counts that grow, and one last chunk each."""
    prompts = [[i, i + 1] for i in range(100)]
    params = SamplingParams(max_tokens=40, logprobs=True)
    tokens: dict[int, list[int]] = {i: [] for i in range(100)}
    logprobs: dict[int, list[float]] = {i: [] for i in range(100)}
    ended = {}
    for index, chunk in client.stream_many(prompts, params, max_inflight=30):
        assert index not in ended
        tokens[index] += chunk.token_ids
        logprobs[index] += chunk.logprobs
        assert chunk.completion_tokens == len(tokens[index])
        if chunk.finish_reason is not None:
            ended[index] = chunk.finish_reason
    assert ended == dict.fromkeys(range(100), "length")
    assert tokens == {i: expected_tokens(prompt, 40) for i, prompt in enumerate(prompts)}
    assert all(values == expected_logprobs(40) for values in logprobs.values())


def test_chunks_come_while_others_run(slow):
    """A short request's last chunk before a long one's."""
    params = [SamplingParams(max_tokens=7000), SamplingParams(max_tokens=2)]
    chunks = slow.stream_many([[1], [2]], params)
    assert next(i for i, chunk in chunks if chunk.finish_reason) == 1
    assert slow.inflight(0) == 1
    chunks.close()


def test_leaving_aborts(client):
    """Closing the iterator ends what is unfinished."""
    chunks = client.stream_many([[1], [2], [3]], SamplingParams(max_tokens=5000))
    index, chunk = next(chunks)
    assert isinstance(chunk, TokenChunk)
    assert index in range(3)
    chunks.close()
    assert [client.inflight(engine.engine_index) for engine in client.engines] == [0, 0]


def test_errors_stand_in_their_places(slow):
    """What came before an error is handed out before it."""
    params = SamplingParams(max_tokens=7000, ignore_eos=True)
    seen: dict[int, list[object]] = {0: [], 1: []}
    timeout = 1.5 * UNIT
    for index, item in slow.stream_many([[1], []], params, errors="return", timeout=timeout):
        seen[index].append(item)
    assert isinstance(seen[1][0], tszmq.InvalidRequest)
    *chunks, last = seen[0]
    assert isinstance(last, tszmq.DeadlineExceeded)
    came = [token for chunk in chunks for token in chunk.token_ids]  # type: ignore[attr-defined]
    assert last.partial is not None
    assert came == last.partial.token_ids
    with pytest.raises(tszmq.InvalidRequest):
        list(slow.stream_many([[1], []], params))


def test_closing_the_client_ends_it():
    """ClientClosed for each that was unfinished."""
    with Client.embedded(1, step_ms=2) as own:
        chunks = own.stream_many([[1], [2]], SamplingParams(max_tokens=5000), errors="return")
        next(chunks)
        own.close()
        rest = [item for _, item in chunks]
        assert sum(isinstance(item, tszmq.ClientClosed) for item in rest) == 2
