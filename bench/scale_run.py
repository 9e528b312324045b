"""One long run for ``scale``, in a process of its own: ``python -m bench.scale_run N POINTS``.

Prints one JSON object: for every hundredth of the run the milliseconds a point, the memory and
the open files of the process, and the size of the trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from bench.memory_fleet import InstantEvaluator, memory_fleet
from bench.models import FromShelf, write_tiny_checkpoint
from bench.scratch import scratch
from vime.eval.assembly import assemble
from vime.eval.config import EvalConfig
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.fleet.settings import FleetSettings

NUM_BLOCKS = 100


def measure(num_engines: int, num_points: int) -> dict[str, list[float]]:
    """Run ``num_points`` points; returns the series of the module's docstring by their names."""
    size = max(1, num_points // NUM_BLOCKS)
    series: dict[str, list[float]] = {
        "point_ms": [], "memory_mb": [], "open_files": [], "trace_bytes": [],
    }  # fmt: skip
    process = psutil.Process()
    with scratch() as places:
        checkpoint = write_tiny_checkpoint(places.memory / "checkpoint")
        with _dispatcher(num_engines, places.disk, places.memory, checkpoint) as dispatcher:
            dispatcher.wait_until_ready()
            began = time.perf_counter()
            for rollout_id in range(1, num_points + 1):
                dispatcher.dispatch(rollout_id)
                if rollout_id % size:
                    continue
                now = time.perf_counter()
                series["point_ms"].append((now - began) * 1e3 / size)
                series["memory_mb"].append(process.memory_info().rss / 1e6)
                series["open_files"].append(process.num_fds())
                series["trace_bytes"].append(_size(dispatcher))
                began = time.perf_counter()
            unfinished = [o for o in dispatcher.drain() if o.state != "done"]
    assert not unfinished, f"every point has a score; the first without: {unfinished[0]}"
    return series


def _size(dispatcher: EvalDispatcher) -> int:
    assert dispatcher.trace.path is not None
    return dispatcher.trace.path.stat().st_size


def _dispatcher(num_engines: int, disk: Path, memory: Path, checkpoint: Path) -> EvalDispatcher:
    config = EvalConfig(
        hf_dir=memory / "staging",
        hf_checkpoint=checkpoint,
        interval=1,
        run_dir=disk / "run",
        uses_snapshots=True,
    )
    parts = assemble(config, argparse.Namespace(), FromShelf(checkpoint), None, ())
    settings = FleetSettings(num_engines, base=checkpoint, run_dir=parts.run_dir)
    parts.fleet = memory_fleet(settings, parts.trace)
    parts.evaluator, parts.runner = InstantEvaluator(), None
    return EvalDispatcher(config, parts, None)


def main() -> None:
    """Run the program."""
    num_engines, num_points = map(int, sys.argv[1:])
    found: dict[str, Any] = measure(num_engines, num_points)
    sys.stdout.buffer.write(orjson.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's threads need no orderly end


if __name__ == "__main__":
    main()
