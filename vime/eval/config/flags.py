"""Every flag that vime defines or reads, as data: parser, config and docs are made from it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vime.eval.paths import LOOP, is_link_loop
from vime.limits import EMPTY, LARGEST, LARGEST_64_BIT, LONGEST, LONGEST_S


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
        maximum: the greatest; whole numbers have :data:`vime.limits.LARGEST` unless it is said.
        kind: what a text is: ``path`` and ``dotted path`` cannot be empty.
    """

    name: str
    default: Any
    help: str
    parse: Callable[[str], Any] = str
    many: bool = False
    choices: tuple[str, ...] | None = None
    group: str = "evaluation"
    minimum: float | None = None
    maximum: float | None = None
    kind: str = "text"

    @property
    def dest(self) -> str:
        """The attribute of the parsed namespace."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def expected(self) -> str:
        """What its values are, for messages."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kinds: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}
        kind = kinds.get(self.parse, "a value")
        if self.parse not in (int, float):
            return kind
        bounds = [] if self.minimum is None else [f"at least {self.minimum}"]
        if self.maximum == LONGEST_S:
            bounds.append(f"at most {LONGEST}")
        elif self._greatest < sys.float_info.max:
            bounds.append(f"at most {self._greatest}")
        return f"{kind} of {' and '.join(bounds)}" if bounds else kind

    @property
    def _greatest(self) -> float:
        """Nothing is infinite, and no float beyond the largest."""
        if self.maximum is not None:
            return self.maximum
        return LARGEST if self.parse is int else sys.float_info.max

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, as the end of a sentence; ``None`` when nothing is.

        Frameworks have flags of these names for what is evaluated, and leave them ``None``.
        """
        if value is None:
            is_unset = self.default is None or self.group == _WHAT
            return None if is_unset else f"is None: expected {self.expected}"
        if self.choices:
            fits = value in self.choices
        elif self.parse is bool:
            fits = value in (True, False)
        elif self.parse in (int, float):
            least = -self._greatest if self.minimum is None else self.minimum
            # NaN lies between no two numbers.
            fits = _is_number(value, self.parse) and least <= value <= self._greatest
        elif self.group == _FRAME and (self.many or not isinstance(value, str)):
            fits = True  # the framework's own, and only looked at
        elif self.many:
            return _words_problem(value)
        else:
            return _text_problem(value) or self._empty_problem(value)
        return None if fits else f"{shown(value)}: expected {self.expected}"

    def _empty_problem(self, value: Any) -> str | None:
        if self.kind == "text" or str(value):
            return None
        return f"{value!r}: expected a {self.kind}, {EMPTY}"

    def place_problem(self, value: Any) -> str | None:
        """What is wrong with where a path leads; asks the file system."""
        if self.kind != "path" or not isinstance(value, (str, os.PathLike)):
            return None
        return f"{value}: {LOOP}" if is_link_loop(value) else None

    def read(self, word: str) -> Any:
        """The value of one word; one that cannot be read stays a word, for the validation to name.

        So that all problems of a command line are reported together, not the first alone.
        """
        try:
            return self.parse(word)
        except ValueError:
            return word


def shown(value: Any) -> str:
    """A value in a message: the beginning of its ``repr``."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number of thousands of digits"


