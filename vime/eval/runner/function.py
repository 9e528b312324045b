"""Evaluation by a plain eval function on the pinned fleet: the one that a framework has already."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.loading import eval_function_problem, load_object
from vime.eval.runner.backend import backend_metrics, sample_rows
from vime.eval.runner.samples import samples_path, write_samples
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import EvalSkip, retarget_args

#: ``call(args, rollout_id)`` of a function, ``call(input)`` of an instance.
_Call = Callable[..., Any]


class FunctionEvaluation:
    """Has the function of ``--eval-function-path`` evaluate the weights that a fleet serves.

    A class is constructed with a :class:`RolloutFnConstructorInput`, again only when the fleet's
    address has changed, and its instance called with a :class:`RolloutFnEvalInput`. A function
    is called ``function(args, rollout_id, data_source, evaluation=True)``, or
    ``function(args, rollout_id)`` where it takes no more. Either may be a coroutine function;
    what is none runs on a worker thread, and one that does not return by the deadline is ended
    with this process.

    ``args`` is a copy of the run's arguments whose ``vllm_router_ip`` and ``vllm_router_port``
    are the fleet's (:func:`~vime.rollout.checkpoint_eval.retarget_args`). It has three
    attributes more: ``eval_model_name`` (the served model), ``eval_api_key`` (the bearer token
    of the generation routes, or ``None``) and ``eval_weight_version``.

    Args:
        config: ``function_path`` names the function.
        args: the run's arguments.
        run_dir: samples that it returns are written below it.
    """

    def __init__(self, config: EvalConfig, args: Namespace, run_dir: Path) -> None:
        assert config.function_path is not None, "only made for a function"
        self._path = config.function_path
        self._args = args
        self._run_dir = run_dir
        self._made: tuple[tuple[Any, ...], Namespace, Any] | None = None

    async def evaluate(self, point: EvalPoint, snapshot: Snapshot, proof: PinProof) -> EvalOutput:
        """Call the function and turn what it returns into metrics.

        Raises:
            EvalSkip: the function's own; ``version_mixed`` when a sample that it returned names
                other weights than the point's.
            ValueError: it cannot be imported, or returned no score.
            Exception: whatever else the function raises.
        """
        returned = _as_output(await self._call(point, proof))
        metrics = backend_metrics(self._path, returned)
        problem = next(_foreign_weights(returned, proof.weight_version), None)
        if problem is not None:
            raise EvalSkip("version_mixed", f"{self._path}: {problem}")
        rows = list(sample_rows(returned))
        path = None
        if rows:
            path = samples_path(self._run_dir, point, snapshot)
            await anyio.to_thread.run_sync(write_samples, path, rows)
        return EvalOutput(metrics, path, {"eval_function": self._path, "num_samples": len(rows)})

    async def _call(self, point: EvalPoint, proof: PinProof) -> Any:
        found = load_object("--eval-function-path", self._path)
        problem = eval_function_problem(found)
        if problem:
            raise ValueError(f"--eval-function-path {self._path}: {problem}")
        if inspect.isclass(found):
            function = self._instance(found, proof)
            return await _called(function, RolloutFnEvalInput(point.rollout_id))
        args = fleet_args(self._args, proof)
        if takes_two_arguments(found):
            return await _called(found, args, point.rollout_id)
        return await _called(found, args, point.rollout_id, None, evaluation=True)

    def _instance(self, kind: type, proof: PinProof) -> _Call:
        """The instance that was made for this fleet; its arguments name the present weights."""
        fleet = (proof.base_url, proof.model, proof.api_key, len(proof.engines))
        if self._made is None or self._made[0] != fleet:
            args = fleet_args(self._args, proof)
            self._made = (fleet, args, kind(RolloutFnConstructorInput(args)))
        _, args, function = self._made
        args.eval_weight_version = proof.weight_version
        made: _Call = function
        return made


def fleet_args(args: Namespace, proof: PinProof) -> Namespace:
    """A copy of the run's arguments that points at the fleet behind ``proof``."""
    address = urlsplit(proof.base_url)
    assert address.hostname is not None, "a proof has a whole address"
    port = address.port or (443 if address.scheme == "https" else 80)
    counts = [proof.num_gpus_per_engine] * max(len(proof.engines), 1)
    target = retarget_args(args, address.hostname, port, counts)
    target.eval_model_name = proof.model
    target.eval_api_key = proof.api_key
    target.eval_weight_version = proof.weight_version
    return target


def takes_two_arguments(function: Callable[..., Any]) -> bool:
    """Whether a function takes ``(args, rollout_id)`` and not what frameworks pass as well."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it says nothing of its arguments
        return False
    try:
        signature.bind(None, 0, None, evaluation=True)
    except TypeError:
        return True
    return False


async def _called(function: _Call, *args: Any, **named: Any) -> Any:
    """The function's result; a plain one runs on a thread, which nobody can abandon."""
    call = getattr(function, "__call__", function)  # noqa: B004 -- asks what kind of call it is
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(*args, **named)
    result = await anyio.to_thread.run_sync(functools.partial(function, *args, **named))
    return await result if inspect.isawaitable(result) else result


def _as_output(returned: Any) -> Any:
    """Older eval functions return the dictionary of sets alone; frameworks have own classes."""
    if isinstance(returned, RolloutFnEvalOutput):
        return returned
    if isinstance(returned, Mapping):
        return RolloutFnEvalOutput(dict(returned))
    if isinstance(getattr(returned, "data", None), Mapping):
        return RolloutFnEvalOutput(dict(returned.data), getattr(returned, "metrics", None))
    return returned


def _foreign_weights(returned: RolloutFnEvalOutput, expected: str) -> Iterator[str]:
    """One sentence for each sample that says itself that other weights produced it."""
    for name, data in returned.data.items():
        samples = [*(data.get("samples") or ())]
        for index, sample in enumerate(samples):
            for version in _versions(sample):
                if version != expected:
                    yield (
                        f"sample {index} of {name} was generated by weights {version!r}; "
                        f"expected {expected!r}"
                    )


def _versions(sample: Any) -> Sequence[Any]:
    get = sample.get if isinstance(sample, Mapping) else functools.partial(_attribute, sample)
    many = get("weight_versions")
    if isinstance(many, Sequence) and not isinstance(many, str):
        return [v.get("version") if isinstance(v, Mapping) else v for v in many]
    one = get("weight_version")
    return [] if one is None else [one]


def _attribute(sample: Any, name: str) -> Any:
    return getattr(sample, name, None)
