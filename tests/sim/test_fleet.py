"""Fleets of simulator engines: who ends when, and what is left."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from typing import Any

import attrs
import pytest

from tests.mock_engine import PATIENCE, eventually, in_thread
from tests.sim.raw_frontend import DEAD, Deadline, children_of, gone, wait_until
from tszmq.errors import InvalidRequest
from tszmq.sim import Fleet
from tszmq.sim.options import EngineOptions, build_parser, command_line

pytestmark = pytest.mark.embedded

PARENT = """
import sys, threading
from tszmq.sim import Fleet
fleet = Fleet(2)
fleet.start(sys.argv[1])
if "fork" in sys.argv:
    import os
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)  # a sibling, gone when the parent is
        os._exit(0)
    os.close(reader)
print(*fleet.pids, flush=True)
threading.Event().wait()
"""


def pids_of(parent: subprocess.Popen) -> list[int]:
    assert parent.stdout is not None
    return [int(word) for word in parent.stdout.readline().split()]


def is_full(pipe: Any) -> bool:
    """Whether whoever writes there has to wait."""
    return not select.select([], [pipe], [], 0)[1]


class TestFleet:
    @pytest.mark.parametrize("registered", [True, False], ids=["registered", "starting"])
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_the_children_die_with_their_parent(self, frontend, how, registered):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, frontend.address],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with parent:
            pids = pids_of(parent)
            assert len(pids) == 2
            if registered:
                frontend.accept_all(2)
            parent.send_signal(how)
        deadline = Deadline("the children are gone", 10)
        for pid in pids:
            wait_until(lambda pid=pid: gone(pid), "a child is gone", deadline.left())

    def test_a_forked_sibling_does_not_keep_them_alive(self, frontend):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, frontend.address, "fork"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with parent:
            pids = pids_of(parent)
            parent.kill()
            for pid in pids:
                wait_until(lambda pid=pid: gone(pid), "a child is gone", 10)

    def test_in_a_forked_child_it_does_nothing(self, start):
        engine = start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    engine.fleet.kill(0)
                    engine.fleet.restart(0)
                    engine.fleet.terminate()
                    engine.fleet._children.clear()
                    gc.collect()
                code = len(caught)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        engine.add("a", [1], 1)
        engine.until("a")

    def test_terminate_twice_leaves_nothing(self, frontend):
        fleet = Fleet(2)
        fleet.start(frontend.address)
        fleet.stop(0)  # a stopped one has to end as well
        pids = fleet.pids
        fleet.terminate()
        fleet.terminate()
        assert all(gone(pid) for pid in pids)
        assert None not in fleet.exit_codes
        with pytest.raises(BrokenPipeError):
            fleet.send(0, "stats")
        with pytest.raises(RuntimeError):
            fleet.start(frontend.address)

    @pytest.mark.parametrize("how", ["terminate", "kill", "look"])
    def test_a_child_that_does_not_read_its_commands_holds_up_nobody(self, frontend, how):
        """But whoever sends them: until the child is gone."""
        fleet = Fleet()
        fleet.start(frontend.address)
        frontend.accept()
        try:
            fleet.stop(0)
            sending = in_thread(fleet.send, 0, "garbage " + "00" * 500_000)
            eventually(lambda: is_full(fleet._children[0].stdin))
            assert not sending.done()
            if how == "look":
                assert in_thread(lambda: fleet.exit_codes).result(PATIENCE) == (None,)
                assert len(in_thread(lambda: fleet.pids).result(PATIENCE)) == 1
            elif how == "kill":
                in_thread(fleet.kill, 0).result(PATIENCE)
            else:
                in_thread(fleet.terminate, 0).result(PATIENCE)
        finally:
            fleet.kill(0)
        sending.exception(PATIENCE)  # or none, where a part of it went out
        fleet.terminate()
        pids = fleet.pids
        with pytest.raises(BrokenPipeError, match="the fleet was terminated"):
            fleet.send(0, "stats")
        fleet.restart(0)  # nothing: somebody else was faster
        assert fleet.pids == pids
        assert all(gone(pid) for pid in pids)

    def test_a_restart_ends_the_wait_of_whoever_sends(self, frontend):
        """To the child that was killed for it; the new one is sent to as ever."""
        with Fleet(capture=True) as fleet:
            fleet.start(frontend.address)
            frontend.accept()
            fleet.stop(0)
            sending = in_thread(fleet.send, 0, "garbage " + "00" * 500_000)
            eventually(lambda: is_full(fleet._children[0].stdin))
            in_thread(fleet.restart, 0).result(PATIENCE)
            sending.exception(PATIENCE)
            frontend.accept()
            fleet.send(0, "stats")
            for line in (b'"ready"', b'"steps"'):
                assert line in in_thread(fleet.read_line, 0).result(PATIENCE)

    def test_nothing_is_left_open(self, frontend):
        script = """
import sys
from tszmq.sim import Fleet
with Fleet(1, capture=True) as fleet:
    fleet.start(sys.argv[1])
    fleet.restart(0)
