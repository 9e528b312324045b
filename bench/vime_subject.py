"""vime's own dispatcher as a subject: everything real, but for what a benchmark leaves out."""

from __future__ import annotations

import argparse
from typing import Any

from bench.stand_ins import WAITING_EVAL
from bench.subjects import Setup
from vime.eval.dispatcher import EvalDispatcher


def dispatcher_for(setup: Setup, exporter: Any, **flags: Any) -> EvalDispatcher:
    """A dispatcher whose evaluations wait for ``setup.eval_seconds`` in the runner's process.

    Store, trace, trackers and runner are the real ones, on their real ways in and out.
    """
    args = argparse.Namespace(
        eval_run_dir=str(setup.scratch / "run"),
        eval_hf_dir=str(setup.staging / "staging"),
        eval_interval=1,
        hf_checkpoint=str(setup.checkpoint),
        eval_function_path=WAITING_EVAL,
        bench_eval_seconds=setup.eval_seconds,
        **flags,
    )
    return EvalDispatcher.from_args(args, exporter=exporter)
