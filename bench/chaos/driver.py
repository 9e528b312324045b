"""The training side of a chaos run, a process: ``python -m bench.chaos.driver ORDER``.

Everything in it is what a user's program has; what is broken, the injector breaks. It prints a
line for each outcome, and :data:`READY` when it waits to be killed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.chaos import reward, weights
from bench.chaos.faults import NEED_ROOM, NUM_ENGINES, Fault, from_json
from bench.chaos.injector import Injector
from bench.chaos.private import Ballast
from vime.eval import EvalDispatcher
from vime.eval.contracts import Outcome
from vime.eval.processes import keeper

READY = "ready to be killed"


@dataclass(frozen=True)
class Order:
    """What a driver is to do.

    Attributes:
        root: where everything is that outlives the run.
        staging: ``--eval-hf-dir``; its parent is the file system that may be filled.
        seed: of weights and prompts.
        points: how many points to dispatch.
        schedule: see :func:`bench.chaos.faults.as_json`.
        end: ``close``, or ``kill``: wait for that when the last point has its outcome, or
            ``hold``: the same, in the middle of one more point.
        min_engines: ``--eval-min-engines``.
    """

    root: str
    staging: str
    seed: int
    points: int
    schedule: list[dict[str, Any]]
    end: str
    min_engines: int | None = None

    def write(self, path: Path) -> None:
        """For :meth:`read`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Order:
        """What :meth:`write` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def flags(order: Order) -> argparse.Namespace:
    """The flags of the run; deadlines are short, so that what hangs is found out in minutes."""
    root = Path(order.root)
    return argparse.Namespace(
        eval_num_gpus=NUM_ENGINES,
        eval_min_engines=order.min_engines,
        eval_hf_dir=order.staging,
        eval_interval=1,
        eval_run_dir=str(root / "run"),
        hf_checkpoint=str(root / "base"),
        eval_prompt_data=[weights.NAME, str(root / "prompts.jsonl")],
        custom_rm_path=f"{reward.__name__}.{reward.worth.__name__}",
        eval_max_response_len=weights.NUM_ANSWER_TOKENS,
        eval_concurrency=4,
        eval_vllm_max_model_len=weights.MAX_TOKENS,
        eval_vllm_dtype="float32",
        eval_pin_timeout=120.0,
        eval_timeout=240.0,
        eval_export_timeout=60.0,
    )


class Training:
    """A training loop whose weights are other ones at each step."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.root = Path(order.root)
        self.faults: list[Fault] = from_json(order.schedule)
        ballast = Ballast(Path(order.staging).with_name("ballast"))
        self.injector = Injector(self.faults, self.root / "injected.jsonl", ballast, order.seed)

    def export(self, rollout_id: int, directory: Path) -> None:
        """The user's own export; a copy that nobody damages is kept for the auditor."""
        whole = self.root / "kept" / f"step_{rollout_id}"
        weights.write_checkpoint(whole, self.order.seed, rollout_id)
        self.injector.export(rollout_id, whole, directory)

    def run(self) -> None:
        """Dispatch every point; then end as ordered."""
        with EvalDispatcher.from_args(
            flags(self.order), exporter=self.export, trackers=[_print]
        ) as dispatcher:
            dispatcher.trace.subscribe(self.injector.on_record)
            weights.warm_up()  # while the engines start
            dispatcher.wait_until_ready()
            _say("the fleet is ready")
            alone = {fault.point for fault in self.faults if fault.kind in NEED_ROOM}
            for point in range(1, self.order.points + 1):
                dispatcher.at_step(point)
                handle = dispatcher.dispatch(point)
                if point in alone:  # the full disk is for this one
                    handle.result()
            dispatcher.drain()
            self.injector.finish()
            if self.order.end == "close":
                return
            if self.order.end == "hold":
                Path(os.environ[reward.HOLD]).touch()
                self.injector.first_answer.clear()
                dispatcher.dispatch(self.order.points + 1)
                self.injector.first_answer.wait()
            _say(READY)
            threading.Event().wait()


def _print(outcome: Outcome) -> None:
    score = outcome.metrics.get(f"eval/{weights.NAME}")
    said = f"{score:.6f}" if score is not None else f"{outcome.reason}: {outcome.detail}"
    _say(f"point {outcome.rollout_id}: {outcome.state}: {' '.join(said.split())[:160]}")


def _say(line: str) -> None:
    print(line, flush=True)


def _listen(fifo: Path, injector: Injector) -> None:
    """One byte an answer; the descriptor is ours for both ends, so that it never ends."""
    fd = os.open(fifo, os.O_RDWR)
    while True:
        for _ in os.read(fd, 1):
            injector.on_answer()


def main() -> None:
    """Run what the order says; never outlive the auditor."""
    ctypes.CDLL(None).prctl(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # the model is small, and the engines need cores too
    order = Order.read(Path(sys.argv[1]))
    fifo = Path(os.environ[reward.ANSWERS])
    os.mkfifo(fifo)
    training = Training(order)
    threading.Thread(target=_listen, args=(fifo, training.injector), daemon=True).start()
    training.run()


if __name__ == "__main__":
    main()
