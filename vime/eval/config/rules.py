"""The rules that speak of several flags at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vime.eval.config.datasets import SETTING_DESTS, name_and_count
from vime.eval.config.errors import ConfigError
from vime.eval.config.flags import BY_DEST, value_of
from vime.eval.config.layout import eval_group
from vime.eval.config.sizes import parse_size
from vime.eval.loading import eval_function_problem, load_object
from vime.eval.metric_names import set_name_problem
from vime.eval.paths import real_path
from vime.limits import EMPTY_PATH, LARGEST


def _missing(args: argparse.Namespace, dest: str) -> str:
    """Says that a flag was not given, and whether its attribute is there at all."""
    said = f"{BY_DEST[dest].name} is missing"
    if hasattr(args, dest):
        return said
    return f"{said} (the namespace has no {dest}; vime.eval.add_eval_arguments adds it)"


def names_checkpoint_fn(args: argparse.Namespace) -> bool:
    """Whether ``--eval-function-path`` names a CheckpointEvalFn; imports the user's module.

    Raises:
        ValueError: it cannot be imported, or is nothing that evaluates.
    """
    path = getattr(args, "eval_function_path", None)
    if not path:
        return False
    from vime.rollout.checkpoint_eval import is_checkpoint_eval_fn

    found = load_object("--eval-function-path", path)
    problem = eval_function_problem(found)
    if problem:
        raise ValueError(f"--eval-function-path {path}: {problem}")
    return is_checkpoint_eval_fn(found)


def fleet_problems(args: argparse.Namespace) -> list[str]:
    """What stands against a fleet of the size and the settings asked for."""
    get = value_of(args)
    gpus, per_engine = get("eval_num_gpus"), get("eval_num_gpus_per_engine")
    if not gpus:
        alone = "--eval-detached without --eval-num-gpus: there are no engines to keep; drop it"
        return [alone] if get("eval_detached") else []
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
    elif (absent := _absent(Path(get("hf_checkpoint"), "config.json"))) is not None:
        problems.append(
            f"--hf-checkpoint {get('hf_checkpoint')}: no config.json there{absent}; expected a "
            "Hugging Face checkpoint directory"
        )
    if sized:
        problems += _layout_problems(args)
    return problems


def _layout_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the engines' settings, and with the YAML's models where there is one."""
    try:
        group = eval_group(args)
    except ConfigError as error:
        return error.problems
    wanted = value_of(args)("eval_min_engines")
    if group is not None and wanted is not None and wanted > group.num_engines:
        return [
            f"--eval-min-engines {wanted}: the fleet has {group.num_engines} engines; ask for at "
            "most so many"
        ]
    return []


def snapshot_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with how snapshots are to be made, kept and read."""
    get = value_of(args)
    problems = []
    backend = False
    try:
        backend = names_checkpoint_fn(args)
    except ValueError as error:
        problems.append(str(error))
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
    try:
        parse_size(get("eval_max_shard_size"))
    except ValueError as error:
        problems.append(f"--eval-max-shard-size {error}")
    for flag, other in (("--save-hf", get("save_hf")), ("--hf-checkpoint", get("hf_checkpoint"))):
        if get("eval_hf_dir") and other and _overlap(Path(get("eval_hf_dir")), Path(other)):
            problems.append(
                f"--eval-hf-dir {get('eval_hf_dir')} and {flag} {other} overlap: snapshots are "
                "deleted by vime and checkpoints must not be; choose another directory"
            )
    return problems


def _overlap(one: Path, other: Path) -> bool:
    """Whether one directory is the other, or lies in it."""
    one, other = real_path(one), real_path(other)
    return one == other or one in other.parents or other in one.parents


def run_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with where the run's evidence goes."""
    get = value_of(args)
    if get("eval_resume") and not get("eval_run_dir"):
        return [
            f"--eval-resume: {_missing(args, 'eval_run_dir')}: the directory of the run to go on "
            "with"
        ]
    return []


def _absent(path: Path) -> str | None:
    """``None`` when something is there; else why one cannot tell, or nothing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:  # a name that is too long, a directory that may not be searched
        return f" ({error.strerror})"
    return None


def data_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the eval sets and their settings."""
    get = value_of(args)
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
        f"--eval-prompt-data: the name {n!r} {problem}"
        for n in dict.fromkeys(names)
        if (problem := set_name_problem(n))
    ]
    problems += [
        f"--eval-prompt-data {word} {path!r}: {EMPTY_PATH}"
        for word, path in zip(pairs[::2], pairs[1::2], strict=True)
        if not str(path)
    ]
    problems += [
        f"--eval-prompt-data {word} {path}: no such file or directory{absent}"
        for word, path in zip(pairs[::2], pairs[1::2], strict=True)
        if str(path) and (absent := _absent(Path(path))) is not None
    ]
    problems += [
        f"--eval-prompt-data {word:.200}: expected NAME@N with N of at least 1 and at most "
        f"{LARGEST}"
        for word in pairs[::2]
        if (count := name_and_count(word)[1]) is not None and not 1 <= count <= LARGEST
    ]
    return [*problems, *_setting_problems(args)]


def _setting_problems(args: argparse.Namespace) -> list[str]:
    """Settings of the eval sets that do not go together."""
    get = value_of(args)
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
