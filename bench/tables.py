"""Writes the figures of ``bench/results`` into README.md and docs/bench.md, between their marks.

``python -m bench.tables`` writes them; ``--check`` says whether they are there already.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.machine import summary
from bench.output import number

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- figures: made by python -m bench.tables -->"
END = "<!-- end of figures -->"
NOTHING = "*`make bench` writes the figures of your machine here.*\n"


@dataclass(frozen=True)
class Aim:
    """One figure that people decide by.

    Attributes:
        bench: which benchmark measures it.
        name: of a ratio, or of a figure and its percentile (``vime/hold p99``).
        what: it in words.
        at_most: it should not be above, or, where ``False``, not below ``limit``.
        limit: in the unit of the figure.
        unit: after the number.
    """

    bench: str
    name: str
    what: str
    limit: float
    at_most: bool = True
    unit: str = ""

    def value(self, results: dict[str, Any]) -> float | None:
        """What was measured, if it was."""
        report = results.get(self.bench, {"ratios": {}, "figures": {}})
        figure, _, percentile = self.name.partition(" ")
        found = (
            report["figures"].get(figure, {}).get(percentile)
            if percentile
            else report["ratios"].get(figure)
        )
        return None if found is None else float(found)

    def is_met(self, value: float) -> bool:
        """Whether the value is as good as it should be."""
        return value <= self.limit if self.at_most else value >= self.limit


AIMS = (
    Aim("dispatch", "vime/hold p50", "`dispatch` with nothing to copy, median", 0.2, unit=" ms"),
    Aim(
        "dispatch",
        "vime/hold p99",
        "`dispatch` with nothing to copy, 99th percentile",
        1,
        unit=" ms",
    ),
    Aim("stall", "stall_over_copy", "stall of a point with 1 GB, over the bare copy", 1.25),
    Aim(
        "stall",
        "stall_over_blocking",
        "the same, over a blocking save and evaluation of 30 s",
        0.01,
    ),
    Aim(
        "interference",
        "speed_with_one",
        "training speed with one evaluation, over none",
        0.98,
        at_most=False,
    ),
    Aim(
        "tracing",
        "speed_with_trace",
        "training speed with every transition traced, over none",
        0.99,
        at_most=False,
    ),
    Aim("trace", "vime/transition p50", "a transition with its record, median", 60, unit=" µs"),
    Aim(
        "trace",
        "vime/replay p50",
        "replay of a trace",
        50_000,
        at_most=False,
        unit=" records/s",
    ),
    Aim(
        "trace",
        "vime/check p50",
        "check of a trace",
        50_000,
        at_most=False,
        unit=" records/s",
    ),
    Aim("trace", "stats_of_a_million_s", "`vime trace stats` of a million records", 20, unit=" s"),
    Aim("trace", "vime/stats_memory max", "its greatest memory", 200, unit=" MB"),
    Aim(
        "runner",
        "runner_over_client",
        "samples a second, over a bare client of the same engine",
        0.97,
        at_most=False,
    ),
    Aim("runner", "runner_over_lm_eval", "samples a second, over lm-eval", 1, at_most=False),
    Aim("pin", "pin_over_reload", "a pin with its proof, over raw `reload_weights`", 1.25),
    Aim(
        "latency",
        "latency_over_parts",
        "`dispatch` to outcome, over copy, write, load and generation",
        1.15,
    ),
    Aim("ray", "vime/hold p50", "`dispatch` on a Ray cluster, median", 2, unit=" ms"),
    Aim(
        "ray",
        "transfer_to_four_over_one_linked",
        "a snapshot to four nodes with a link each, over one of them",
        1.3,
    ),
    Aim("ray", "transfer_to_four_over_one", "the same, where all nodes share the cores", 1.3),
    Aim("scale", "memory_growth_mb", "memory from point 100 to point 10,000", 20, unit=" MB"),
)


def read_results(directory: Path) -> dict[str, Any]:
    """Benchmark → its JSON, of those that are there."""
    return {path.stem: orjson.loads(path.read_bytes()) for path in sorted(directory.glob("*.json"))}


def short_table(results: dict[str, Any]) -> str:
    """What people decide by, beside what it should be."""
    rows = [
        f"| {aim.what} | **{number(value)}{aim.unit}** "
        f"| {'≤' if aim.at_most else '≥'} {aim.limit:,g}{aim.unit}{_miss(aim, value)} |"
        for aim in AIMS
        if (value := aim.value(results)) is not None
    ]
    if not rows:
        return NOTHING
    return "\n".join(["| What it costs | Measured | Aim |", "|---|---|---|", *rows, ""])


def _miss(aim: Aim, value: float) -> str:
    return "" if aim.is_met(value) else " (missed)"


def long_table(results: dict[str, Any]) -> str:
    """Every figure and every ratio, and what machine it was."""
    if not results:
        return NOTHING
    lines = [short_table(results)]
    for name, report in results.items():
        lines += [f"**{name}**: {summary(report['machine'])}", ""]
        lines += ["| Figure | p50 | p90 | p99 | max | unit | n |", "|---|---|---|---|---|---|---|"]
        for figure, values in report["figures"].items():
            cells = [number(values[p]) for p in ("p50", "p90", "p99", "max")]
            lines.append(f"| `{figure}` | {' | '.join(cells)} | {values['unit']} | {values['n']} |")
        ratios = (f"`{ratio}` = {number(value)}" for ratio, value in report["ratios"].items())
        lines += ["", ", ".join(ratios), ""]
    return "\n".join(lines)


def write_tables(root: Path, results: Path, *, check: bool = False) -> list[Path]:
    """Put the tables into the documents.

    Args:
        root: where the documents are.
        results: where the JSON is.
        check: change nothing.

    Returns:
        The documents that were not as they should be.
    """
    found = read_results(results)
    tables = {"README.md": short_table(found), "docs/bench.md": long_table(found)}
    stale = []
    for name, table in tables.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        head, begin, rest = text.partition(BEGIN)
        _, end, tail = rest.partition(END)
        assert begin, f"{name} has the marks"
        assert end, f"{name} has the marks"
        fresh = f"{head}{BEGIN}\n\n{table}\n{END}{tail}"
        if fresh != text:
            stale.append(path)
            if not check:
                path.write_text(fresh, encoding="utf-8")
    return stale


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if anything is old")
    args = parser.parse_args(argv)
    stale = write_tables(ROOT, ROOT / "bench" / "results", check=args.check)
    if args.check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"{names}: not of bench/results; run python -m bench.tables", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