def _words_problem(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        return next((p for word in value if (p := _text_problem(word))), None)
    return f"{value!r:.200}: expected a list of words"


def _text_problem(value: Any) -> str | None:
    """Texts and paths are texts; the operating system takes none with a NUL in it."""
    if not isinstance(value, (str, os.PathLike)):
        return f"{value!r:.200}: expected a text"
    return f"{str(value)!r:.200}: expected a text without NUL" if "\0" in str(value) else None


def _is_number(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind is int else isinstance(value, (int, float))


_WHEN = "when and how many"
_WHERE = "engines"
_WHAT = "what is evaluated"
_WAIT = "deadlines"
_FRAME = "read beside these, from the training framework"
_MOST_GPUS = 100_000

FLAGS: tuple[Flag, ...] = (
    Flag("--eval-config", None, "YAML file with any of these flags, named without dashes in front, and with settings for each eval set; the command line wins.", group=_WHAT, kind="path"),
    Flag("--eval-num-gpus", 0, "Size of the dedicated eval fleet in GPUs (on a CPU-only machine: in ranks). 0 keeps shared-engine eval.", int, group=_WHERE, minimum=0, maximum=_MOST_GPUS),
    Flag("--eval-num-gpus-per-engine", 1, "GPUs per eval engine: its tensor-parallel size.", int, group=_WHERE, minimum=1, maximum=_MOST_GPUS),
    Flag("--eval-min-engines", None, "Evaluate a point on so many engines, or more, once they have proven its weights; a missing one joins when it has come back and has proven them too. Default: a point waits for all of them.", int, group=_WHERE, minimum=1, maximum=_MOST_GPUS),
    Flag("--eval-engine-max-restarts", 3, "How often an engine is started again without a successful pin in between, before it stays down.", int, group=_WHERE, minimum=0),
    Flag("--eval-verify", "full", "What proves that an engine has a snapshot's weights: full compares digests of all their bytes, as written and as loaded; headers only names, types, shapes and the files' sizes and times, and trusts the disk.", choices=("full", "headers"), group=_WHERE),
    Flag("--eval-detached", False, "On a Ray cluster: leave the engines running when the driver ends; the next driver with the same engine settings takes them over.", bool, group=_WHERE),
    Flag("--eval-hf-dir", None, "Staging directory; each snapshot is {eval_hf_dir}/step_{rollout_id} (tmpfs recommended). Required for snapshot eval; requires --eval-interval.", group=_WHERE, kind="path"),
    Flag("--eval-max-in-flight", 2, "Most evals pending at once.", int, group=_WHEN, minimum=1),
    Flag("--eval-overflow-policy", "backpressure", "What happens at the limit: backpressure awaits the oldest pending eval, skip drops the new point and logs eval/skipped_busy, latest drops the oldest pending one that has not begun to run and logs eval/skipped_superseded (the new one as busy if all have begun). A forced point is dropped by none of them.", choices=("backpressure", "skip", "latest"), group=_WHEN),
    Flag("--eval-keep-snapshots", 2, "Snapshot directories kept under --eval-hf-dir before garbage collection.", int, group=_WHEN, minimum=0),
    Flag("--eval-max-captures", 2, "Copies of the weights that host memory may hold at once: one that is being captured beside those that are being written. A dispatch waits for one of them when all are in use.", int, group=_WHEN, minimum=1),
    Flag("--eval-max-shard-size", "5GB", "Most bytes of one weight file of a snapshot (5GB, 512MiB, ...); a larger model has several, and an index.", group=_WHEN),
    Flag("--eval-interval", None, "Evaluate every so many training steps.", int, group=_WHEN, minimum=1),
    Flag("--eval-function-path", None, "Dotted path of a CheckpointEvalFn subclass, to evaluate snapshots on a backend of your own; with --eval-num-gpus, of a function or a class with __call__ that generates on the fleet.", group=_WHAT, kind="dotted path"),
    Flag("--eval-prompt-data", None, "Eval sets as pairs: NAME PATH [NAME PATH ...]; NAME@N takes the first N examples. PATH is JSON lines, JSON, Parquet, a directory of such files, or what datasets.save_to_disk wrote.", many=True, group=_WHAT),
    Flag("--eval-input-key", "input", "Key of the prompt in a line of an eval set.", group=_WHAT),
    Flag("--eval-label-key", "label", "Key of the right answer in a line of an eval set.", group=_WHAT),
    Flag("--n-samples-per-eval-prompt", 1, "Answers generated for each prompt.", int, group=_WHAT, minimum=1),
    Flag("--eval-temperature", 0.0, "Sampling temperature; 0 is greedy.", float, group=_WHAT, minimum=0, maximum=100),
    Flag("--eval-top-p", 1.0, "Nucleus sampling: the probability mass kept, above 0 and at most 1.", float, group=_WHAT, minimum=0),
    Flag("--eval-max-response-len", 256, "Most tokens of an answer.", int, group=_WHAT, minimum=1),
    Flag("--eval-max-prompt-len", None, "Most tokens of a prompt; what becomes of a longer one, --eval-overlong-prompt says.", int, group=_WHAT, minimum=1),
    Flag("--eval-overlong-prompt", "fail", "A prompt beyond --eval-max-prompt-len: fail counts it with reward 0, cut keeps its last tokens, skip leaves it out of every mean; all are counted.", choices=("fail", "cut", "skip"), group=_WHAT),
    Flag("--apply-chat-template", False, "Put text prompts through the tokenizer's chat template, as one user message; chat messages always go through it.", bool, group=_WHAT),
    Flag("--eval-system-prompt", None, "System message in front of chat prompts that have none.", group=_WHAT),
    Flag("--eval-reward", "exact", "What an answer is worth: exact (match), choice (letter), numeric (last number), f1 (words), regex (the label is a pattern), math (math-verify).", choices=("exact", "choice", "numeric", "f1", "regex", "math"), group=_WHAT),
    Flag("--custom-rm-path", None, "Dotted path of a reward function (answer, label) -> number, in place of --eval-reward.", group=_WHAT, kind="dotted path"),
    Flag("--eval-reward-key", None, "Which number counts, where the reward function returns a mapping of several.", group=_WHAT),
    Flag("--eval-reward-batch-size", 1, "Above 1 the reward function is batched: (answers, labels) -> numbers, for up to so many answers at once.", int, group=_WHAT, minimum=1),
    Flag("--eval-seed", 0, "Seed of the sampling; each prompt and sample derives its own.", int, group=_WHAT, maximum=LARGEST_64_BIT),
    Flag("--eval-concurrency", 64, "Generation requests of one eval that are in flight at once.", int, group=_WHAT, minimum=1),
    Flag("--eval-export-timeout", 600.0, "Seconds that capturing, writing and verifying a snapshot may take; then the point is skipped as timeout_export.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-pin-timeout", 600.0, "Seconds that pinning the fleet may take, waiting for its engines included; then timeout_pin or unhealthy.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-timeout", 3600.0, "Seconds that one evaluation may run; then timeout_eval.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-start-timeout", 600.0, "Seconds that an engine may take from its start to its first token.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-backpressure-timeout", 3600.0, "Seconds that dispatch may hold training for the oldest pending eval; then the new point is skipped as busy (a forced one waits until a pending one has ended).", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-drain-timeout", 7200.0, "Seconds that drain() waits for the pending points; those left are skipped as cancelled.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-dispose-timeout", 30.0, "Seconds that closing may take before what is left is killed.", float, group=_WAIT, minimum=0.001, maximum=LONGEST_S),
    Flag("--eval-run-dir", None, "Where trace, metrics, samples and logs go (default: runs/<timestamp>).", group=_WHAT, kind="path"),
    Flag("--eval-resume", False, "Go on with the run whose trace is in --eval-run-dir: what it has scored stays, and points that it left pending are evaluated if their snapshot is whole. With no run there, begin one.", bool, group=_WHAT),
    Flag("--eval-vllm-max-model-len", None, "Context length of the eval engines in tokens.", int, group=_WHERE, minimum=1),
    Flag("--eval-vllm-dtype", None, "dtype of the eval engines, as vLLM names it.", group=_WHERE),
    Flag("--eval-vllm-gpu-memory-utilization", None, "Share of each GPU's memory that an eval engine may use.", float, group=_WHERE, minimum=0.01, maximum=1),
    Flag("--eval-vllm-enforce-eager", None, "Run the eval engines without CUDA graphs.", bool, group=_WHERE),
    Flag("--hf-checkpoint", None, "The base checkpoint: engines start from it, and snapshots are checked against it.", group=_FRAME, kind="path"),
    Flag("--save-hf", None, "The framework's own checkpoints; never reused as eval snapshots.", group=_FRAME, kind="path"),
    Flag("--vllm-config", None, "YAML with the engines' layout; must define exactly one model named eval.", group=_FRAME, kind="path"),
    Flag("--prefill-num-servers", None, "Prefill servers of the rollout engines; excludes --eval-num-gpus.", int, group=_FRAME, minimum=0),
    Flag("--rollout-external-engine-addrs", None, "Addresses of external rollout engines; excludes --eval-num-gpus.", many=True, group=_FRAME),
    Flag("--colocate", False, "Trainer and rollout engines share their GPUs.", bool, group=_FRAME),
    Flag("--ci-test", False, "Any skipped eval point fails the run.", bool, group=_FRAME),
)  # fmt: skip

BY_DEST = {flag.dest: flag for flag in FLAGS}


def value_of(args: argparse.Namespace) -> Callable[[str], Any]:
    """Reads a flag's value from a namespace that may lack some, or leave it unset: its default."""

    def get(dest: str) -> Any:
        value = getattr(args, dest, None)
        return BY_DEST[dest].default if value is None else value

    return get
