"""What a training run needs to go on exactly where it was: its state and its flags, on disk."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from vime.eval import ConfigError

if TYPE_CHECKING:
    from grpo import Trainer

STATE, FLAGS = "training_state.pt", "flags.json"


class Progress(NamedTuple):
    """How far training has come: finished steps, and the seconds that they took."""

    step: int = 0
    wall_s: float = 0.0


def save_state(run_dir: Path, trainer: Trainer, progress: Progress) -> None:
    """Save the state whole, or leave the one before: also when killed half-way.

    Raises:
        OSError: it cannot be written.
    """
    import torch

    content = {"trainer": trainer.state_dict(), "progress": tuple(progress)}
    replace(run_dir / STATE, lambda file: torch.save(content, file))


def load_state(run_dir: Path, trainer: Trainer) -> Progress:
    """Bring the trainer to the saved state; what was never saved is step 0.

    Raises:
        ConfigError: it cannot be read, or is of another training.
    """
    import torch

    path = run_dir / STATE
    if not path.exists():
        return Progress()
    try:
        content = torch.load(path, weights_only=True)
        trainer.load_state_dict(content["trainer"])
        return Progress(*content["progress"])
    except (OSError, ValueError, LookupError, RuntimeError, UnpicklingError) as error:
        message = f"--resume {run_dir}: {path} cannot be gone on from: {error}"
        raise ConfigError([message]) from error


def save_flags(run_dir: Path, args: argparse.Namespace) -> None:
    """Save the flags, so that ``--resume`` needs no others.

    Raises:
        OSError: they cannot be written.
    """
    text = json.dumps(vars(args) | {"resume": None}, indent=1)
    replace(run_dir / FLAGS, lambda file: file.write(text.encode()))


def load_flags(run_dir: Path) -> dict[str, Any]:
    """The flags of the run in ``run_dir``, as defaults for those of the command line.

    Raises:
        ConfigError: there are none.
    """
    try:
        flags: dict[str, Any] = json.loads((run_dir / FLAGS).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"--resume {run_dir}: no run to go on with: {error}"]) from None
    return flags | {"eval_run_dir": str(run_dir), "eval_resume": True}


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside ``path``, flush, and rename."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
