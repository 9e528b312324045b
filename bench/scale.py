"""``scale``: many points on 1, 16 and 256 simulated engines: time, memory, open files, trace.

Each size runs in a fresh process with the real dispatcher, store, supervisor and trace; engines
and router answer at once, in memory, so that all that is measured is vime. Time must grow with
the points and the engines only, and memory not at all. What a point costs an engine is the same
work for each, so that the largest fleet shows it with fewer points.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import orjson

from bench.cli import UsageError, positive
from bench.figures import Report, percentile

_ROOT = Path(__file__).resolve().parents[1]
_HOURS_S = 4 * 3600.0
_WARM = 100  # points, after which memory must not grow

Series = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--points", type=positive, nargs="+", default=[10_000, 10_000, 200], metavar="N",
        help="points of each run, or of all of them (default: 10000 10000 200)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", type=positive, nargs="+", default=[1, 16, 256], metavar="N",
        help="sizes of the fleet, the smallest first (default: 1 16 256)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    counts = args.points * len(args.engines) if len(args.points) == 1 else args.points
    if len(counts) != len(args.engines):
        raise UsageError(
            f"--points {' '.join(map(str, counts))}: expected one number, or one for each of "
            f"--engines {' '.join(map(str, args.engines))}"
        )
    report = Report("scale")
    growths, slowdowns, costs = [], [], []
    for num_engines, num_points in zip(args.engines, counts, strict=True):
        series = _run_apart(num_engines, num_points)
        _add(report, num_engines, num_points, series)
        growths.append(memory_growth(series["memory_mb"], num_points))
        slowdowns.append(time_growth(series["point_ms"]))
        costs.append(percentile(series["point_ms"], 0.5) / num_engines)
        report.ratios[f"memory_growth_mb_{num_engines}"] = growths[-1]
        report.ratios[f"time_growth_{num_engines}"] = slowdowns[-1]
    report.ratios["memory_growth_mb"] = max(growths)
    report.ratios["time_growth"] = max(slowdowns)
    if len(costs) > 1:
        report.ratios["engine_cost_growth"] = max(b / a for a, b in pairwise(costs))
    report.notes += [
        f"points of each size: {', '.join(map(str, counts))}",
        f"memory_growth_mb: from point {_WARM} to the last one",
        "time_growth: the last tenth of the points over the second tenth",
        "engine_cost_growth: time of a point and engine, over that in the next smaller fleet",
    ]
    return report


def _add(report: Report, num_engines: int, num_points: int, series: Series) -> None:
    subject = f"engines_{num_engines}"
    report.add(subject, "point", "ms", series["point_ms"])
    report.add(subject, "memory", "MB", series["memory_mb"])
    report.add(subject, "open_files", "files", series["open_files"])
    sizes = [0.0, *series["trace_bytes"]]
    block = max(1, num_points // len(series["trace_bytes"]))
    report.add(subject, "trace", "bytes/point", [(b - a) / block for a, b in pairwise(sizes)])


def memory_growth(memory_mb: list[float], num_points: int) -> float:
    """MB from the point :data:`_WARM`, or the middle of a shorter run, to the end."""
    first = min(_WARM, num_points // 2) * len(memory_mb) // num_points
    return memory_mb[-1] - memory_mb[max(first - 1, 0)]


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
