"""What every benchmark shares: arguments, interleaved rounds, paired ratios, tables and JSON.

Times drift on a shared machine, ratios drift less: every figure is a ratio to a baseline of
the same run. A round runs every case once, in an order of its own; a ratio is the median of
the ratios within rounds, beside it the quartiles of those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import ormsgpack
import zmq

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent


@attrs.frozen
class Ratio:
    """The median of paired ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}-{short(self.high)})"


def paired(samples: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Each sample to the baseline's of the same round."""
    ratios = sorted(a / b for a, b in zip(samples, baseline, strict=True))
    return Ratio(statistics.median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def interleave(
    cases: Mapping[str, Callable[[], T]], rounds: int, seed: int = 1
) -> dict[str, list[T]]:
    """Run every case once a round, in a shuffled order."""
    samples: dict[str, list[T]] = {name: [] for name in cases}
    shuffled = random.Random(seed)
    names = list(cases)
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            samples[name].append(cases[name]())
    return samples


def short(value: object) -> str:
    """A figure with three digits."""
    if not isinstance(value, float):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


@attrs.define
class Table:
    """Rows of figures under one title.

    Attributes:
        title: What it shows.
        columns: Names of the figures.
        rows: One list of values each.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]] = attrs.field(factory=list)

    def add(self, *values: object) -> None:
        """One row."""
        assert len(values) == len(self.columns)
        self.rows.append(list(values))

    def text(self) -> str:
        """For people."""
        cells = [self.columns, *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if at == 0 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([self.title, *("  " + line for line in lines), ""])


def _cell(value: object) -> str:
    return str(value) if isinstance(value, Ratio) else short(value)


@attrs.define
class Bench:
    """One benchmark's run: its arguments, then its report.

    Attributes:
        name: Of the script.
        quick: A few seconds, to see that it works; its figures mean little.
        args: All arguments, those of the script included.
    """

    name: str
    quick: bool
    args: argparse.Namespace
    tables: list[Table] = attrs.field(factory=list)
    verdicts: list[dict[str, Any]] = attrs.field(factory=list)
    load_before: float = attrs.field(factory=lambda: os.getloadavg()[0])

    def rounds(self, usual: int, quick: int = 2) -> int:
        """How many rounds to run."""
        return self.args.rounds or (quick if self.quick else usual)

    def table(self, title: str, *columns: str) -> Table:
        """A new table of the report."""
        table = Table(title, list(columns))
        self.tables.append(table)
        return table

    def show(self, table: Table) -> None:
        """Print a table as soon as it is complete."""
        print(table.text(), flush=True)

    def judge(
        self, target: str, value: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        """Compare a figure with a target."""
        met = (least is None or value >= least) and (most is None or value <= most)
        limit = f">= {short(least)}" if least is not None else f"<= {short(most)}"
        self.verdicts.append({"target": target, "value": value, "limit": limit, "met": met})

    def finish(self) -> None:
        """Print the verdicts, write the JSON file."""
        for verdict in self.verdicts:
            print(
                f"{'met   ' if verdict['met'] else 'MISSED'} {verdict['target']}: "
                f"{short(verdict['value'])} (target {verdict['limit']})"
            )
        if self.quick:
            print("quick mode: the figures show that it runs, no more")
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.report(), indent=1) + "\n")

    def report(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "benchmark": self.name,
            "quick": self.quick,
            "machine": {**machine(), "load_before": self.load_before},
            "tables": [
                {
                    "title": table.title,
                    "rows": [
                        dict(zip(table.columns, map(_plain, row), strict=True))
                        for row in table.rows
                    ],
                }
                for table in self.tables
            ],
            "verdicts": self.verdicts,
        }


def _plain(value: object) -> object:
    return attrs.asdict(value) if isinstance(value, Ratio) else value


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "libzmq": zmq.zmq_version(),
        "pyzmq": zmq.pyzmq_version(),
        "ormsgpack": ormsgpack.__version__,
    }


def start(script: str, doc: str | None, *options: tuple[str, dict[str, Any]]) -> Bench:
    """Read the command line of a benchmark.

    Args:
        script: Its ``__file__``.
        doc: Its docstring.
        options: Further arguments: flag and keywords of ``add_argument``.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, figures of no weight")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    parser.add_argument("--rounds", type=int, default=0, help="rounds instead of the usual number")
    for flag, keywords in options:
        parser.add_argument(flag, **keywords)
    args = parser.parse_args()
    return Bench(Path(script).stem, args.quick, args)


def in_child(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Run ``script`` with these arguments in a process of its own.

    Returns:
        What it printed as JSON on its last line.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        check=True,
        text=True,
        timeout=120,
    )
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory for Unix sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="tszmq-") as path:
        yield Path(path)
