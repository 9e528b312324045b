"""``interference``: how fast training goes with no evaluation, with one in flight, with two.

A small transformer is trained on one core. Engines and router are simulated in processes of
their own and compute nothing, so that what training loses is vime's own cost: the capture and
the writing of snapshots, the dispatcher's thread, the runner's process. The windows of a round
follow one another in changing order; ratios compare the windows of one round.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.cli import positive, positive_number
from bench.figures import Report, paired_ratio
from bench.models import VOCABULARY, make_model, make_tokenizer, num_bytes, write_checkpoint
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

WORDS = {1: "one", 2: "two"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--seconds", type=positive_number, default=6.0, metavar="S",
        help="length of a window of training (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive, default=8, metavar="N",
        help="windows of each kind (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--width", type=positive, default=256, metavar="N",
        help="hidden size of the model in training, a multiple of 64 (default: %(default)s)",
    )  # fmt: skip
    add_subject_argument(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    others = load_factories(args.subject)
    with scratch() as places, one_thread():
        import torch

        model = make_model(args.width, 4, torch.float32)
        checkpoint = write_checkpoint(model, places.memory / "base")
        factories: dict[str, Factory] = {VIME: _vime, **others}
        with _opened_all(factories, args, places, checkpoint, model) as subjects:
            rates = _measure(subjects, make_step(model), args)
    report = Report("interference")
    for (name, in_flight), samples in rates.items():
        report.add(name, WORDS.get(in_flight, "none"), "steps/s", samples)
    for name, in_flight in itertools.product(subjects, WORDS):
        prefix = "" if name == VIME else f"{name}_"
        report.ratios[f"{prefix}speed_with_{WORDS[in_flight]}"] = paired_ratio(
            rates[name, in_flight], rates["training", 0]
        )
    report.notes.append(f"weights: {num_bytes(model) / 1e6:.0f} MB, captured in each window")
    return report


@contextmanager
def _opened_all(
    factories: dict[str, Factory],
    args: argparse.Namespace,
    places: Scratch,
    checkpoint: Path,
    model: Any,
) -> Iterator[dict[str, Subject]]:
    from bench.simulated_fleet import simulated_server

    with ExitStack() as stack:
        url = None
        if len(factories) > 1:
            url = stack.enter_context(simulated_server(places.disk))
        subjects = {}
        for name, factory in factories.items():
            disk, memory = places.subject(name)
            # A little longer than the window, so that it is in flight for all of it.
            seconds = 1.2 * args.seconds
            setup = Setup("interference", disk, memory, checkpoint, seconds, model, url)
            subjects[name] = stack.enter_context(opened(factory, setup))
        yield subjects


def _vime(setup: Setup) -> Subject:
    from bench.simulated_fleet import dispatcher_with_simulated_fleet

    return dispatcher_with_simulated_fleet(setup, (setup.model, make_tokenizer()))


Rates = dict[tuple[str, int], list[float]]


def _measure(
    subjects: dict[str, Subject], step: Callable[[], None], args: argparse.Namespace
) -> Rates:
    """Steps per second of each window, by subject and evaluations in flight."""
    rollout_ids = itertools.count(1)
    windows: list[tuple[str, int]] = [("training", 0), *itertools.product(subjects, WORDS)]
    rates: Rates = {window: [] for window in windows}
    for subject in subjects.values():  # the warm-up
        subject.dispatch(next(rollout_ids))
        _train(step, min(args.seconds, 2.0), time.perf_counter())
        subject.drain()
    for number in range(args.rounds):
        turned = number % len(windows)
        for name, in_flight in windows[turned:] + windows[:turned]:
            began = time.perf_counter()
            for _ in range(in_flight):
                subjects[name].dispatch(next(rollout_ids))
            rates[name, in_flight].append(_train(step, args.seconds, began))
            if in_flight:
                subjects[name].drain()
    return rates


def _train(step: Callable[[], None], seconds: float, began: float) -> float:
    """Train until ``seconds`` after ``began``; returns steps per second since then."""
    steps = 0
    while True:
        step()
        steps += 1
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            return steps / elapsed


def make_step(model: Any) -> Callable[[], None]:
    """One step of training: forward, backward, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(0, VOCABULARY, (4, 48), generator=generator)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@contextmanager
def one_thread() -> Iterator[None]:
    """Train on one core: the others are for what runs beside training."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
