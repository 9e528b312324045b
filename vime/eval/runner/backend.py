"""Evaluation on a backend of the user's own: a ``CheckpointEvalFn``, constructed once."""

from __future__ import annotations

import copy
import inspect
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, Snapshot
from vime.eval.loading import load_object
from vime.eval.metric_names import metric_name
from vime.eval.runner.metrics import clustered_stderr
from vime.eval.runner.samples import samples_path, write_samples
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import CheckpointEvalFn, is_checkpoint_eval_fn


class BackendOutputError(ValueError):
    """What the user's function returned cannot be reported."""


class BackendEvaluation:
    """Hands each checkpoint directory to the function that ``--eval-function-path`` names.

    Args:
        config: ``function_path`` names the function.
        args: the run's arguments; the function is given a copy.
        run_dir: samples that it returns are written below it.
    """

    def __init__(self, config: EvalConfig, args: Namespace, run_dir: Path) -> None:
        assert config.function_path is not None, "only made for a function"
        self._path = config.function_path
        self._args = args
        self._run_dir = run_dir
        self._function: CheckpointEvalFn | None = None

    async def evaluate(self, point: EvalPoint, snapshot: Snapshot) -> EvalOutput:
        """Call ``evaluate_checkpoint`` and turn what it returns into metrics.

        Raises:
            EvalSkip: the function's own.
            BackendOutputError: it returned something else than numbers.
            Exception: whatever else the function raises.
        """
        if self._function is None:
            self._function = self._construct()
        returning = self._function.evaluate_checkpoint(
            snapshot.path, RolloutFnEvalInput(point.rollout_id)
        )
        if not inspect.isawaitable(returning):
            raise BackendOutputError(
                f"{self._path}: evaluate_checkpoint returned {type(returning).__name__}, not a "
                "coroutine: declare it async def"
            )
        returned = await returning
        metrics = backend_metrics(self._path, returned)
        rows = list(sample_rows(returned))
        path = None
        if rows:
            path = samples_path(self._run_dir, point, snapshot)
            await anyio.to_thread.run_sync(write_samples, path, rows)
        return EvalOutput(metrics, path, {"eval_function": self._path, "num_samples": len(rows)})

    def _construct(self) -> CheckpointEvalFn:
        found = load_object("--eval-function-path", self._path)
        if not is_checkpoint_eval_fn(found):
            raise ValueError(
                f"--eval-function-path {self._path}: {found!r} is no concrete subclass of "
                "vime.rollout.checkpoint_eval.CheckpointEvalFn"
            )
        function: CheckpointEvalFn = found(RolloutFnConstructorInput(copy.deepcopy(self._args)))
        return function

    async def dispose(self) -> None:
        """Call the function's ``dispose``, once, if it was constructed."""
        function, self._function = self._function, None
        if function is not None:
            disposing: Any = function.dispose()
            if inspect.isawaitable(disposing):
                await disposing


def backend_metrics(function: str, returned: Any) -> dict[str, float]:
    """The metrics of what an eval function returned.

    Each set of ``data`` becomes ``eval/{name}`` (mean reward), ``eval/{name}/stderr`` (each
    sample by itself: the function does not say which share a prompt), and, where the lists
    are there, ``eval/{name}/truncated_ratio`` and ``eval/{name}/response_len/mean``. The
    function's own ``metrics`` come last and may replace them; a name without ``/`` is put
    under ``eval/``. What vime says of each point (``eval/step`` …) nobody can replace.

    Raises:
        BackendOutputError: no :class:`RolloutFnEvalOutput`, nothing in it, no numbers, lists of
            different lengths, or a name that cannot be reported.
    """
    if not isinstance(returned, RolloutFnEvalOutput):
        raise BackendOutputError(
            f"{function} returned {type(returned).__name__}: expected a RolloutFnEvalOutput"
        )
    metrics: dict[str, float] = {}
    for name, data in _mapping(f"{function}: data", returned.data).items():
        metrics |= _set_metrics(function, name, data)
    for key, value in _mapping(f"{function}: metrics", returned.metrics or {}).items():
        metrics[_name(function, key)] = _number(f"{function}: metrics[{key!r}]", value)
    if not metrics:
        raise BackendOutputError(f"{function} returned neither data nor metrics: no score in it")
    return metrics


def _set_metrics(function: str, name: Any, data: Any) -> dict[str, float]:
    """The metrics of one set."""
    where = f"{function}: data[{name!r}]"
    root = _name(function, f"eval/{name}" if str(name).strip() else "")
    rewards = _numbers(where, data, "rewards")
    if not rewards:
        raise BackendOutputError(
            f"{where} has no 'rewards': expected a list with one number a sample"
        )
    metrics = {root: math.fsum(rewards) / len(rewards)}
    error = clustered_stderr(rewards, range(len(rewards)))
    if error is not None:
        metrics[f"{root}/stderr"] = error
    for key, metric in (
        ("truncated", "truncated_ratio"),
        ("response_lengths", "response_len/mean"),
    ):
        values = _numbers(where, data, key)
        if values and len(values) != len(rewards):
            raise BackendOutputError(
                f"{where}[{key!r}] has {len(values)} entries: expected one for each of the "
                f"{len(rewards)} rewards"
            )
        if values:
            metrics[f"{root}/{metric}"] = math.fsum(values) / len(values)
    return metrics


def _mapping(where: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise BackendOutputError(f"{where} is a {type(value).__name__}: expected a dictionary")
    return value


def _name(function: str, name: Any) -> str:
    try:
        if name == "":
            raise ValueError("a set or a metric has an empty name")
        return metric_name(name)
    except ValueError as error:
        raise BackendOutputError(f"{function}: {error}") from None


def _numbers(where: str, data: Any, key: str) -> list[float]:
    if not isinstance(data, Mapping):
        raise BackendOutputError(
            f"{where} is a {type(data).__name__}: expected a dictionary with 'rewards'"
        )
    values = data.get(key)
    try:
        values = [] if values is None else list(values)
    except TypeError:
        raise BackendOutputError(
            f"{where}[{key!r}] is {values!r:.100}: expected a list with one number a sample"
        ) from None
    return [_number(f"{where}[{key!r}][{i}]", value) for i, value in enumerate(values)]


def _number(where: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise BackendOutputError(f"{where} is {value!r:.100}: expected a finite number")
    return number


def sample_rows(returned: RolloutFnEvalOutput) -> Iterator[Mapping[str, Any]]:
    """The samples that the function returned, each with the name of its set."""
    for name, data in returned.data.items():
        for sample in data.get("samples") or ():
            if isinstance(sample, Mapping):
                yield {"dataset": name, **sample}
            else:
                yield {"dataset": name, "sample": sample}
