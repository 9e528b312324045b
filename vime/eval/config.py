"""Validation of the flags, all problems at once, and the one frozen config made of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.eval.flags import BY_DEST, FLAGS, Flag


class ConfigError(ValueError):
    """One or more flags are wrong; ``problems`` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class EvalConfig:
    """Every setting of an evaluation, validated; times are in seconds.

    Made by :meth:`from_args`; see ``docs/flags.md`` for each field's meaning.
    """

    num_gpus: int = 0
    num_gpus_per_engine: int = 1
    hf_dir: Path | None = None
    max_in_flight: int = 2
    overflow_policy: str = "backpressure"
    keep_snapshots: int = 2
    interval: int | None = None
    function_path: str | None = None
    prompt_data: tuple[tuple[str, Path], ...] = ()
    input_key: str = "input"
    label_key: str = "label"
    n_samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_len: int = 256
    custom_rm_path: str | None = None
    seed: int = 0
    concurrency: int = 64
    export_timeout_s: float = 600.0
    pin_timeout_s: float = 600.0
    eval_timeout_s: float = 3600.0
    start_timeout_s: float = 600.0
    backpressure_timeout_s: float = 3600.0
    drain_timeout_s: float = 7200.0
    dispose_timeout_s: float = 30.0
    hf_checkpoint: Path | None = None
    ci_test: bool = False
    run_dir: Path | None = None
    vllm: dict[str, Any] = field(default_factory=dict)
    uses_snapshots: bool = False

    @property
    def num_engines(self) -> int:
        """How many engines the fleet has."""
        return self.num_gpus // self.num_gpus_per_engine

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvalConfig:
        """Validate ``args`` and freeze what they say.

        Raises:
            ConfigError: naming every wrong flag with its value and the remedy.
        """
        from vime.eval.layout import eval_group

        validate_eval_args(args)
        get = _getter(args)
        pairs = get("eval_prompt_data") or []
        group = eval_group(args)
        return cls(
            num_gpus=get("eval_num_gpus"),
            num_gpus_per_engine=(
                get("eval_num_gpus_per_engine") if group is None else group.num_gpus_per_engine
            ),
            hf_dir=_path(get("eval_hf_dir")),
            max_in_flight=get("eval_max_in_flight"),
            overflow_policy=get("eval_overflow_policy"),
            keep_snapshots=get("eval_keep_snapshots"),
            interval=get("eval_interval"),
            function_path=get("eval_function_path"),
            prompt_data=tuple(
                (name, Path(path)) for name, path in zip(pairs[::2], pairs[1::2], strict=True)
            ),
            input_key=get("eval_input_key"),
            label_key=get("eval_label_key"),
            n_samples_per_prompt=get("n_samples_per_eval_prompt"),
            temperature=get("eval_temperature"),
            top_p=get("eval_top_p"),
            max_response_len=get("eval_max_response_len"),
            custom_rm_path=get("custom_rm_path"),
            seed=get("eval_seed"),
            concurrency=get("eval_concurrency"),
            export_timeout_s=get("eval_export_timeout"),
            pin_timeout_s=get("eval_pin_timeout"),
            eval_timeout_s=get("eval_timeout"),
            start_timeout_s=get("eval_start_timeout"),
            backpressure_timeout_s=get("eval_backpressure_timeout"),
            drain_timeout_s=get("eval_drain_timeout"),
            dispose_timeout_s=get("eval_dispose_timeout"),
            hf_checkpoint=_path(get("hf_checkpoint")),
            ci_test=get("ci_test"),
            run_dir=_path(get("eval_run_dir")),
            vllm={} if group is None else dict(group.settings),
            uses_snapshots=args.eval_uses_snapshots,
        )


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def _getter(args: argparse.Namespace) -> Any:
    """Reads a flag's value from a namespace that may lack some: then its default."""
    return lambda dest: getattr(args, dest, BY_DEST[dest].default)


def validate_eval_args(args: argparse.Namespace) -> None:
    """Check every eval flag of ``args`` and set ``args.eval_uses_snapshots``.

    Works on any namespace, also one that another framework made: what is missing has its
    default.

    Raises:
        ConfigError: naming every wrong flag with its value and the remedy.
    """
    problems = _value_problems(args)
    if not problems:  # rules between flags read their values, which must be sound first
        problems = [*_fleet_problems(args), *_snapshot_problems(args), *_data_problems(args)]
    if problems:
        raise ConfigError(problems)
    get = _getter(args)
    args.eval_uses_snapshots = bool(get("eval_num_gpus") or _names_checkpoint_fn(args))


def _value_problems(args: argparse.Namespace) -> list[str]:
    """Each flag by itself: its type, its choices, its least value."""
    problems = []
    for flag in FLAGS:
        value = getattr(args, flag.dest, flag.default)
        if value is None:
            if flag.default is not None:
                problems.append(f"{flag.name} is None: expected {_expected(flag)}")
            continue
        if flag.choices and value not in flag.choices:
            problems.append(f"{flag.name} {value!r}: expected one of {', '.join(flag.choices)}")
        elif flag.parse in (int, float) and not _is_fit(value, flag):
            problems.append(f"{flag.name} {value!r}: expected {_expected(flag)}")
    return problems


