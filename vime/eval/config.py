"""Validation of the flags, all problems at once, and the one frozen config made of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vime.eval.config_file import read_config_file
from vime.eval.dataset_settings import SETTING_DESTS, DatasetSettings, name_and_count
from vime.eval.flags import BY_DEST, FLAGS


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
    dataset_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    input_key: str = "input"
    label_key: str = "label"
    n_samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_len: int = 256
    max_prompt_len: int | None = None
    overlong_prompt: str = "fail"
    apply_chat_template: bool = False
    system_prompt: str | None = None
    reward: str = "exact"
    custom_rm_path: str | None = None
    reward_key: str | None = None
    reward_batch_size: int = 1
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

    @property
    def datasets(self) -> tuple[DatasetSettings, ...]:
        """The settings of each eval set, in the order of ``prompt_data``."""
        common = {name: getattr(self, name) for name in SETTING_DESTS}
        return tuple(
            DatasetSettings(name, path, **{**common, **self._overrides(name)})
            for name, path in self.prompt_data
        )

    def _overrides(self, name: str) -> dict[str, Any]:
        own = self.dataset_overrides.get(name, {})
        # A set that names its reward does not want the one of all others.
        return {"custom_rm_path": None, **own} if "reward" in own else own

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvalConfig:
        """Validate ``args`` and freeze what they say.

        Raises:
            ConfigError: naming every wrong flag with its value and the remedy.
        """
        from vime.eval.layout import eval_group

        validate_eval_args(args)
        get = _getter(args)
        group = eval_group(args)
        values = {f.name: get(dest) for f in fields(cls) if (dest := _dest(f.name)) is not None}
        prompt_data, overrides = _datasets(args)
        return cls(
            **{
                **values,
                "hf_dir": _path(get("eval_hf_dir")),
                "hf_checkpoint": _path(get("hf_checkpoint")),
                "run_dir": _path(get("eval_run_dir")),
                "num_gpus_per_engine": (
                    values["num_gpus_per_engine"] if group is None else group.num_gpus_per_engine
                ),
                "prompt_data": prompt_data,
                "dataset_overrides": overrides,
            },
            vllm={} if group is None else dict(group.settings),
            uses_snapshots=args.eval_uses_snapshots,
        )


def _dest(field_name: str) -> str | None:
    """The flag of a field; ``None`` for one that is made of several."""
    name = SETTING_DESTS.get(field_name, field_name.removesuffix("_s"))
    return next((dest for dest in (f"eval_{name}", name) if dest in BY_DEST), None)


def _datasets(
    args: argparse.Namespace,
) -> tuple[tuple[tuple[str, Path], ...], dict[str, dict[str, Any]]]:
    """``prompt_data``, and what differs for each set: the YAML's settings, and N of NAME@N."""
    pairs = _getter(args)("eval_prompt_data") or []
    given: dict[str, dict[str, Any]] = getattr(args, "eval_dataset_settings", None) or {}
    sets, overrides = [], {}
    for word, path in zip(pairs[::2], pairs[1::2], strict=True):
        name, take = name_and_count(word)
        sets.append((name, Path(path)))
        own = {**given.get(name, {}), **({} if take is None else {"take": take})}
        if own:
            overrides[name] = own
    return tuple(sets), overrides


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def _getter(args: argparse.Namespace) -> Any:
    """Reads a flag's value from a namespace that may lack some, or leave it unset: its default."""

    def get(dest: str) -> Any:
        value = getattr(args, dest, None)
        return BY_DEST[dest].default if value is None else value

    return get


def validate_eval_args(args: argparse.Namespace) -> None:
    """Check every eval flag of ``args`` and set ``args.eval_uses_snapshots``.

    Works on any namespace, also one that another framework made: what is missing is taken from
    the file of ``--eval-config``, where there is one, or has its default.

    Raises:
        ConfigError: naming every wrong flag with its value and the remedy.
    """
    problems = _file_problems(args)
    wrong = _value_problems(args)
    sound = _without(args, wrong)
    found = [*_fleet_problems(sound), *_snapshot_problems(sound), *_data_problems(sound)]
    # A rule that speaks of a flag whose value is wrong has to wait until that is mended.
    names = [BY_DEST[dest].name for dest in wrong]
    problems += [*wrong.values(), *(p for p in found if not any(n in p for n in names))]
    if problems:
        raise ConfigError(problems)
    get = _getter(args)
    args.eval_uses_snapshots = bool(get("eval_num_gpus") or _names_checkpoint_fn(args))


