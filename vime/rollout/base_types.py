"""Inputs and outputs of eval functions, with the names that RL frameworks use."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What an eval function's constructor receives.

    Attributes:
        args: the run's arguments; a copy that belongs to the function.
        data_source: the framework's prompt source; ``None`` for eval functions.
    """

    args: Namespace
    data_source: Any = None


@dataclass(frozen=True)
class RolloutFnEvalInput:
    """One call of an eval function.

    Attributes:
        rollout_id: the training step whose weights are evaluated.
    """

    rollout_id: int

    @property
    def evaluation(self) -> bool:
        """Always true: this is no training rollout."""
        return True


@dataclass
class RolloutFnEvalOutput:
    """What an eval function returns.

    Attributes:
        data: dataset name → a dictionary with at least ``rewards`` (a list of floats, one a
            sample); ``truncated`` (a list of booleans), ``response_lengths`` (tokens) and
            ``samples`` are used where they are present.
        metrics: further metrics, name → number; a name without a ``/`` is put under ``eval/``.
    """

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, float] | None = None
