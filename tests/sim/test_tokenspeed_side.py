"""The simulator's reading of TokenSpeed's bytes, without sockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sim.raw_frontend import add, pack, unpack
from tszmq.sim import EngineFault, Scheduler, expected_tokens
from tszmq.sim.options import EngineOptions
from tszmq.sim.tokenspeed import TokenSpeedSide
from tszmq.sim.tokenspeed_request import Malformed, read_add, refusal_reason

VECTORS = {
    vector["name"]: vector
    for vector in json.loads((Path(__file__).parents[1] / "vectors/tokenspeed.json").read_text())
}


def frames(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in VECTORS[name]["frames_hex"]]


REQUEST = frames("request-full-defaults")[1]
ONE_ROW = frames("batch-one-running")[0]


class Rig:
    def __init__(self, **options) -> None:
        self.scheduler = Scheduler(eos_token_id=options.pop("eos_token_id", None))
        self.side = TokenSpeedSide(EngineOptions(**options), self.scheduler)

    def take(self, *frames: bytes) -> list:
        return [unpack(frames[0]) for frames in self.side.receive(list(frames))]

    def ask(self, *args, **more) -> list:
        return self.take(b"\0", add(*args, **more))

    def step(self) -> list:
        return [unpack(frames[0]) for frames in self.side.batch(self.scheduler.step())]


def test_a_captured_request_is_understood():
    rig = Rig(index=1)
    assert rig.take(b"\0", REQUEST) == []
    (batch,) = rig.step()
    assert batch[1:7] == [["req-1"], [expected_tokens([1, 2, 3], 1)], [""], [3], [1], [0]]


@pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("request-")])
def test_captured_requests_are_seen_as_the_real_engine_sees_them(name):
    (seen,) = VECTORS[name]["engine_sees"]
    fields, params = read_add(unpack(frames(name)[1]))
    ours = {**fields, "sampling_params": params}
    for field in ("rid", "input_ids", "return_logprob", "stream", "data_parallel_rank"):
        assert ours[field] == seen[field]
    theirs = dict(seen["sampling_params"])
    for field in ("max_new_tokens", "temperature", "top_k", "ignore_eos", "stream_interval", "n"):
        assert params[field] == theirs[field]
    assert sorted(params["stop_token_ids"] or []) == (theirs["stop_token_ids"] or [])
    reason = refusal_reason(fields, params, vocab_size=32000, logprobs_enabled=True)
    no_session = fields["session_params"] is None
    assert (reason is None) == (seen["validation_error"] is None and no_session)


@pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("malformed-")])
def test_captured_malformed_messages_are_dropped(name):
    rig = Rig()
    assert rig.take(*frames(name)) == []
    assert rig.side.counts()["malformed"] == 1


def test_a_malformed_request_says_where():
    with pytest.raises(Malformed, match=r"stream at \$10"):
        read_add(unpack(add("a", [1], _10=0)))


def test_a_batch_has_the_captured_shape():
    rig = Rig(index=1)
    rig.take(b"\0", REQUEST)
    (batch,) = rig.step()
    captured = unpack(ONE_ROW)
    assert len(batch) == len(captured)
    assert [type(column) for column in batch] == [type(column) for column in captured]
    assert (batch[0], batch[9]) == (captured[0], 1)


@pytest.mark.parametrize("era", [9, 10, 14])
def test_eras(era):
    rig = Rig(era=era, index=3)
    rig.ask("a", [1])
    (batch,) = rig.step()
    assert len(batch) == era
    assert batch[9:10] == ([3] if era > 9 else [])


def test_running_counts_the_waiting_ones():
    rig = Rig()
    rig.scheduler._max_num_seqs = 2
    for name in "abcde":
        rig.ask(name, [1])
    (batch,) = rig.step()
    assert batch[10:12] == [5, 3]
    assert len(batch[1]) == 2


def test_logprob_columns_are_empty_for_those_who_did_not_ask():
    rig = Rig()
    rig.ask("a", [1], logprobs=True)
    rig.ask("b", [1])
    (batch,) = rig.step()
    assert batch[7:9] == [[[-0.5], []], [batch[2][0], []]]


REFUSED = {
    "n": {25: 2},
    "temperature": {3: -1.0, 28: True},
    "top_p 0": {4: 0.0},
    "top_p 2": {4: 2},
    "top_p nan": {4: float("nan")},
    "top_k 0": {5: 0},
    "top_k 128": {5: 128},
    "top_k -2": {5: -2},
    "min_p": {6: 1.5},
    "frequency": {7: 2.5},
    "presence": {8: -2.5},
    "repetition": {9: 2.5},
    "min_new_tokens": {10: -1},
    "min over max": {10: 5},
    "max_new_tokens": {0: -1},
    "logit_bias": {22: {"32000": 1.0}},
    "logit_bias text": {22: {"x": 1.0}},
    "logprobs": {24: 1},
    "grammars": {11: "", 12: "a"},
}


@pytest.mark.parametrize("params", REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_alone_in_its_batch(params):
    rig = Rig(index=7)
    rig.ask("fine", [1])
    rig.step()
    raw = add("bad", [1, 2, 3], params={k: v for k, v in params.items() if k < 26})
    if 28 in params:
        fields = unpack(raw)
        fields[5] = [*fields[5], None, 1, None, 0, True]
        raw = pack(fields)
    (batch,) = rig.take(b"\0", raw)
    assert batch[:11] == [
        "BatchTokenIDOutSlim",
        ["bad"],
        [[]],
        ["abort"],
        [3],
        [0],
        [0],
        [[]],
        [[]],
        7,
        1,
    ]
    assert not rig.scheduler.in_flight("bad")


@pytest.mark.parametrize(
    "more",
    [
        {"_7": 0},
        {"_7": 3},
        {"_7": -2},
        {"_8": 1},
        {"_9": [5]},
    ],
)
def test_logprob_refusals(more):
    (batch,) = Rig().ask("bad", [1, 2, 3], logprobs=True, **more)
    assert batch[3] == ["abort"]
    assert Rig().ask("fine", [1, 2, 3], **more) == []  # not looked at without return_logprob


@pytest.mark.parametrize("start", [-1, 2])
def test_logprobs_of_the_last_prompt_token_on(start):
    assert Rig().ask("a", [1, 2, 3], logprobs=True, _7=start) == []


def test_an_engine_without_logprobs_refuses_them():
    (batch,) = Rig(no_output_logprobs=True).ask("a", [1], logprobs=True)
    assert batch[3] == ["abort"]


@pytest.mark.parametrize(
    "params",
    [
        {3: float("nan")},
        {3: float("inf")},
        {3: -1.0},  # becomes greedy before it is checked
        {3: 1},
        {5: 127},
        {5: 1 << 30},
        {9: 0},
        {22: {"31999": 1}},
        {24: 0},
    ],
)
def test_accepted(params):
    assert Rig().ask("a", [1], params=params) == []


GOOD = add("a", [1, 2])


@pytest.mark.parametrize(
    "frames",
    [
        (b"\0",),
        (b"", GOOD),
        (b"\2", GOOD),
        (b"\0", b""),
        (b"\0", GOOD + b"\xc0"),
        (b"\0", GOOD[:-1]),
        (b"\0", pack({"a": 1})),
        (b"\0", pack(unpack(GOOD)[:5])),
        (b"\0", pack(["Other", *unpack(GOOD)[1:]])),
        (b"\0", add("a", ["1"])),
        (b"\0", add("a", [True])),
        (b"\0", add("a", [1.0])),
        (b"\0", add("a", [1], n=4.0)),
        (b"\0", add("a", [1], n=True)),
        (b"\0", add("a", [1], params={3: "1"})),
        (b"\0", add("a", [1], params={15: 1})),
        (b"\0", add("a", [1], params={20: []})),
        (b"\0", add("a", [1], params={2: [1.5]})),
        (b"\0", add("a", [1], stream=0)),
        (b"\0", add(None, [1])),
        (b"\0", add(b"a", [1])),
        (b"\1", pack("a")),
        (b"\1", pack(["a", 5])),
        (b"\1", b"\xc1"),
    ],
)
def test_malformed_messages_are_dropped(frames):
    rig = Rig()
    assert rig.take(*frames) == []
    assert rig.scheduler.idle
    assert rig.side.counts() == {"adds": 0, "aborts": 0, "refused": 0, "malformed": 1}


def test_short_and_long_arrays_are_read():
    rig = Rig()
    short = ["TokenizedGenerateReqInput", "a", None, None, [1], [3]]
    rig.take(b"\0", pack(short))
    captured = unpack(REQUEST)
    rig.take(b"\0", pack([*captured, 9, {}]))
    assert rig.side.counts()["adds"] == 2


@pytest.mark.parametrize(
    "payload",
    [
        add("a", []),
        add("a", [0] * 8191),
        add("a", [2**31]),
        add(["a"], [1], params={23: 5}),
        add("a", [1], _4=None),
    ],
)
def test_what_kills_the_engine(payload):
    with pytest.raises(EngineFault):
        Rig().take(b"\0", payload)


def test_an_id_in_flight_kills_the_engine_also_when_it_would_be_refused():
    rig = Rig()
    rig.ask("a", [1])
    with pytest.raises(EngineFault):
        rig.ask("a", [1], params={4: 5.0})


class TestPendingAborts:
    def test_an_early_abort_silences_the_request(self):
        rig = Rig()
        rig.take(b"\1", pack(["a"]))
        rig.ask("a", [1])
        assert rig.step() == []
        assert rig.scheduler.idle

    def test_it_counts_once(self):
        rig = Rig()
        rig.take(b"\1", pack(["a"]))
        rig.ask("a", [1])
        rig.step()
        rig.step()
        rig.ask("a", [1])
        assert len(rig.step()) == 1

    def test_it_is_forgotten_in_time(self, monkeypatch):
        clock = [100.0]
        monkeypatch.setattr("tszmq.sim.tokenspeed.time.monotonic", lambda: clock[0])
        rig = Rig()
        rig.take(b"\1", pack(["a", "b"]))
        clock[0] += 301
        rig.ask("a", [1])
        assert len(rig.step()) == 1
        rig.take(b"\1", pack(["c"]))
        assert list(rig.side._pending_aborts) == ["c"]


def test_registration():
    registration = Rig(dp_rank=2, dp_size=4, max_num_seqs=8).side.registration()
    assert registration["max_num_seqs"] == 32  # the whole group's
    assert registration["data_parallel_rank"] == 2
    assert registration["world_size"] == registration["data_parallel_size"] == 4
    assert registration["num_gpu_blocks"] == 4001
    assert registration["kv_cache_size_tokens"] == 4000 * 64
    assert list(registration) == list(unpack(frames("registration-defaults")[0]))
