"""``tracing``: training speed while points are evaluated, with their trace and without.

One dispatcher, one model: blocks of as many steps each, in pairs, one with every transition written
to the trace, the other with the trace's ``write`` replaced by a function that drops the record.
The state machines run in both. Whichever came first in a pair comes second in the next, and a block
begins when all points of the one before have ended.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from bench.cli import positive
from bench.figures import Report, paired_interval, paired_ratio
from bench.interference import make_step, one_thread
from bench.models import FromShelf, make_model, write_tiny_checkpoint
from bench.scratch import scratch
from bench.subjects import Setup
from vime.eval.dispatcher import EvalDispatcher
from vime.fsm.record import Record
from vime.fsm.trace import Trace

_NUM_WARM_UPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--pairs", type=positive, default=40, metavar="N",
        help="blocks of training of either kind (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=positive, default=50, metavar="N",
        help="steps of a block (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=positive, default=10, metavar="N",
        help="a point is dispatched every N steps (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--width", type=positive, default=128, metavar="N",
        help="hidden size of the model in training, a multiple of 64 (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    from bench.vime_subject import dispatcher_for

    with scratch() as places, one_thread():
        import torch

        checkpoint = write_tiny_checkpoint(places.memory / "checkpoint")
        step = make_step(make_model(args.width, 4, torch.float32))
        setup = Setup("tracing", *places.subject("vime"), checkpoint, eval_seconds=0.0)
        with dispatcher_for(setup, FromShelf(checkpoint)) as dispatcher:
            blocks = _measure(dispatcher, step, args)
    return _report(blocks, args)


@dataclass
class _Blocks:
    """Steps a second of the blocks of either kind, and how many records those with trace wrote."""

    traced: list[float]
    untraced: list[float]
    num_records: int = 0


def _measure(
    dispatcher: EvalDispatcher, step: Callable[[], None], args: argparse.Namespace
) -> _Blocks:
    rollout_ids = itertools.count()
    blocks = _Blocks([], [])
    seqs = _Seqs(dispatcher.trace)

    def block() -> float:
        began = time.perf_counter()
        for number in range(args.steps):
            if number % args.every == 0:
                dispatcher.dispatch(next(rollout_ids))
            step()
        rate: float = args.steps / (time.perf_counter() - began)
        dispatcher.drain()
        return rate

    def traced() -> None:
        before = seqs.count
        blocks.traced.append(block())
        blocks.num_records += seqs.count - before

    def untraced() -> None:
        with dropped(dispatcher.trace):
            blocks.untraced.append(block())

    for _ in range(_NUM_WARM_UPS):
        block()
    for number in range(args.pairs):
        for measure in (traced, untraced) if number % 2 else (untraced, traced):
            measure()
    return blocks


class _Seqs:
    """Counts what a trace has written."""

    def __init__(self, trace: Trace) -> None:
        self.count = 0
        trace.subscribe(self._note)

    def _note(self, record: Record) -> None:  # noqa: ARG002 -- a listener
        self.count += 1


@dataclass(slots=True)
class _Dropped:
    """All that a machine reads of its record."""

    seq: int


@contextmanager
def dropped(trace: Trace) -> Iterator[None]:
    """Meanwhile ``trace`` makes no record, reads no clock and writes nothing."""
    numbers = itertools.count()

    def drop(**_: Any) -> Record:
        return cast(Record, _Dropped(next(numbers)))

    trace.write = drop  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trace.write  # the class's own is there again


def _report(blocks: _Blocks, args: argparse.Namespace) -> Report:
    report = Report("tracing")
    report.add("vime", "traced", "steps/s", blocks.traced)
    report.add("vime", "untraced", "steps/s", blocks.untraced)
    low, high = paired_interval(blocks.traced, blocks.untraced)
    report.ratios = {
        "speed_with_trace": paired_ratio(blocks.traced, blocks.untraced),
        "speed_with_trace_low": low,
        "speed_with_trace_high": high,
    }
    num_points = args.pairs * len(range(0, args.steps, args.every))
    report.notes.append(
        f"a point every {args.every} steps, of {blocks.num_records / num_points:.1f} records; the "
        f"median of {args.pairs} pairs lies between low and high with 95 % confidence"
    )
    return report
