"""``pin``: putting a snapshot on 1, 2, 4 real engines, proven, beside what cannot be avoided.

The baseline is raw: ``reload_weights`` on all engines at once, and then the answers that a pin asks
for, as many tokens of each engine, and one more of one of them; no digest, no pause, no version, no
comparison, no router. Both load the same files, one after the other, with the weights in the page
cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio

from bench.cli import positive, positive_number
from bench.engines import fleet_settings, pinned, running_fleet, staged
from bench.figures import Report, paired_ratio
from bench.models import make_model_of, write_checkpoint
from bench.scratch import scratch
from vime.fsm.trace import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--engines", type=positive, nargs="+", default=[1, 2, 4], metavar="N",
        help="sizes of the fleet (default: 1 2 4)",
    )  # fmt: skip
    parser.add_argument(
        "--gigabytes", type=positive_number, default=0.5, metavar="G",
        help="size of the model's weights in GB, bfloat16 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive, default=10, metavar="N",
        help="pins of each fleet (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    report = Report("pin")
    with scratch(int(4e9 * args.gigabytes)) as places:
        checkpoint = write_checkpoint(make_model_of(args.gigabytes), places.memory / "base")
        for num_engines in args.engines:
            root, memory = places.subject(f"engines_{num_engines}")
            staging = memory / "staging"
            taken = anyio.run(_measure, num_engines, checkpoint, root, staging, args.repeat)
            _enter(report, num_engines, taken)
    report.ratios["pin_over_reload"] = max(report.ratios.values())
    report.notes.append(
        f"weights: {args.gigabytes:g} GB; pin_over_reload is that of the fleet with the largest"
    )
    return report


def _enter(report: Report, num_engines: int, taken: dict[str, list[float]]) -> None:
    for subject, samples in taken.items():
        report.add(subject, f"engines_{num_engines}", "s", samples)
    report.ratios[f"pin_over_reload_{num_engines}"] = paired_ratio(taken["vime"], taken["raw"])


async def _measure(
    num_engines: int, checkpoint: Path, root: Path, staging: Path, repeat: int
) -> dict[str, list[float]]:
    """Seconds of each raw reload and each pin, in turn."""
    settings = fleet_settings(num_engines, checkpoint, root)
    taken: dict[str, list[float]] = {"raw": [], "vime": []}
    with Trace(root / "trace.jsonl", "bench") as trace:
        async with (
            staged(checkpoint, staging, trace, (1, 2)) as snapshots,
            running_fleet(settings, trace) as (fleet, engines),
        ):

            async def raw(directory: Path) -> None:
                await engines.reload(directory)
                await engines.probe()

            for number in range(1 + repeat):  # the first is the warm-up
                snapshot = snapshots[number % 2]
                taken["raw"].append(await _seconds(raw(snapshot.path)))
                taken["vime"].append(await _seconds(pinned(fleet, snapshot)))
    return {name: samples[1:] for name, samples in taken.items()}


async def _seconds(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began