del fleet
"""
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", script, frontend.address],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("options", [{"nonsense": 1}, {"index": 1}, {"control": True}])
    def test_unknown_options(self, options):
        with pytest.raises(TypeError):
            Fleet(1, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_num_seqs": 0},
            {"kv_pages": 2**31},
            {"dp_rank": -1},
            {"step_ms": -1},
            {"step_ms": float("nan")},
            {"step_us_per_row": float("inf")},
            {"era": 11},
            {"protocol": "other"},
            {"prefill_tokens_per_step": 0},
            {"eos_token_id": -1},
            {"log_level": "noise"},
            {"instance_id": "a\0b"},
            {"instance_id": "\ud800"},
            {"first_index": 65536},
        ],
        ids=str,
    )
    def test_options_out_of_range(self, options):
        """Refused here, by name: an engine would end with its usage."""
        [(name, value)] = options.items()
        with pytest.raises(InvalidRequest, match=rf"^{name} (must|is not).*") as caught:
            Fleet(1, **options)
        assert repr(value) in str(caught.value) or "Unicode" in str(caught.value)

    @pytest.mark.parametrize(
        "options",
        [
            *(
                {field.name: wrong}
                for field in attrs.fields(EngineOptions)
                if str(field.type).startswith("int")
                for wrong in ("2", 10.5, 2.0, True, [2])
                if field.name not in ("index", "ranks", "die_with_parent")
            ),
            *({name: wrong} for name in ("step_ms", "step_us_per_row") for wrong in ("x", True)),
            *({"kv_pages": None}, {"step_ms": None}, {"first_index": "1"}, {"capture": 1}),
            *({name: wrong} for name in ("prefix_cache", "lockstep") for wrong in (1, "yes", None)),
            *({name: wrong} for name in ("protocol", "log_level") for wrong in (1, None, b"x")),
        ],
        ids=str,
    )
    def test_options_of_a_wrong_type(self, options):
        """An int is no float and no bool, and nothing is compared before that is known."""
        [name] = options
        with pytest.raises(TypeError, match=rf"^{name} must be "):
            Fleet(1, **options)

    @pytest.mark.parametrize("options", [{"step_ms": 2}, {"step_us_per_row": 0.5}, {"kv_pages": 7}])
    def test_options_reach_the_engine(self, options):
        """As its command line gives them."""
        made = EngineOptions(handshake="ipc:///nowhere", **options)
        read = build_parser().parse_args(command_line(made))
        assert EngineOptions(**vars(read)) == made

    def test_two_restarts_at_once_leave_one_engine(self, frontend):
        with Fleet() as fleet:
            fleet.start(frontend.address)
            threads = [threading.Thread(target=fleet.restart, args=(0,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert fleet.exit_codes == (None,)
            children = children_of(os.getpid())
            assert {*fleet.pids} <= children
        assert not children & children_of(os.getpid())

    @pytest.mark.parametrize(
        ("count", "first_index", "error"),
        [
            (0, 0, InvalidRequest),
            (65537, 0, InvalidRequest),
            (2, 65535, InvalidRequest),
            ("2", 0, TypeError),
            (2.0, 0, TypeError),
            (True, 0, TypeError),
        ],
    )
    def test_a_fleet_has_engines(self, count, first_index, error):
        with pytest.raises(error, match="the number of engines must be") as caught:
            Fleet(count, first_index=first_index)
        assert caught.type is error


class TestCommand:
    def run(self, *args: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "tszmq.sim", *args],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=stdin,
            stderr=subprocess.PIPE,
        )

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("--kv-pages", "0"), b"kv_pages must be in [1, "),
            (("--index", "65536"), b"index must be in"),
            (("--ranks", "2", "--control"), b"share one standard input"),
            (("--era", "11"), b"invalid choice"),
        ],
    )
    def test_wrong_arguments(self, args, says):
        with self.run("--handshake", "ipc:///nowhere", *args) as process:
            _, text = process.communicate(timeout=20)
        assert process.returncode == 2
        assert says in text
        assert b"Traceback" not in text

    def test_ranks_end_when_standard_input_does(self, frontend):
        args = ("--handshake", frontend.address, "--ranks", "2", "--die-with-parent")
        with self.run(*args, stdin=subprocess.PIPE) as process:
            frontend.accept_all(2)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(10) == 0

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
    def test_one_engine(self, frontend, how):
        with self.run("--handshake", frontend.address, "--index", "5") as process:
            identity, _ = frontend.accept()
            assert identity == b"\x05\x00"
            process.send_signal(how)
            assert frontend.hear(frontend.output) == [DEAD]
            assert process.wait(10) == 0

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
    def test_ranks(self, frontend, how):
        args = ("--ranks", "2", "--index", "4", "--vocab-size", "100")
        with self.run("--handshake", frontend.address, *args) as process:
            assert set(frontend.accept_all(2)) == {b"\x04\x00", b"\x05\x00"}
            process.send_signal(how)
            assert frontend.hear(frontend.output) == [DEAD]
            assert frontend.hear(frontend.output) == [DEAD]
            assert process.wait(10) == 0
