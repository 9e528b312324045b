"""A backend for the tests of `vime eval`: it scores a checkpoint by its final norm."""

from __future__ import annotations

from pathlib import Path

import anyio
from safetensors.torch import load_file

from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip


class NormBackend(CheckpointEvalFn):
    """Whoever set the norm knows what must come out; a negative one is refused."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        weights = await anyio.to_thread.run_sync(load_file, checkpoint_dir / "model.safetensors")
        norm = [float(value) for value in weights["model.norm.weight"][:4]]
        if norm[0] < 0:
            raise EvalSkip("negative", f"step {input.rollout_id}: the norm begins with {norm[0]}")
        return RolloutFnEvalOutput({"norm": {"rewards": norm}})
