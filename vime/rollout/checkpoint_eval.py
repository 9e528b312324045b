"""The contract for evaluating a snapshot on a backend that the user owns."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)

_MAX_REASON = 100


class EvalSkip(Exception):
    """Raise it to skip an eval point and say why.

    Args:
        reason: a short name, logged as the metric ``eval/skipped_<reason>``.
        detail: a sentence for people: which thing, which value, what was expected. Of a longer
            one than 10,000 characters the beginning and the end are told.

    Attributes:
        cause_seq: the trace record that made it happen, where vime knows it.

    Raises:
        ValueError: the reason is empty, longer than 100 characters, or not made of letters,
            digits, ``_``, ``-`` and ``.``.
    """

    cause_seq: int | None = None

    def __init__(self, reason: str, detail: str = "") -> None:
        if not 0 < len(reason) <= _MAX_REASON or not all(c.isalnum() or c in "_-." for c in reason):
            raise ValueError(
                f"EvalSkip reason {reason!r:.200}: expected at most {_MAX_REASON} letters, digits, "
                "'_', '-' and '.' (it becomes part of a metric's name); put sentences into detail="
            )
        detail = str(detail)  # an exception, say
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class CheckpointEvalFn(ABC):
    """Evaluates finished checkpoint directories; name a subclass in ``--eval-function-path``.

    An instance lives in the EvalRunner process for as long as that process does. What it
    raises skips the point as ``crashed``; :class:`EvalSkip` skips it with a reason of its own.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args

    @abstractmethod
    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        """Score the whole, verified Hugging Face checkpoint in ``checkpoint_dir``.

        The directory stays readable until this returns, and must not be written to.
        """

    async def dispose(self) -> None:  # noqa: B027 -- optional by contract
        """Let go of whatever the backend holds; called once, before the process ends."""


def is_checkpoint_eval_fn(obj: Any) -> bool:
    """Whether ``obj`` is a concrete subclass of :class:`CheckpointEvalFn`."""
    return (
        inspect.isclass(obj) and issubclass(obj, CheckpointEvalFn) and not inspect.isabstract(obj)
    )


def retarget_args(
    args: Namespace, router_ip: str, router_port: int, engine_gpu_counts: Sequence[int]
) -> Namespace:
    """A copy of ``args`` that points the stock eval datasets at a vLLM router.

    Args:
        args: the run's arguments; left untouched.
        router_ip: address of a vllm-router, or of a single vLLM server.
        router_port: its port, 1 to 65535.
        engine_gpu_counts: number of GPUs of each engine behind it, one entry an engine.

    Returns:
        A namespace with ``vllm_router_ip``, ``vllm_router_port``, ``rollout_num_gpus`` (the
        sum), ``rollout_num_engines`` and ``rollout_num_gpus_per_engine`` (when all are equal).

    Raises:
        ValueError: a port out of range, or an empty or non-positive list of counts.
    """
    counts = [int(n) for n in engine_gpu_counts]
    if not 1 <= int(router_port) <= 65535:
        raise ValueError(f"router_port={router_port!r}: expected a port from 1 to 65535")
    if not counts or min(counts) < 1:
        raise ValueError(
            f"engine_gpu_counts={engine_gpu_counts!r}: expected one positive number of GPUs "
            "for each engine behind the router"
        )
    target = copy.deepcopy(args)
    target.vllm_router_ip = router_ip
    target.vllm_router_port = int(router_port)
    target.rollout_num_gpus = sum(counts)
    target.rollout_num_engines = len(counts)
    if len(set(counts)) == 1:
        target.rollout_num_gpus_per_engine = counts[0]
    return target
