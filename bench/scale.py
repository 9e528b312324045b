"""``scale``: many points on 1, 16 and 256 simulated engines: time, memory, open files, trace.

Each size runs in a fresh process with the real dispatcher, store, supervisor and trace; engines
and router answer at once, in memory, so that all that is measured is vime. Time must grow with
the points only, and memory not at all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import orjson

from bench.cli import positive
from bench.figures import Report, percentile

_ROOT = Path(__file__).resolve().parents[1]
_HOURS_S = 4 * 3600.0

Series = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--points", type=positive, default=10_000, metavar="N",
        help="points of each run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", type=positive, nargs="+", default=[1, 16, 256], metavar="N",
        help="sizes of the fleet (default: 1 16 256)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    report = Report("scale")
    growths, slowdowns = [], []
    for num_engines in args.engines:
        series = _run_apart(num_engines, args.points)
        subject = f"engines_{num_engines}"
        report.add(subject, "point", "ms", series["point_ms"])
        report.add(subject, "memory", "MB", series["memory_mb"])
        report.add(subject, "open_files", "files", series["open_files"])
        sizes = [0.0, *series["trace_bytes"]]
        block = max(1, args.points // len(series["trace_bytes"]))
        report.add(subject, "trace", "bytes/point", [(b - a) / block for a, b in pairwise(sizes)])
        growths.append(memory_growth(series["memory_mb"]))
        slowdowns.append(time_growth(series["point_ms"]))
        report.ratios[f"memory_growth_mb_{num_engines}"] = growths[-1]
        report.ratios[f"time_growth_{num_engines}"] = slowdowns[-1]
    report.ratios["memory_growth_mb"] = max(growths)
    report.ratios["time_growth"] = max(slowdowns)
    report.notes.append(
        f"memory_growth_mb: from point {max(1, args.points // 100)} to point {args.points}; "
        "time_growth: the last tenth of the points over the second tenth"
    )
    return report


def memory_growth(memory_mb: list[float]) -> float:
    """MB from the first hundredth of the run to its end."""
    return memory_mb[-1] - memory_mb[0]


def time_growth(point_ms: list[float]) -> float:
    """Median time of a point in the last tenth of the run, over that in the second tenth."""
    tenth = max(1, len(point_ms) // 10)
    early = point_ms[tenth : 2 * tenth] or point_ms[:tenth]
    return percentile(point_ms[-tenth:], 0.5) / percentile(early, 0.5)


def _run_apart(num_engines: int, num_points: int) -> Series:
    """In a process of its own: what an earlier run has left in memory would hide a growth."""
    command = [sys.executable, "-m", "bench.scale_run", str(num_engines), str(num_points)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, timeout=_HOURS_S, check=True)
    series: Series = orjson.loads(done.stdout)
    return series
