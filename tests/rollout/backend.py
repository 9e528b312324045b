"""A backend that does at each step what a user's code may do wrong there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

RAISE, EXIT, CRASH, KILLED, BLOCK, SKIP = 1, 3, 5, 7, 9, 11


class Faulty(CheckpointEvalFn):
    """The reward is the id of its process, where nothing goes wrong."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        match input.rollout_id:
            case 1:
                raise ZeroDivisionError("the user's own mistake")
            case 3:
                os._exit(7)
            case 5:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 7:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
            case 9:
                time.sleep(1000)  # noqa: ASYNC251 -- it blocks the loop of its process
            case 11:
                raise EvalSkip("judge_away", f"nobody judges {checkpoint_dir.name}")
        return RolloutFnEvalOutput({"pid": {"rewards": [float(os.getpid())]}})


class NeverLetsGo(CheckpointEvalFn):
    """Blocks its process where it should let go of what it holds."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        return RolloutFnEvalOutput(metrics={"pid": os.getpid()})

    async def dispose(self) -> None:
        time.sleep(1000)  # noqa: ASYNC251 -- that is the fault


class Unfinished(CheckpointEvalFn):
    """Lacks its method."""
