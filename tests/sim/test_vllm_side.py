"""The simulator's reading of vLLM's bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.sim.raw_frontend import DEAD, pack, unpack, wait_until
from tszmq.sim import EngineFault, Fleet, Scheduler, expected_logprobs, expected_tokens
from tszmq.sim.options import EngineOptions
from tszmq.sim.vllm import VllmSide
from tszmq.sim.vllm_request import Unusable, read_add

VECTORS = {
    vector["name"]: vector
    for vector in json.loads((Path(__file__).parents[1] / "vectors/vllm.json").read_text())
}
ADD, ABORT, WAVE, UTILITY = b"\0", b"\1", b"\2", b"\3"


def frames(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in VECTORS[name]["frames_hex"]]


def add(rid="a", ids=(1, 2, 3), n: object = 4, *, client=0, **params) -> bytes:
    given = {"max_tokens": n, **params}
    return pack([rid, list(ids), None, given, None, 0.0, None, None, None, None, None, client, 0])


class Rig:
    """A side on its own: messages in, messages out."""

    def __init__(self, *, vocab_size=32000, prefix_cache=False, spec_tokens=1, **options) -> None:
        self.scheduler = Scheduler(
            vocab_size,
            kv_pages=100,
            page_size=4,
            max_model_len=300,
            reserve=0,
            length_first=False,
            prefix_cache=prefix_cache,
            spec_tokens=spec_tokens,
        )
        self.side = VllmSide(
            EngineOptions(protocol="vllm", vocab_size=vocab_size, kv_pages=100, **options),
            self.scheduler,
        )

    def take(self, *message: bytes) -> list:
        return [unpack(frames[0]) for frames in self.side.receive(list(message))]

    def call(self, method: str, *args, call_id=7) -> list:
        return self.take(UTILITY, pack([0, call_id, method, list(args)]))

    def step(self) -> list:
        assert self.side.ready()
        return [unpack(frames[0]) for frames in self.side.batch(self.scheduler.step())]

    def run(self) -> list:
        messages = []
        while not self.scheduler.idle:
            messages += self.step()
        return messages

    def idle(self) -> list:
        return [unpack(frames[0]) for frames in self.side.idle()]


class TestRequests:
    def test_the_first_output_has_the_captured_shape(self):
        rig = Rig()
        assert rig.take(ADD, add("f-length", [1, 2, 3])) == []
        (message,) = rig.step()
        captured = unpack(frames("outputs_first_token")[0])
        assert len(message) == len(captured) == 9
        (row,), (seen,) = message[1], captured[1]
        assert len(row) == len(seen) == 19
        assert row[:7] == ["f-length", expected_tokens([1, 2, 3], 1), *[None] * 5]
        assert [event["type"] for event in row[7]] == [1, 2]
        assert row[8:] == seen[8:]
        assert list(message[2]) == list(captured[2])
        assert message[2]["num_running_reqs"] == 1
        assert message[2]["kv_cache_usage"] == 0.01
        assert message[2]["prefix_cache_stats"] == captured[2]["prefix_cache_stats"]
        assert message[8] == "default"

    def test_the_statistics_are_from_after_the_finish(self):
        rig = Rig()
        rig.take(ADD, add(n=2))
        *_, last = rig.run()
        assert last[1][0][5] == 1
        assert last[2]["num_running_reqs"] == 0
        assert last[2]["kv_cache_usage"] == 0
        (idle,) = rig.idle()
        assert (idle[1], idle[2]["num_running_reqs"]) == ([], 0)
        assert rig.idle() == []

    def test_a_stop_token_says_which(self):
        tokens = expected_tokens([1, 2, 3], 3)
        rig = Rig()
        rig.take(ADD, add(n=3, stop_token_ids=tokens[2:]))  # stop comes before length
        rows = [message[1][0] for message in rig.run()]
        assert [row[1][0] for row in rows] == tokens
        assert rows[-1][5:7] == [0, tokens[2]]

    def test_eos_has_no_reason(self):
        rig = Rig()
        rig.take(ADD, add(n=9, _eos_token_id=expected_tokens([1, 2, 3], 3)[2]))
        rows = [message[1][0] for message in rig.run()]
        assert len(rows) == 3
        assert rows[-1][5:7] == [0, None]

    def test_all_stop_token_ids_stop_nothing(self):
        rig = Rig()
        rig.take(ADD, add(_all_stop_token_ids=expected_tokens([1, 2, 3], 3), ignore_eos=True))
        assert len(rig.run()) == 4

    def test_length_is_the_context(self):
        rig = Rig()
        rig.take(ADD, add(ids=range(290), n=100))
        messages = rig.run()
        assert len(messages) == 10
        assert messages[-1][1][0][5] == 1

    def test_captured_requests(self):
        for name in ("ADD_minimal", "ADD_with_wave", "ADD_trailing_extra", "ADD_as_vllm_sends"):
            ask = read_add(frames(name)[1])
            assert ask.prompt == VECTORS[name]["fields"]["prompt_token_ids"]
            wanted = VECTORS[name]["fields"]["sampling_params"]["max_tokens"]
            assert ask.params is not None
            assert ask.params["max_tokens"] == wanted
            assert ask.wave == VECTORS[name]["fields"]["current_wave"]

    @pytest.mark.parametrize("name", ["ADD_all_sampling_params", "ADD_all_request_fields"])
    def test_captured_full_requests(self, name):
        fields = VECTORS[name]["fields"]
        ask = read_add(frames(name)[1])
        assert (ask.request_id, ask.client_index) == (fields["request_id"], fields["client_index"])

    def test_bias_keys_are_ints(self):
        ask = read_add(add(logit_bias={5: 1.5, 70000: -2}))
        assert ask.params is not None
        assert ask.params["logit_bias"] == {5: 1.5, 70000: -2}
        with pytest.raises(Unusable):
            read_add(add(logit_bias={"5": 1.5}))

    def test_an_id_can_be_used_again_after_its_end(self):
        rig = Rig()
        for _ in range(2):
            rig.take(ADD, add())
            rig.run()

    def test_aborts_are_silent_and_at_once(self):
        rig = Rig()
        rig.take(ADD, add(n=50))
        rig.step()
        assert rig.take(ABORT, pack(["a", "nobody"])) == []
        assert rig.scheduler.idle

    @pytest.mark.parametrize(
        "payload", [add(n=None), pack(["a", None, None, {}, None, 0, None, None, None])]
    )
    def test_what_is_answered_with_error(self, payload):
        (message,) = Rig().take(ADD, payload)
        seen = unpack(frames("outputs_finish_error_preprocess")[0])
        assert message[1][0][1:] == seen[1][0][1:]
        assert (message[2], message[5], message[8]) == (None, ["a"], None)

    @pytest.mark.parametrize("kind", [ADD, b"\4"])
    def test_what_kills_the_engine(self, kind):
        rig = Rig()
        rig.take(ADD, add())
        with pytest.raises(EngineFault):
            rig.take(kind, add())


class TestLogprobs:
    @staticmethod
    def arrays(packed: list, message_frames: list[bytes]) -> list[tuple]:
        out = []
        for dtype, shape, data in packed[:3]:
            raw = message_frames[data] if isinstance(data, int) else data[1]
            code = {"<i4": "i", "int32": "i", "<f4": "f", "float32": "f"}.get(dtype, "q")
            count = len(raw) // struct.calcsize(code)
            out.append((dtype, shape, struct.unpack(f"<{count}{code}", raw)))
        return out

    def take(self, **params) -> tuple[list, list[bytes]]:
        rig = Rig(vocab_size=5000)
        rig.take(ADD, add(n=2, **params))
        rig.take(ADD, add("plain", [9], n=2))
        (message,) = rig.side.batch(rig.scheduler.step())
        return unpack(message[0]), message

    def test_the_sampled_token_only(self):
        message, raw = self.take(logprobs=0)
        (row, plain) = message[1]
        (token,) = expected_tokens([1, 2, 3], 1, 5000)
        assert self.arrays(row[2], raw) == [
            ("<i4", [1, 1], (token,)),
            ("<f4", [1, 1], tuple(expected_logprobs(1))),
            ("<i8", [1], (1,)),
        ]
        assert row[2][3:] == [None]
        assert plain[2] is None
        assert len(raw) == 1

    def test_alternatives_in_frames_of_their_own(self):
        message, raw = self.take(logprobs=100)
        ids, logprobs, ranks = self.arrays(message[1][0][2], raw)
        assert len(raw) == 3
        assert ids[1] == logprobs[1] == [1, 101]
        assert len(set(ids[2])) == 101
        assert list(logprobs[2]) == sorted(logprobs[2], reverse=True)
        assert ranks[2] == (1,)

    def test_of_the_prompt(self):
        message, raw = self.take(prompt_logprobs=1)
        packed = message[1][0][3]
        assert len(packed) == 5
        ids, logprobs, ranks = self.arrays(packed, raw)
        assert ids == ("int32", [2, 2], (2, 3, 3, 4))
        assert logprobs == ("float32", [2, 2], (-0.25, -0.5) * 2)
        assert ranks == ("int64", [2], (1, 1))

    def test_the_captured_bytes(self):
        message, _ = self.take(logprobs=2)
        seen = unpack(frames("outputs_logprobs_inline")[0])
        ours, theirs = message[1][0][2], seen[1][0][2]
        assert [item and item[:2] for item in ours] == [item and item[:2] for item in theirs]
        assert [item and type(item[2]) for item in ours] == [
            item and type(item[2]) for item in theirs
        ]


@pytest.mark.parametrize(
    "message",
    [
        (ADD, add(top_p=5.0)),
        (ADD, add(temperature=-1)),
        (ADD, add(n=0)),
        (ADD, add(n="4")),
        (ADD, add(stop=[""])),
        (ADD, add(repetition_penalty=float("nan"))),
        (ADD, add(ids=["1"])),
        (ADD, pack(unpack(add())[:8])),
        (ADD, b"\xc1"),
        (ADD, add()[:-1]),
        (ABORT, pack("a")),
        (WAVE, pack([1])),
        (UTILITY, pack([0, 1, "sleep"])),
        (b"\x09", pack([])),
    ],
)
def test_what_makes_the_engine_deaf(message):
    class Line:
        deaf = False

        def deafen(self) -> None:
            self.deaf = True

    rig = Rig()
    line = Line()
    rig.side._link = line  # type: ignore[assignment]
    assert rig.take(*message) == []
    assert line.deaf
    assert rig.side.counts()["malformed"] == 1


class TestCalls:
    def answer(self, messages: list) -> list:
        (message,) = messages
        assert message[1:3] == [[], None]
        return message[4]

    def test_a_result(self):
        rig = Rig()
        big = 2**64 - 1
        assert self.answer(rig.call("get_supported_tasks", call_id=big)) == [
            big,
            None,
            [None, ["generate"]],
        ]
        assert self.answer(rig.call("reset_prefix_cache")) == [7, None, [None, True]]
        assert self.answer(rig.call("reset_mm_cache")) == [7, None, [None, None]]

    def test_an_echo(self):
        (result,) = self.answer(Rig().call("collective_rpc", "f", None, [1], {"k": 2}))[2][1]
        assert result == {"method": "f", "args": [1], "kwargs": {"k": 2}}

    def test_a_failure_says_what_the_real_one_says(self):
        seen = unpack(frames("outputs_utility_failure")[0])[4]
        assert self.answer(Rig().call("no_such_method", call_id=9)) == seen

    @pytest.mark.parametrize("args", [[1, 2, 3, 4], ["never"], None])
    def test_wrong_arguments(self, args):
        rig = Rig()
        (message,) = rig.take(UTILITY, pack([0, 1, "pause_scheduler", args]))
        assert message[4][1].startswith("Call to pause_scheduler method failed: ")

    def test_weight_version(self):
        rig = Rig()
        rig.call("set_weight_version", "v2")
        assert self.answer(rig.call("get_weight_version"))[2] == [None, "v2"]
        rig.take(ADD, add())
        assert rig.step()[0][8] == "v2"

    def test_pause_with_abort_ends_everything(self):
        rig = Rig()
        rig.take(ADD, add(n=50))
        rig.step()
        ends, answer = rig.call("pause_generation")
        assert (ends[1][0][0], ends[1][0][5], ends[5]) == ("a", 2, ["a"])
        assert answer[4] == [7, None, [None, None]]
        (refused,) = rig.take(ADD, add("b"))
        seen = unpack(frames("outputs_finish_error_with_error")[0])
        assert refused[1][0][1:] == seen[1][0][1:]
        rig.call("resume_scheduler")
        rig.take(ADD, add("c"))
        assert len(rig.run()) == 4

    def test_pause_with_keep_freezes(self):
        rig = Rig()
        rig.take(ADD, add(n=3))
        rig.step()
        rig.call("pause_scheduler", "keep")
        assert not rig.side.ready()
        rig.take(ADD, add("b", n=3))
        rig.call("resume_scheduler")
        rows = [row for message in rig.run() for row in message[1]]
        assert [row[0] for row in rows if row[5] == 1] == ["a", "b"]

    def test_pause_with_wait_answers_when_drained(self):
        rig = Rig()
        rig.take(ADD, add(n=3))
        rig.step()
        assert rig.call("pause_scheduler", "wait") == []
        rig.take(ADD, add("b"))
        messages = rig.run()
        assert messages[-1][4] == [7, None, [None, None]]
        assert {row[0] for message in messages for row in message[1]} == {"a"}
        assert rig.scheduler.idle

    def test_sleep(self):
        rig = Rig()
        assert self.answer(rig.call("is_sleeping"))[2] == [None, False]
        rig.call("sleep", 1)
        assert self.answer(rig.call("is_sleeping"))[2] == [None, True]
        rig.take(ADD, add())
        assert rig.scheduler.idle  # kept aside
        assert self.answer(rig.call("wake_up"))[2] == [None, True]
        assert len(rig.run()) == 4


class TestWaves:
    def test_a_parked_rank_waits_for_its_wave(self):
        rig = Rig(lockstep=True, dp_size=2, dp_rank=1, index=1)
        rig.take(ADD, add(n=1))
        assert not rig.side.ready()
        rig.take(WAVE, pack([0, 1]))  # it is the excluded one
        assert not rig.side.ready()
        rig.take(WAVE, pack([3, 0]))
        assert rig.side.ready()
        rig.run()
        stats, done = rig.idle()
        assert stats[1] == []
        assert done == unpack(pack([1, [], None, done[3], None, None, 3, None, None]))
        assert not rig.side.ready()
        rig.take(WAVE, pack([3, None]))  # stale: it is at wave 4 now
        assert not rig.side.ready()
        rig.take(WAVE, pack([4, None]))
        assert rig.side.ready()
        (done,) = rig.idle()
        assert done[6] == 4

    def test_a_dense_rank_does_not_park(self):
        rig = Rig(dp_size=2)
        rig.take(WAVE, pack([5, None]))
        assert rig.side.ready()
        assert rig.idle() == []


def test_registration():
    dense = Rig(dp_rank=1, dp_size=2).side.registration()
    assert list(dense) == list(unpack(frames("registration_ready_response")[0]))
    assert (dense["data_parallel_size"], dense["data_parallel_rank"]) == (1, 0)
    lockstep = Rig(dp_rank=1, dp_size=2, lockstep=True).side.registration()
    assert (lockstep["data_parallel_size"], lockstep["data_parallel_rank"]) == (2, 1)


READABLE = [name for name in VECTORS if name != "engine_core_dead"]


@pytest.mark.embedded
class TestOverTheWire:
    def test_a_life(self, frontend):
        with Fleet(2, protocol="vllm", capture=True) as fleet:
            fleet.start(frontend.address)
            engines = frontend.accept_all(2)
            assert set(engines) == {b"\0\0", b"\1\0"}
            assert frontend.statuses[-1] == {"status": "READY", "local": False, "headless": True}
            frontend.send(b"\1\0", ADD, add(n=3))
            messages = [unpack(frontend.hear(frontend.output)[0]) for _ in range(4)]
            assert [message[0] for message in messages] == [1] * 4
            tokens = [row[1][0] for message in messages for row in message[1]]
            assert tokens == expected_tokens([1, 2, 3], 3)
            frontend.send(b"\1\0", ADD, add("b", n=4000))
            frontend.hear(frontend.output)
            fleet.interrupt(1)
            while (message := unpack(frontend.hear(frontend.output)[0]))[5] is None:
                pass
            assert (message[1][0][5], message[5]) == (2, ["b"])
            wait_until(lambda: fleet.exit_codes[1] == 0, "it ends")
            assert frontend.quiet(0)  # and says no more

    def test_an_error_in_the_loop_is_announced(self, frontend):
        with Fleet(1, protocol="vllm") as fleet:
            fleet.start(frontend.address)
            frontend.accept()
            frontend.send(b"\0\0", b"\4", pack([]))
            assert frontend.hear(frontend.output) == [DEAD]

    def test_deaf(self, frontend):
        with Fleet(1, protocol="vllm", capture=True, log_level="CRITICAL") as fleet:
            fleet.start(frontend.address)
            frontend.accept()
            fleet.read_line(0)
            frontend.send(b"\0\0", ADD, add(top_p=7.0))

            def malformed() -> int:
                fleet.send(0, "stats")
                return json.loads(fleet.read_line(0))["malformed"]

            wait_until(malformed, "it is taken")
            frontend.send(b"\0\0", ADD, add())
            assert frontend.quiet(0.2)
            assert fleet.exit_codes == (None,)

    def test_lockstep(self, frontend):
        with Fleet(2, protocol="vllm", lockstep=True) as fleet:
            fleet.start(frontend.address)
            frontend.accept_all(2)
            assert "parallel_config_hash" in frontend.statuses[-1]
            frontend.send(b"\0\0", ADD, add(n=1))
            assert frontend.quiet(0.2)
            for identity in (b"\0\0", b"\1\0"):
                frontend.send(identity, WAVE, pack([0, None]))
            messages = [unpack(frontend.hear(frontend.output)[0]) for _ in range(4)]
            done = [(message[0], message[6]) for message in messages if message[6] is not None]
            assert sorted(done) == [(0, 0), (1, 0)]
