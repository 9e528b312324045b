"""Evaluates snapshots with tasks of lm-evaluation-harness, on a fleet or on a server of your own.

On vime's fleet, as a plain eval function::

    PYTHONPATH=examples LM_EVAL_TASKS=sums_choice,sums_generate python train.py \
        --eval-num-gpus 2 --eval-function-path eval.lm_eval_fn.evaluate …

On a vLLM server of your own, as a ``CheckpointEvalFn`` (see :mod:`eval.external_vllm_eval_fn`)::

    … --eval-function-path eval.lm_eval_fn.LmEvalFn

``LM_EVAL_TASKS`` (or ``args.lm_eval_tasks``) names the tasks, separated by commas.
``LM_EVAL_TASK_DIR`` (or ``args.lm_eval_task_dir``) is the directory with their YAML files; the one
beside this file if absent, and those that the harness brings if empty (their data is downloaded).
It needs the package ``lm_eval``.

Each metric lands as ``eval/TASK/METRIC``, its standard error as ``eval/TASK/METRIC/stderr``.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
from eval.external_vllm_eval_fn import ExternalVllmEvalFn
from eval.lm_eval_model import make_lm, open_asker

from vime.eval.contracts import PinProof, Snapshot
from vime.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalOutput

TASK_DIR = Path(__file__).with_name("lm_tasks")
_BOOTSTRAPS = 1000
_SEED = 0


class LmEvalFn(ExternalVllmEvalFn):
    """Pins a vLLM server to each checkpoint, and runs the harness's tasks on it.

    Raises:
        ValueError: no task is named.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        super().__init__(input)
        self._tasks = task_names(self.args)

    async def evaluate_pinned(
        self, rollout_id: int, snapshot: Snapshot, proof: PinProof
    ) -> RolloutFnEvalOutput:
        """Run the tasks; the tokenizer is the snapshot's own."""
        del rollout_id  # the same tasks at every step
        return await run_tasks(self.args, proof, snapshot.path, self._tasks)


async def evaluate(args: Namespace, rollout_id: int) -> RolloutFnEvalOutput:
    """Run the tasks on the fleet that ``args`` points at; the tokenizer is the base's.

    Args:
        args: of the run, pointed at the fleet by vime.
        rollout_id: the training step.

    Raises:
        EvalSkip: ``version_mixed`` or ``unhealthy``.
        ValueError: no task is named, or a request does not fit the engines.
    """
    del rollout_id
    proof = PinProof(
        base_url=f"http://{args.vllm_router_ip}:{args.vllm_router_port}",
        model=args.eval_model_name,
        weight_version=args.eval_weight_version,
        api_key=args.eval_api_key,
    )
    return await run_tasks(args, proof, Path(args.hf_checkpoint), task_names(args))


async def run_tasks(
    args: Namespace, proof: PinProof, tokenizer_dir: Path, tasks: list[str]
) -> RolloutFnEvalOutput:
    """Run tasks against what ``proof`` names, on a worker thread."""
    max_length = getattr(args, "eval_vllm_max_model_len", None)
    async with open_asker(proof, getattr(args, "eval_concurrency", 64)) as asker:

        def run() -> dict[str, Any]:
            from lm_eval import simple_evaluate
            from lm_eval.tasks import TaskManager
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
            directory = task_dir(args)
            results: dict[str, Any] = simple_evaluate(
                make_lm(asker, tokenizer, max_length),
                tasks=list(tasks),
                task_manager=TaskManager(
                    include_path=directory, include_defaults=directory is None
                ),
                bootstrap_iters=_BOOTSTRAPS,
                random_seed=_SEED,
                numpy_random_seed=_SEED,
                torch_random_seed=_SEED,
                fewshot_random_seed=_SEED,
            )
            return results

        return as_output(await anyio.to_thread.run_sync(run))


def task_names(args: Namespace) -> list[str]:
    """The tasks that ``args.lm_eval_tasks`` or ``LM_EVAL_TASKS`` names.

    Raises:
        ValueError: none, or there is no harness to run them.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval, which runs the tasks, is not installed: pip install lm_eval")
    named = getattr(args, "lm_eval_tasks", None) or os.environ.get("LM_EVAL_TASKS", "")
    names = [name.strip() for name in named.split(",") if name.strip()]
    if not names:
        raise ValueError(f"LM_EVAL_TASKS={named!r}: expected names of tasks, with commas between")
    return names


def task_dir(args: Namespace) -> str | None:
    """Where the tasks' YAML files are; ``None`` for the harness's own."""
    default = os.environ.get("LM_EVAL_TASK_DIR", str(TASK_DIR))
    directory = getattr(args, "lm_eval_task_dir", None)
    return (default if directory is None else directory) or None


def as_output(results: dict[str, Any]) -> RolloutFnEvalOutput:
    """The harness's results, as an eval function returns them.

    Args:
        results: ``results[task]["METRIC,FILTER"]``, ``…["METRIC_stderr,FILTER"]`` (a number, or
            ``"N/A"``), and ``samples[task]``.
    """
    metrics: dict[str, float] = {}
    for task, found in results["results"].items():
        for key, value in found.items():
            if isinstance(value, (int, float)) and "," in key:
                metrics[_metric_name(task, key)] = float(value)
    data = {}
    for task, samples in (results.get("samples") or {}).items():
        metric = next(_scored_by(samples), None)
        if metric is not None:  # the mean of its first metric is the task's score
            rewards = [float(sample[metric]) for sample in samples]
            data[task] = {"rewards": rewards, "samples": [_row(sample) for sample in samples]}
    return RolloutFnEvalOutput(data, metrics)


def _metric_name(task: str, key: str) -> str:
    """``acc_stderr,none`` of ``sums`` → ``eval/sums/acc/stderr``."""
    metric, _, chosen = key.partition(",")
    name = metric.removesuffix("_stderr")
    parts = ["eval", task, name, *([] if chosen == "none" else [chosen])]
    return "/".join([*parts, "stderr"] if name != metric else parts)


def _scored_by(samples: list[dict[str, Any]]) -> Iterator[str]:
    """The metrics of which each sample has a number."""
    for metric in samples[0].get("metrics", ()) if samples else ():
        if all(isinstance(sample.get(metric), (int, float)) for sample in samples):
            yield metric


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    kept = ("doc_id", "doc", "target", "resps", "filtered_resps", *sample.get("metrics", ()))
    return {name: sample[name] for name in kept if name in sample}
