"""Checks what a training loop passes, so that its mistakes are told apart from failed evals."""

from __future__ import annotations

import os
from pathlib import Path

from vime.eval.contracts import EvalPoint

#: The largest number that JSON and the trackers take as a step.
_LAST_STEP = 2**53


def check_step(name: str, step: object) -> None:
    """See that ``step`` is a training step's number.

    Raises:
        ValueError: it is none; ``name`` says which argument.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _LAST_STEP:
        raise ValueError(
            f"{name}={step!r}: expected an integer from 0 to {_LAST_STEP}, the training step's "
            "number"
        )


def checked_point(rollout_id: int, hf_dir: str | Path | None, force: bool) -> EvalPoint:
    """The point that the arguments of ``dispatch`` mean.

    Raises:
        ValueError: no step, or no such directory.
    """
    check_step("rollout_id", rollout_id)
    if hf_dir is None:
        return EvalPoint(rollout_id, None, bool(force))
    if not isinstance(hf_dir, (str, os.PathLike)) or not str(hf_dir):
        raise ValueError(f"hf_dir={hf_dir!r}: expected the path of a Hugging Face checkpoint")
    directory = Path(hf_dir)
    if not directory.is_dir():
        raise ValueError(
            f"hf_dir={str(hf_dir)!r}: no such directory; expected a Hugging Face checkpoint"
        )
    return EvalPoint(rollout_id, directory.absolute(), bool(force))
