"""What stands in for the parts of an evaluation that are not vime's, in other processes."""

from __future__ import annotations

from pathlib import Path

import anyio

from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn


class WaitingEval(CheckpointEvalFn):
    """An evaluation that takes ``args.bench_eval_seconds`` and no processor; every score is 1.

    It runs in the EvalRunner's process, as every user's backend does.
    """

    async def evaluate_checkpoint(
        self,
        checkpoint_dir: Path,  # noqa: ARG002 -- the contract
        input: RolloutFnEvalInput,  # noqa: ARG002
    ) -> RolloutFnEvalOutput:
        """Wait; the checkpoint is not looked at."""
        await anyio.sleep(self.args.bench_eval_seconds)
        return RolloutFnEvalOutput({"waited": {"rewards": [1.0]}})


WAITING_EVAL = f"{WaitingEval.__module__}.{WaitingEval.__name__}"