def _file_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the file of ``--eval-config``; what ``args`` lacks is taken from it."""
    path = getattr(args, "eval_config", None)
    if path is None:
        return []
    file = read_config_file(path)
    for dest, value in file.values.items():
        if not hasattr(args, dest):
            setattr(args, dest, value)
    return file.problems


def _value_problems(args: argparse.Namespace) -> dict[str, str]:
    """Each flag by itself: its type, its choices, its least value."""
    problems = {}
    for flag in FLAGS:
        problem = flag.problem(getattr(args, flag.dest, flag.default))
        if problem:
            problems[flag.dest] = f"{flag.name} {problem}"
    return problems


def _without(args: argparse.Namespace, wrong: Iterable[str]) -> argparse.Namespace:
    """A shallow copy in which the flags with wrong values have their defaults."""
    return argparse.Namespace(**{**vars(args), **{dest: BY_DEST[dest].default for dest in wrong}})


def _missing(args: argparse.Namespace, dest: str) -> str:
    """Says that a flag was not given, and whether its attribute is there at all."""
    said = f"{BY_DEST[dest].name} is missing"
    if hasattr(args, dest):
        return said
    return f"{said} (the namespace has no {dest}; vime.eval.add_eval_arguments adds it)"


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
            f"{_missing(args, 'hf_checkpoint')}: with --eval-num-gpus {gpus} engines start from "
            "it, and every snapshot is checked against it"
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
            f"{_missing(args, 'eval_hf_dir')}: snapshot eval (a fleet or a CheckpointEvalFn) needs "
            "a staging directory, on a tmpfs such as /dev/shm if it fits"
        )
    if get("eval_hf_dir") and not get("eval_interval"):
        problems.append(
            f"--eval-hf-dir {get('eval_hf_dir')} requires --eval-interval N: "
            f"{_missing(args, 'eval_interval')}"
        )
    for flag, other in (("--save-hf", get("save_hf")), ("--hf-checkpoint", get("hf_checkpoint"))):
        if get("eval_hf_dir") and other and _overlap(Path(get("eval_hf_dir")), Path(other)):
            problems.append(
                f"--eval-hf-dir {get('eval_hf_dir')} and {flag} {other} overlap: snapshots are "
                "deleted by vime and checkpoints must not be; choose another directory"
            )
    return problems


def _overlap(one: Path, other: Path) -> bool:
    """Whether one directory is the other, or lies in it."""
    one, other = one.resolve(), other.resolve()
    return one == other or one in other.parents or other in one.parents


def _data_problems(args: argparse.Namespace) -> list[str]:
    get = _getter(args)
    problems = []
    pairs = get("eval_prompt_data") or []
    if get("eval_num_gpus") and not pairs and not get("eval_function_path"):
        problems.append(
            f"{_missing(args, 'eval_prompt_data')}: with --eval-num-gpus {get('eval_num_gpus')} "
            "there is nothing to evaluate without NAME PATH"
        )
    if len(pairs) % 2:
        return [
            *problems,
            f"--eval-prompt-data {' '.join(map(str, pairs))}: expected NAME PATH pairs",
        ]
    names = [name_and_count(word)[0] for word in pairs[::2]]
    problems += [
        f"--eval-prompt-data: the name {n!r} is given twice" for n in {*names} if names.count(n) > 1
    ]
    problems += [
        f"--eval-prompt-data {word} {path}: no such file or directory"
        for word, path in zip(pairs[::2], pairs[1::2], strict=True)
        if not Path(path).exists()
    ]
    problems += [
        f"--eval-prompt-data {word}: expected NAME@N with N of at least 1"
        for word in pairs[::2]
        if name_and_count(word)[1] == 0
    ]
    return [*problems, *_setting_problems(args)]


def _setting_problems(args: argparse.Namespace) -> list[str]:
    """Settings of the eval sets that do not go together."""
    get = _getter(args)
    of_all = {name: get(dest) for name, dest in SETTING_DESTS.items()}
    given: dict[str, dict[str, Any]] = getattr(args, "eval_dataset_settings", None) or {}
    problems = []
    if get("eval_reward") != "exact" and get("custom_rm_path"):
        problems.append(
            f"--eval-reward {get('eval_reward')} together with --custom-rm-path "
            f"{get('custom_rm_path')}: an answer has one reward; drop one of the two"
        )
    own = [s.get("custom_rm_path") for s in given.values()]
    if get("eval_reward_batch_size") > 1 and not any([get("custom_rm_path"), *own]):
        problems.append(
            f"--eval-reward-batch-size {get('eval_reward_batch_size')} without --custom-rm-path: "
            "only a reward function of your own can be batched"
        )
    for where, settings in (("", of_all), *((f" (set {n})", of_all | s) for n, s in given.items())):
        if settings["overlong_prompt"] != "fail" and not settings["max_prompt_len"]:
            problems.append(
                f"--eval-overlong-prompt {settings['overlong_prompt']}{where} needs "
                "--eval-max-prompt-len N: from how many tokens a prompt is too long"
            )
        if settings["top_p"] > 1 or settings["top_p"] <= 0:
            problems.append(
                f"--eval-top-p {settings['top_p']}{where}: expected above 0 and at most 1"
            )
    return list(dict.fromkeys(problems))
