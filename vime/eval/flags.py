"""Every flag that vime defines or reads, as data; parser, config and docs are made from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vime.eval.engine_settings import mirror_engine_flags


@dataclass(frozen=True)
class Flag:
    """One command-line flag.

    Attributes:
        name: with its dashes.
        default: what it is when absent.
        help: one sentence; units in it.
        parse: makes the value of one word; ``bool`` means a switch that takes no word; one whose
            default is ``None`` can also be switched off (``--no-…``).
        many: takes several words.
        choices: the only values that are allowed.
        group: the heading under which the docs and ``--help`` show it.
        minimum: the least allowed number.
    """

    name: str
    default: Any
    help: str
    parse: Callable[[str], Any] = str
    many: bool = False
    choices: tuple[str, ...] | None = None
    group: str = "evaluation"
    minimum: float | None = None

    @property
    def dest(self) -> str:
        """The attribute of the parsed namespace."""
        return self.name.lstrip("-").replace("-", "_")


_WHEN = "when and how many"
_WHERE = "engines"
_WHAT = "what is evaluated"
_WAIT = "deadlines"
_FRAME = "read beside these, from the training framework"

FLAGS: tuple[Flag, ...] = (
    Flag("--eval-num-gpus", 0, "Size of the dedicated eval fleet in GPUs (on a CPU-only machine: in ranks). 0 keeps shared-engine eval.", int, group=_WHERE, minimum=0),
    Flag("--eval-num-gpus-per-engine", 1, "GPUs per eval engine: its tensor-parallel size.", int, group=_WHERE, minimum=1),
    Flag("--eval-hf-dir", None, "Staging directory; each snapshot is {eval_hf_dir}/step_{rollout_id} (tmpfs recommended). Required for snapshot eval; requires --eval-interval.", group=_WHERE),
    Flag("--eval-max-in-flight", 2, "Most evals pending at once.", int, group=_WHEN, minimum=1),
    Flag("--eval-overflow-policy", "backpressure", "What happens at the limit: backpressure awaits the oldest pending eval, skip drops the new point and logs eval/skipped_busy.", choices=("backpressure", "skip"), group=_WHEN),
    Flag("--eval-keep-snapshots", 2, "Snapshot directories kept under --eval-hf-dir before garbage collection.", int, group=_WHEN, minimum=0),
    Flag("--eval-interval", None, "Evaluate every so many training steps.", int, group=_WHEN, minimum=1),
    Flag("--eval-function-path", None, "Dotted path of a CheckpointEvalFn subclass, to evaluate snapshots on a backend of your own; with --eval-num-gpus, of a function or a class with __call__ that generates on the fleet.", group=_WHAT),
    Flag("--eval-prompt-data", None, "Eval sets as pairs: NAME PATH [NAME PATH ...]; JSON lines.", many=True, group=_WHAT),
    Flag("--eval-input-key", "input", "Key of the prompt in a line of an eval set.", group=_WHAT),
    Flag("--eval-label-key", "label", "Key of the right answer in a line of an eval set.", group=_WHAT),
    Flag("--n-samples-per-eval-prompt", 1, "Answers generated for each prompt.", int, group=_WHAT, minimum=1),
    Flag("--eval-temperature", 0.0, "Sampling temperature; 0 is greedy.", float, group=_WHAT, minimum=0),
    Flag("--eval-top-p", 1.0, "Nucleus sampling: the probability mass kept, above 0 and at most 1.", float, group=_WHAT, minimum=0),
    Flag("--eval-max-response-len", 256, "Most tokens of an answer.", int, group=_WHAT, minimum=1),
    Flag("--custom-rm-path", None, "Dotted path of a reward function (answer, label) -> number; exact match without it.", group=_WHAT),
    Flag("--eval-seed", 0, "Seed of the sampling; each prompt and sample derives its own.", int, group=_WHAT),
    Flag("--eval-concurrency", 64, "Generation requests of one eval that are in flight at once.", int, group=_WHAT, minimum=1),
    Flag("--eval-export-timeout", 600.0, "Seconds that capturing, writing and verifying a snapshot may take; then the point is skipped as timeout_export.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-pin-timeout", 600.0, "Seconds that pinning the fleet may take, waiting for its engines included; then timeout_pin or unhealthy.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-timeout", 3600.0, "Seconds that one evaluation may run; then timeout_eval.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-start-timeout", 600.0, "Seconds that an engine may take from its start to its first token.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-backpressure-timeout", 3600.0, "Seconds that dispatch may hold training for the oldest pending eval; then the new point is skipped as busy (a forced one waits until a pending one has ended).", float, group=_WAIT, minimum=0.001),
    Flag("--eval-drain-timeout", 7200.0, "Seconds that drain() waits for the pending points; those left are skipped as cancelled.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-dispose-timeout", 30.0, "Seconds that closing may take before what is left is killed.", float, group=_WAIT, minimum=0.001),
    Flag("--eval-run-dir", None, "Where trace, metrics, samples and logs go (default: runs/<timestamp>).", group=_WHAT),
    Flag("--eval-vllm-max-model-len", None, "Context length of the eval engines in tokens.", int, group=_WHERE, minimum=1),
    Flag("--eval-vllm-dtype", None, "dtype of the eval engines, as vLLM names it.", group=_WHERE),
    Flag("--eval-vllm-gpu-memory-utilization", None, "Share of each GPU's memory that an eval engine may use.", float, group=_WHERE, minimum=0.01),
    Flag("--eval-vllm-enforce-eager", None, "Run the eval engines without CUDA graphs.", bool, group=_WHERE),
    Flag("--hf-checkpoint", None, "The base checkpoint: engines start from it, and snapshots are checked against it.", group=_FRAME),
    Flag("--save-hf", None, "The framework's own checkpoints; never reused as eval snapshots.", group=_FRAME),
    Flag("--vllm-config", None, "YAML with the engines' layout; must define exactly one model named eval.", group=_FRAME),
    Flag("--prefill-num-servers", None, "Prefill servers of the rollout engines; excludes --eval-num-gpus.", int, group=_FRAME, minimum=1),
    Flag("--rollout-external-engine-addrs", None, "Addresses of external rollout engines; excludes --eval-num-gpus.", many=True, group=_FRAME),
    Flag("--colocate", False, "Trainer and rollout engines share their GPUs.", bool, group=_FRAME),
    Flag("--ci-test", False, "Any skipped eval point fails the run.", bool, group=_FRAME),
)  # fmt: skip

BY_DEST = {flag.dest: flag for flag in FLAGS}


def add_eval_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to ``parser`` that it does not define already; returns ``parser``.

    Call it after the framework has added its own: each ``--vllm-X`` among them gets an
    ``--eval-vllm-X`` as well.
    """
    present = {option for action in parser._actions for option in action.option_strings}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in FLAGS:
        if flag.name in present:
            continue
        group = groups.get(flag.group) or parser.add_argument_group(f"vime: {flag.group}")
        groups[flag.group] = group
        text = flag.help.replace("%", "%%")
        if flag.parse is bool:
            switch = "store_true" if flag.default is False else argparse.BooleanOptionalAction
            group.add_argument(flag.name, action=switch, default=flag.default, help=text)
            continue
        if flag.default not in (None, 0) or flag.minimum == 0:
            text += " (default: %(default)s)"
        group.add_argument(
            flag.name,
            type=flag.parse,
            default=flag.default,
            choices=flag.choices,
            nargs="+" if flag.many else None,
            metavar=_metavar(flag),
            help=text,
        )
    mirror_engine_flags(parser)
    return parser


def _metavar(flag: Flag) -> str | tuple[str, ...] | None:
    if flag.choices:
        return None
    if flag.dest == "eval_prompt_data":
        return ("NAME", "PATH")
    if flag.parse in (int, float):
        return "SECONDS" if flag.name.endswith("-timeout") else "N"
    return flag.dest.rsplit("_", 1)[-1].upper()
