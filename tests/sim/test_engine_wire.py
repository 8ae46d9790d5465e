"""Simulator engines in child processes, driven over bare sockets."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.sim.raw_frontend import (
    DEAD,
    Deadline,
    Engine,
    RawFrontend,
    gone,
    pack,
    unpack,
    wait_until,
)
from tszmq.sim import Fleet, expected_logprobs, expected_tokens

pytestmark = pytest.mark.embedded


class TestStartUp:
    def test_the_handshake(self, frontend, start):
        engine = start()
        assert engine.identity == b"\0\0"
        assert frontend.statuses == [
            {"status": status, "local": True, "headless": True, "parallel_config_hash": None}
            for status in ("HELLO", "READY")
        ]
        assert engine.registration["data_parallel_size"] == 1

    def test_identities_are_little_endian_and_ranks_count_up(self, frontend):
        with Fleet(2, first_index=300) as fleet:
            fleet.start(frontend.address)
            seen = frontend.accept_all(2)
        ranks = {identity: seen[identity]["data_parallel_rank"] for identity in seen}
        assert ranks == {b"\x2c\x01": 0, b"\x2d\x01": 1}

    def test_an_init_without_addresses_ends_it(self, frontend):
        with Fleet() as fleet:
            fleet.start(frontend.address)
            identity, _ = frontend.hear(frontend.handshake)
            frontend.handshake.send_multipart([identity, pack({"addresses": {"inputs": []}})])
            assert unpack(frontend.hear(frontend.handshake)[1])["status"] == "READY"
            wait_until(lambda: fleet.exit_codes == (1,), "it gives up")

    def test_sigterm_before_the_handshake(self, frontend):
        with Fleet() as fleet:
            fleet.start(frontend.address)
            frontend.hear(frontend.handshake)
            fleet.interrupt(0)
            wait_until(lambda: fleet.exit_codes == (0,), "it ends")


class TestRequests:
    def test_tokens(self, start):
        engine = start()
        engine.add("a", [1, 2, 3], 5, logprobs=True)
        tokens, reasons, batches = engine.until("a")
        assert tokens["a"] == expected_tokens([1, 2, 3], 5)
        assert reasons == {"a": "length"}
        assert [batch[7][0] for batch in batches] == [[p] for p in expected_logprobs(5)]
        assert [batch[8] for batch in batches] == [batch[2] for batch in batches]
        assert [batch[5] for batch in batches] == [[1], [2], [3], [4], [5]]
        assert batches[-1][10:] == [1, 0, 1, 4000]  # its own finish is not committed yet

    def test_one_batch_for_all_running(self, start):
        engine = start(step_ms=5)
        engine.fleet.send(0, "pause")
        engine.stats()
        for name in "abc":
            engine.add(name, [ord(name)], 3)
        wait_until(lambda: engine.stats()["adds"] == 3, "all are there")
        engine.fleet.send(0, "resume")
        tokens, _, batches = engine.until(*"abc")
        assert [batch[1] for batch in batches] == [["a", "b", "c"]] * 3
        assert tokens == {name: expected_tokens([ord(name)], 3) for name in "abc"}

    def test_stop_token(self, start):
        engine = start()
        stop = expected_tokens([5], 4)[3]
        engine.add("a", [5], 20, params={2: [stop]})
        engine.add("b", [5], 20, params={2: [stop], 15: True})
        tokens, reasons, _ = engine.until("a", "b")
        assert tokens["a"] == expected_tokens([5], 4)
        assert tokens["b"] == expected_tokens([5], 20)
        assert reasons == {"a": "stop", "b": "length"}

    def test_without_stream_rows_are_rare(self, start):
        engine = start()
        engine.add("a", [5], 120, stream=False)
        tokens, _, batches = engine.until("a")
        assert [len(batch[2][0]) for batch in batches] == [1, 49, 50, 20]
        assert tokens["a"] == expected_tokens([5], 120)

    def test_a_refused_request(self, start):
        engine = start(step_ms=5)
        engine.add("long", [1], 50)
        engine.add("bad", [1, 2], params={4: 5.0})
        _, reasons, batches = engine.until("bad")
        assert reasons == {"bad": "abort"}
        assert batches[-1][1:6] == [["bad"], [[]], ["abort"], [2], [0]]
        tokens, _, _ = engine.until("long")
        assert tokens["long"] == expected_tokens([1], 50)[50 - len(tokens["long"]) :]

    def test_an_aborted_request_is_silent(self, start):
        engine = start(step_ms=2)
        engine.add("a", [1], 5000)
        engine.batch()
        engine.abort("a")
        engine.add("after", [2], 3)
        _, _, batches = engine.until("after")
        since = next(place for place, batch in enumerate(batches) if "after" in batch[1])
        assert all("a" not in batch[1] for batch in batches[since:])
        assert engine.stats()["running"] == 0

    def test_a_malformed_message_is_dropped(self, start):
        engine = start()
        engine.frontend.send(engine.identity, b"\0", b"\xc1")
        engine.add("a", [1], 1)
        engine.until("a")
        assert engine.stats()["malformed"] == 1

    @pytest.mark.parametrize("era", [9, 10])
    def test_older_batches(self, start, era):
        engine = start(era=era)
        engine.add("a", [1], 1)
        assert len(engine.batch()) == era

    def test_step_time(self, start):
        engine = start(step_ms=200)
        engine.add("a", [1], 2)
        engine.batch()
        assert engine.frontend.quiet(0.1)
        engine.fleet.send(0, "step-ms 0")
        engine.until("a")


class TestEnds:
    def test_sigterm(self, start):
        engine = start(step_ms=5)
        engine.add("a", [1], 5000)
        engine.batch()
        engine.fleet.interrupt(0)
        while (frames := engine.frontend.hear(engine.frontend.output)) != [DEAD]:
            assert len(frames[0]) > len(DEAD)
        assert engine.exit_code() == 0
        assert engine.frontend.quiet(0)

    def test_an_error_in_the_loop_says_so_first(self, start):
        engine = start()
        engine.fleet.send(0, "raise")
        assert engine.frontend.hear(engine.frontend.output) == [DEAD]
        assert engine.exit_code() == 1

    def test_a_fatal_request(self, start):
        engine = start()
        engine.add("a", [])
        assert engine.frontend.hear(engine.frontend.output) == [DEAD]
        assert engine.exit_code() == 1

    def test_exit_says_nothing(self, start):
        engine = start()
        engine.fleet.send(0, "exit 7")
        assert engine.exit_code() == 7
        assert engine.frontend.quiet(0)

    def test_kill_and_restart(self, frontend, start):
        engine = start()
        first = engine.fleet.pids[0]
        engine.fleet.restart(0)
        assert engine.fleet.pids[0] != first
        assert gone(first)
        identity, _ = frontend.accept()
        assert identity == engine.identity

    def test_it_blocks_when_nobody_reads_and_still_ends(self, tmp_path):
        front = RawFrontend(tmp_path, high_water=1)
        try:
            with Fleet(1, capture=True, page_size=1 << 20, max_model_len=1 << 30) as fleet:
                fleet.start(front.address)
                engine = Engine(front, fleet)
                engine.add("a", [1], None)
                engine.batch()  # it runs
                deadline = Deadline("the loop is blocked")
                while self.answers(engine):
                    deadline.left()
                fleet.interrupt(0)
                assert engine.exit_code() == 0
        finally:
            front.close()

    @staticmethod
    def answers(engine: Engine) -> bool:
        engine.fleet.send(0, "stats")
        pipe = engine.fleet._children[0].stdout
        assert pipe is not None
        return bool(select.select([pipe], [], [], 1.0)[0] and pipe.readline())


class TestFaults:
    def test_mute(self, start):
        engine = start()
        engine.fleet.send(0, "mute")
        engine.stats()
        engine.add("a", [1], 2)
        wait_until(lambda: engine.stats()["steps"] == 2, "it ran")
        engine.fleet.send(0, "unmute")
        engine.stats()
        engine.add("b", [1], 2)
        tokens, _, _ = engine.until("b")
        assert "a" not in tokens

    def test_pause_takes_input(self, start):
        engine = start()
        engine.fleet.send(0, "pause")
        engine.stats()
        engine.add("a", [1], 2)
        wait_until(lambda: engine.stats()["adds"] == 1, "it is taken")
        assert engine.stats()["steps"] == 0
        engine.fleet.send(0, "resume")
        engine.until("a")

    def test_garbage(self, start):
        engine = start()
        engine.fleet.send(0, "garbage c1,00ff")
        assert engine.frontend.hear(engine.frontend.output) == [b"\xc1", b"\x00\xff"]

    def test_a_wrong_command_hurts_nobody(self, start):
        engine = start(log_level="CRITICAL")
        for command in ("nonsense", "garbage xyz", "step-ms soon", "step-ms inf", "", "\xff"):
            engine.fleet.send(0, command)
        engine.add("a", [1], 1)
        engine.until("a")

    def test_stop_and_cont(self, start):
        engine = start(step_ms=1)
        engine.fleet.stop(0)
        engine.add("a", [1], 1)
        assert engine.frontend.quiet(0.2)
        engine.fleet.cont(0)
        engine.until("a")

    def test_it_ignores_ctrl_c(self, start):
        engine = start()
        os.kill(engine.fleet.pids[0], signal.SIGINT)
        engine.add("a", [1], 1)
        engine.until("a")

    def test_an_idle_engine_uses_no_processor(self, start):
        engine = start()
        engine.add("a", [1], 1)
        engine.until("a")
        pid = engine.fleet.pids[0]

        def ticks() -> int:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        if not Path("/proc/self/stat").exists():
            pytest.skip("needs /proc")
        before = ticks()
        assert engine.frontend.quiet(0.5)
        assert ticks() - before <= 5  # hundredths of a second
