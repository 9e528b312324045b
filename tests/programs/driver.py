"""A small training driver, for tests that kill or interrupt it: driver.py RUN_DIR STAGING BASE FIFO."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from vime.eval import EvalDispatcher

BACKEND = "tests.programs.backend.NormBackend"


def namespace(run_dir: str, staging: str, base: str, **flags: object) -> argparse.Namespace:
    """Flags of a run that evaluates on :class:`tests.programs.backend.NormBackend`."""
    own = {"die_at": -1, "hang_at": -1, "skip_at": -1, "fifo": None}
    return argparse.Namespace(
        eval_run_dir=run_dir,
        eval_hf_dir=staging,
        eval_interval=1,
        hf_checkpoint=base,
        eval_function_path=BACKEND,
        **{**own, **flags},
    )


def main() -> None:
    """Dispatch a point whose evaluation says so through the FIFO and hangs; wait for it."""
    run_dir, staging, base, fifo = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(base)
    exporter = (model, AutoTokenizer.from_pretrained(base))
    args = namespace(run_dir, staging, base, hang_at=1, fifo=fifo)
    with EvalDispatcher.from_args(args, exporter=exporter) as dispatcher:
        dispatcher.dispatch(1).result()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