def _is_fit(value: Any, flag: Flag) -> bool:
    """Whether a number has the flag's type and is not below its minimum (NaN is)."""
    return _is_number(value, flag.parse) and (flag.minimum is None or value >= flag.minimum)


def _is_number(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind is int else isinstance(value, (int, float))


def _expected(flag: Flag) -> str:
    kind = (
        "a whole number" if flag.parse is int else "a number" if flag.parse is float else "a value"
    )
    return kind if flag.minimum is None else f"{kind} of at least {flag.minimum}"


def _names_checkpoint_fn(args: argparse.Namespace) -> bool:
    """Whether ``--eval-function-path`` names a CheckpointEvalFn; imports the user's module.

    Raises:
        ValueError: it cannot be imported, or is nothing that evaluates.
    """
    path = getattr(args, "eval_function_path", None)
    if not path:
        return False
    from vime.eval.loading import eval_function_problem, load_object
    from vime.rollout.checkpoint_eval import is_checkpoint_eval_fn

    found = load_object("--eval-function-path", path)
    problem = eval_function_problem(found)
    if problem:
        raise ValueError(f"--eval-function-path {path}: {problem}")
    return is_checkpoint_eval_fn(found)


def _fleet_problems(args: argparse.Namespace) -> list[str]:
    get = _getter(args)
    gpus, per_engine = get("eval_num_gpus"), get("eval_num_gpus_per_engine")
    if not gpus:
        return []
    problems = []
    sized = get("vllm_config") or gpus % per_engine == 0  # with a YAML, the sizes are its own
    if not sized:
        problems.append(
            f"--eval-num-gpus {gpus} is no multiple of --eval-num-gpus-per-engine {per_engine}: "
            "every engine needs its full tensor-parallel size"
        )
    if get("rollout_external_engine_addrs"):
        problems.append(
            f"--eval-num-gpus {gpus} together with --rollout-external-engine-addrs: a fleet "
            "cannot be placed beside external rollout engines; drop one of the two"
        )
    if get("prefill_num_servers"):
        problems.append(
            f"--eval-num-gpus {gpus} together with --prefill-num-servers "
            f"{get('prefill_num_servers')}: the eval fleet has no prefill servers; drop one"
        )
    if not get("hf_checkpoint"):
        problems.append(
            f"--eval-num-gpus {gpus} needs --hf-checkpoint DIR: engines start from it, and "
            "every snapshot is checked against it"
        )
    elif not Path(get("hf_checkpoint"), "config.json").is_file():
        problems.append(
            f"--hf-checkpoint {get('hf_checkpoint')}: no config.json there; expected a Hugging "
            "Face checkpoint directory"
        )
    if sized:
        problems += _layout_problems(args)
    return problems


def _layout_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the engines' settings, and with the YAML's models where there is one."""
    from vime.eval.layout import eval_group

    try:
        eval_group(args)
    except ConfigError as error:
        return error.problems
    return []


def _snapshot_problems(args: argparse.Namespace) -> list[str]:
    get = _getter(args)
    problems = []
    try:
        backend = _names_checkpoint_fn(args)
    except ValueError as error:
        return [str(error)]
    if backend and get("eval_num_gpus"):
        problems.append(
            f"--eval-function-path {get('eval_function_path')} is a CheckpointEvalFn and "
            f"--eval-num-gpus is {get('eval_num_gpus')}: a backend of your own and a fleet "
            "exclude each other; drop one"
        )
    if (backend or get("eval_num_gpus")) and not get("eval_hf_dir"):
        problems.append(
            "--eval-hf-dir is missing: snapshot eval (a fleet or a CheckpointEvalFn) needs a "
            "staging directory, on a tmpfs such as /dev/shm if it fits"
        )
    if get("eval_hf_dir") and not get("eval_interval"):
        problems.append(f"--eval-hf-dir {get('eval_hf_dir')} requires --eval-interval N")
    if get("eval_hf_dir") and get("save_hf"):
        staging, saved = Path(get("eval_hf_dir")).resolve(), Path(get("save_hf")).resolve()
        if staging == saved or staging in saved.parents or saved in staging.parents:
            problems.append(
                f"--eval-hf-dir {staging} and --save-hf {saved} overlap: snapshots are deleted "
                "by vime and checkpoints must not be; choose another directory"
            )
    return problems


def _data_problems(args: argparse.Namespace) -> list[str]:
    get = _getter(args)
    problems = []
    if get("eval_top_p") > 1 or get("eval_top_p") <= 0:
        problems.append(f"--eval-top-p {get('eval_top_p')}: expected above 0 and at most 1")
    pairs = get("eval_prompt_data") or []
    if get("eval_num_gpus") and not pairs and not get("eval_function_path"):
        problems.append(
            f"--eval-num-gpus {get('eval_num_gpus')} without --eval-prompt-data NAME PATH: "
            "there is nothing to evaluate"
        )
    if len(pairs) % 2:
        return [
            *problems,
            f"--eval-prompt-data {' '.join(map(str, pairs))}: expected NAME PATH pairs",
        ]
    names = pairs[::2]
    problems += [
        f"--eval-prompt-data: the name {n!r} is given twice" for n in {*names} if names.count(n) > 1
    ]
    problems += [
        f"--eval-prompt-data {name} {path}: no such file"
        for name, path in zip(names, pairs[1::2], strict=True)
        if not Path(path).is_file()
    ]
    return problems
