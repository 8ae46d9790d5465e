"""The loop of one simulator engine process."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import traceback

import attrs

from tszmq.sim.control import Control
from tszmq.sim.link import EngineSide, Link, Stopped, Wake
from tszmq.sim.options import EngineOptions
from tszmq.sim.request import EngineFault
from tszmq.sim.scheduler import Scheduler
from tszmq.sim.tokenspeed import TokenSpeedSide
from tszmq.sim.vllm import VllmSide

__all__ = ["Engine", "run"]

logger = logging.getLogger("tszmq.sim")


class Engine:
    """Scheduler, protocol side and sockets, driven by one thread.

    Args:
        options: What to simulate.
        wake: Ends the loop's waits.
        control: Commands from the parent, or None.
    """

    def __init__(self, options: EngineOptions, wake: Wake, control: Control | None) -> None:
        self._options = options
        self._wake = wake
        self._control = control
        self._paused = False
        self._steps = 0
        self._scheduler = _scheduler(options)
        kind = VllmSide if options.protocol == "vllm" else TokenSpeedSide
        self._side: EngineSide = kind(options, self._scheduler)
        self._link = Link(options.handshake, options.index, wake)

    def run(self) -> int:
        """Serve until told to stop.

        Returns:
            The exit status: 0 after SIGTERM, 1 when the engine died of an error.
        """
        code = 0
        sentinel = self._side.says_dead_when_stopped
        try:
            self._side.connect(self._link)
            self._tell({"ready": self._options.index})
            self._loop()
            for message in self._side.last_words():
                self._link.send(message)
        except Stopped:
            pass
        except Exception:  # as a real engine's loop: whatever it was, log it and die of it
            logger.error("engine %d died: %s", self._options.index, traceback.format_exc())
            code = 1
            sentinel = True
        self._link.close(sentinel)
        return code

    def _loop(self) -> None:
        side, link, scheduler, wake = self._side, self._link, self._scheduler, self._wake
        while not wake.stopping:
            started = time.perf_counter()
            self._obey()
            self._drain()
            if self._paused or scheduler.idle or not side.ready():
                if not self._paused:
                    self._send(side.idle())
                link.wait_for_input()
                wake.clear()  # before the commands are looked at
                continue
            step = scheduler.step()
            self._steps += 1
            self._rest(started, len(step.requests))
            self._send(side.batch(step))

    def _rest(self, started: float, rows: int) -> None:
        seconds = self._options.step_ms / 1e3 + self._options.step_us_per_row * rows / 1e6
        if seconds:
            self._wake.sleep(seconds - (time.perf_counter() - started))

    def _drain(self) -> None:
        while (frames := self._link.receive()) is not None:
            self._send(self._side.receive(frames))

    def _send(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._link.send(frames)

    def _obey(self) -> None:
        while self._control is not None and self._control.commands:
            name, _, rest = self._control.commands.popleft().partition(" ")
            try:
                self._command(name, rest.strip())
            except ValueError as exc:  # the command's fault, not the engine's
                logger.warning("command %r: %s", name, exc)

    def _command(self, name: str, rest: str) -> None:
        if name in ("mute", "unmute"):
            self._link.muted = name == "mute"
        elif name in ("pause", "resume"):
            self._paused = name == "pause"
        elif name == "garbage":
            self._link.send([bytes.fromhex(part) for part in rest.split(",")])
        elif name == "raise":
            raise EngineFault(rest or "asked to")
        elif name == "step-ms":
            self._options = attrs.evolve(self._options, step_ms=float(rest))
        elif name == "stats":
            self._tell(self._stats())
        else:
            raise ValueError("no such command")

    def _stats(self) -> dict[str, object]:
        scheduler = self._scheduler
        return {
            "steps": self._steps,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "active_pages": scheduler.active_pages,
            **self._side.counts(),
        }

    def _tell(self, answer: dict[str, object]) -> None:
        if self._options.control:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _scheduler(options: EngineOptions) -> Scheduler:
    vllm = options.protocol == "vllm"
    return Scheduler(
        options.vocab_size,
        max_num_seqs=options.max_num_seqs,
        kv_pages=options.kv_pages,
        page_size=options.page_size,
        max_model_len=options.max_model_len,
        reserve=0 if vllm else 2,
        length_first=not vllm,
        eos_token_id=options.eos_token_id,
        prefill_tokens_per_step=options.prefill_tokens_per_step,
        spec_tokens=options.spec_tokens,
        prefix_cache=options.prefix_cache,
    )


def run(options: EngineOptions) -> int:
    """Run one engine in this process until it is told to stop. Main thread only.

    Returns:
        The exit status.
    """
    logging.basicConfig(
        level=options.log_level.upper(),
        format=f"%(asctime)s engine {options.index} %(levelname)s %(message)s",
    )
    # The loop makes thousands of short-lived lists a step and no cycles.
    gc.set_threshold(100_000, 50, 1000)
    wake = Wake()
    embedded = options.die_with_parent is not None
    wake.arm_signals(embedded)
    control = Control(wake, options.die_with_parent) if options.control or embedded else None
    return Engine(options, wake, control).run()
