"""``dispatch``: how long the call holds its caller when there is nothing to copy.

One point at a time, each drained before the next, so that nothing but the hand-over is measured.
The baseline is the least that any dispatcher with an event loop of its own must do: hand a
coroutine to another thread, and wait for its end.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cli import positive
from bench.figures import Report
from bench.models import FromShelf, write_tiny_checkpoint
from bench.scratch import Scratch, scratch
from bench.subjects import (
    VIME,
    Factory,
    Setup,
    Subject,
    add_subject_argument,
    load_factories,
    opened,
)

NUM_WARM_UPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--points", type=positive, default=1000, metavar="N", help="points (default: %(default)s)"
    )
    add_subject_argument(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    factories: dict[str, Factory] = {VIME: _vime, **load_factories(args.subject)}
    report = Report("dispatch")
    with scratch() as places:
        checkpoint = write_tiny_checkpoint(places.memory / "checkpoint")
        with hand_over() as call:
            report.add("handover", "hold", "ms", holds_of(call, args.points))
        for name, factory in factories.items():
            with opened(factory, _setup(places, name, checkpoint)) as subject:
                report.add(name, "hold", "ms", _holds(subject, args.points))
    base = report.figures["handover/hold"].p50
    for name in factories:
        prefix = "" if name == VIME else f"{name}_"
        report.ratios[f"{prefix}hold_over_handover"] = report.figures[f"{name}/hold"].p50 / base
    return report


def _setup(places: Scratch, name: str, checkpoint: Path) -> Setup:
    disk, memory = places.subject(name)
    return Setup("dispatch", disk, memory, checkpoint, eval_seconds=0.0)


def _vime(setup: Setup) -> Subject:
    from bench.vime_subject import dispatcher_for

    return dispatcher_for(setup, FromShelf(setup.checkpoint))


def _holds(subject: Subject, num_points: int) -> list[float]:
    """Milliseconds of each call."""
    holds = []
    for rollout_id in range(NUM_WARM_UPS + num_points):
        began = time.perf_counter_ns()
        subject.dispatch(rollout_id)
        holds.append((time.perf_counter_ns() - began) / 1e6)
        subject.drain()
    return holds[NUM_WARM_UPS:]


def holds_of(call: Callable[[], object], num_calls: int) -> list[float]:
    """Milliseconds of each of ``num_calls`` calls, after a warm-up."""
    holds = []
    for _ in range(NUM_WARM_UPS + num_calls):
        began = time.perf_counter_ns()
        call()
        holds.append((time.perf_counter_ns() - began) / 1e6)
    return holds[NUM_WARM_UPS:]


@contextmanager
def hand_over() -> Iterator[Callable[[], object]]:
    """A call that has an empty coroutine run by a loop on another thread, and waits for it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="handover")
    thread.start()

    async def nothing() -> None:
        pass

    try:
        yield lambda: asyncio.run_coroutine_threadsafe(nothing(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
