"""A backend for the tests of `vime eval`: it scores a checkpoint by its final norm."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import anyio

from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip


class NormBackend(CheckpointEvalFn):
    """Whoever set the norm knows what must come out; a negative one is refused."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        path = checkpoint_dir / "model.safetensors"
        norm = await anyio.to_thread.run_sync(first_of_norm, path, 4)
        if norm[0] < 0:
            raise EvalSkip("negative", f"step {input.rollout_id}: the norm begins with {norm[0]}")
        return RolloutFnEvalOutput({"norm": {"rewards": norm}})


def first_of_norm(path: Path, count: int) -> list[float]:
    """The first numbers of the final norm; without torch, which takes longer to import than a run."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        info = json.loads(file.read(size))["model.norm.weight"]
        width = {"BF16": 2, "F32": 4}[info["dtype"]]
        file.seek(info["data_offsets"][0], 1)
        raw = file.read(width * count)
    words = [raw[start : start + width] for start in range(0, len(raw), width)]
    # A bfloat16 is the upper half of a float.
    return [struct.unpack("<f", word.rjust(4, b"\0"))[0] for word in words]
