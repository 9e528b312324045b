"""``stall``: how long training stands still at each point, with real weights.

Each round measures every subject once, with the weights changed before each: the bare memory
copy, a blocking ``save_pretrained`` with the evaluation beside training, the same with a blocking
evaluation (once only: it takes as long as the evaluation does), and vime. The evaluation waits in
another process. Ratios compare neighbours of one round.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.cli import UsageError, positive, positive_number
from bench.figures import Report, paired_ratio
from bench.models import make_model_of, make_tokenizer, num_bytes, write_checkpoint
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

_BLOCKING_ROUND = 1
_COPIES_IN_MEMORY = 8
"""Model, base, kept snapshots, the baselines' checkpoints, and host buffers, with a reserve."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--gigabytes", type=positive_number, default=1.0, metavar="G",
        help="size of the model's weights in GB, bfloat16 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive_number, default=30.0, metavar="T",
        help="how long the evaluation of a point takes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--points", type=positive, default=5, metavar="K",
        help="points of each subject, after one of warm-up (default: %(default)s)",
    )  # fmt: skip
    add_subject_argument(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    others = load_factories(args.subject)
    _check_memory(args.gigabytes)
    with scratch(int(_COPIES_IN_MEMORY / 2 * args.gigabytes * 1e9)) as places:
        model = make_model_of(args.gigabytes)
        checkpoint = write_checkpoint(model, places.memory / "base")
        # vime last: its export goes on when dispatch has returned, and must disturb nobody.
        factories: dict[str, Factory] = {
            "blocking_save": lambda setup: BlockingSave(setup, _wait_beside),
            **others,
            "blocking": lambda setup: BlockingSave(setup, _wait_here),
            "copy": lambda setup: BareCopy(setup.model),
            VIME: _vime,
        }
        stalls = _measure(factories, others, args, places, checkpoint, model)
    return _report(stalls, others, args, num_bytes(model))


def _report(
    stalls: dict[str, list[float]], others: dict[str, Factory], args: argparse.Namespace, size: int
) -> Report:
    report = Report("stall")
    for name, samples in stalls.items():
        report.add(name, "stall", "s", samples)
    blocking = report.figures["blocking/stall"].p50
    for name in (VIME, *others):
        prefix = "" if name == VIME else f"{name}_"
        report.ratios[f"{prefix}stall_over_copy"] = paired_ratio(stalls[name], stalls["copy"])
        report.ratios[f"{prefix}stall_over_blocking"] = (
            report.figures[f"{name}/stall"].p50 / blocking
        )
    report.notes.append(
        f"weights: {size / 1e9:.3g} GB; evaluation: {args.seconds:g} s; the copy moves "
        f"{size / 1e9 / report.figures['copy/stall'].p50:.1f} GB/s"
    )
    return report


def _measure(
    factories: dict[str, Factory],
    others: dict[str, Factory],
    args: argparse.Namespace,
    places: Scratch,
    checkpoint: Path,
    model: Any,
) -> dict[str, list[float]]:
    stalls: dict[str, list[float]] = {name: [] for name in factories}
    with ExitStack() as stack:
        subjects = {}
        for name, factory in factories.items():
            disk, memory = places.subject(name)
            setup = Setup("stall", disk, memory, checkpoint, args.seconds, model)
            subjects[name] = stack.enter_context(opened(factory, setup))
        for number in range(1 + args.points):
            for name, subject in subjects.items():
                if name == "blocking" and number != _BLOCKING_ROUND:
                    continue
                stalls[name].append(_stall(subject, number, model))
                if name in others:
                    subject.drain()  # whatever it does beside training has ended now
            for subject in subjects.values():
                subject.drain()
    # The baseline that waits itself needs no warm-up; the others' first point was theirs.
    return {name: taken if name == "blocking" else taken[1:] for name, taken in stalls.items()}


def _stall(subject: Subject, rollout_id: int, model: Any) -> float:
    """Seconds in one call, right after all weights have changed."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)
    began = time.perf_counter()
    subject.dispatch(rollout_id)
    return time.perf_counter() - began


def _check_memory(gigabytes: float) -> None:
    import psutil

    free, needed = psutil.virtual_memory().available / 1e9, _COPIES_IN_MEMORY * gigabytes
    if free < needed:
        raise UsageError(
            f"--gigabytes {gigabytes:g}: {needed:.1f} GB of memory are needed and {free:.1f} GB "
            f"are free; at most --gigabytes {free / _COPIES_IN_MEMORY:.1f} fits here"
        )


def _vime(setup: Setup) -> Subject:
    from bench.vime_subject import dispatcher_for

    return dispatcher_for(setup, (setup.model, make_tokenizer()))


class BareCopy:
    """The least that holding weights still can cost: a copy of each tensor into kept memory."""

    def __init__(self, model: Any) -> None:
        import torch

        self._pairs = [(p.detach(), torch.empty_like(p)) for p in model.parameters()]
        for _, kept in self._pairs:
            kept.zero_()  # memory that was never touched is not there yet

    def dispatch(self, rollout_id: int) -> None:  # noqa: ARG002 -- the protocol
        """Copy."""
        for source, kept in self._pairs:
            kept.copy_(source)

    def drain(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Let the memory go."""
        self._pairs.clear()


class BlockingSave:
    """What most training loops do: ``save_pretrained``, then an evaluation.

    Args:
        setup: the model and where to save it.
        wait: waits for the evaluation, here or on another thread, which it returns.
    """

    def __init__(self, setup: Setup, wait: Callable[[float], threading.Thread | None]) -> None:
        self._setup = setup
        self._wait = wait
        self._pending: list[threading.Thread] = []

    def dispatch(self, rollout_id: int) -> None:  # noqa: ARG002 -- the protocol
        """Save, then evaluate."""
        self._setup.model.save_pretrained(self._setup.staging / "checkpoint")
        thread = self._wait(self._setup.eval_seconds)
        if thread is not None:
            self._pending.append(thread)

    def drain(self) -> None:
        """Wait for the evaluations beside training."""
        while self._pending:
            self._pending.pop().join()

    def close(self) -> None:
        """Wait too: nothing is left behind."""
        self.drain()


def _wait_here(seconds: float) -> None:
    time.sleep(seconds)


def _wait_beside(seconds: float) -> threading.Thread:
    thread = threading.Thread(target=time.sleep, args=(seconds,), name="evaluation")
    thread.start()
    return thread
