"""A user's backend for the tests of whole runs: it reads the weights and scores them by themselves."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from tests.eval_cli.backend import first_of_norm
from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip


class NormBackend(CheckpointEvalFn):
    """The reward is the final norm's first weight: whoever set it knows what must come out."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        if input.rollout_id == self.args.die_at:
            os._exit(9)
        if input.rollout_id == self.args.hang_at:
            if self.args.fifo:  # whoever reads it knows that this process is at work
                await anyio.Path(self.args.fifo).write_text("hanging")
            await anyio.sleep_forever()
        if input.rollout_id == self.args.skip_at:
            raise EvalSkip("service_away", "503 from the scoring service")
        norm = first_of_norm(checkpoint_dir / "model.safetensors", 1)
        return RolloutFnEvalOutput({"norm": {"rewards": norm}})


class PlainNormBackend(CheckpointEvalFn):
    """The same reward, and nothing ever goes wrong."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        norm = first_of_norm(checkpoint_dir / "model.safetensors", 1)
        return RolloutFnEvalOutput({"norm": {"rewards": norm}})
