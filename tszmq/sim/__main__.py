"""``python -m tszmq.sim``: one engine in this process, or ``--ranks N`` of them as children."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attrs

from tszmq.sim.control import Control
from tszmq.sim.engine import run
from tszmq.sim.fleet import Fleet
from tszmq.sim.link import Wake
from tszmq.sim.options import EngineOptions, build_parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m tszmq.sim") -> int:
    """Run engines until they are told to stop.

    Args:
        argv: Arguments; the process's own by default.
        prog: What the help calls the command.

    Returns:
        The exit status: the engine's, or the worst of the ranks'.
    """
    parser = build_parser(prog)
    try:
        options = EngineOptions(**vars(parser.parse_args(argv)))
    except ValueError as exc:
        parser.error(str(exc))
    return _run_ranks(options) if options.ranks else run(options)


def _run_ranks(options: EngineOptions) -> int:
    chosen = attrs.asdict(options)
    parent = chosen.pop("die_with_parent")
    for name in ("ranks", "handshake", "index", "dp_rank", "dp_size", "control"):
        del chosen[name]
    wake = Wake()
    wake.arm_signals(embedded=parent is not None)
    if parent is not None:
        Control(wake, parent)
    wake.arm_child_signal()
    with Fleet(options.ranks, first_index=options.index, **chosen) as fleet:
        fleet.start(options.handshake)
        while not wake.stopping and any(code is None for code in fleet.exit_codes):
            wake.wait()
        fleet.terminate()
        return max(abs(code or 0) for code in fleet.exit_codes)


if __name__ == "__main__":
    sys.exit(main())
