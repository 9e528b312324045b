"""Validation of the flags, all problems at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vime.eval.config.errors import ConfigError
from vime.eval.config.file import ConfigFile, read_config_file
from vime.eval.config.flags import BY_DEST, FLAGS, value_of
from vime.eval.config.rules import (
    data_problems,
    fleet_problems,
    names_checkpoint_fn,
    run_problems,
    snapshot_problems,
)


def validate_eval_args(args: argparse.Namespace) -> None:
    """Check every eval flag of ``args`` and set ``args.eval_uses_snapshots``.

    Works on any namespace, also one that another framework made: what is missing is taken from
    the file of ``--eval-config``, where there is one, or has its default.

    Raises:
        ConfigError: naming every wrong flag with its value and the remedy.
        TypeError: ``args`` is no namespace.
    """
    if not hasattr(args, "__dict__"):
        raise TypeError(
            f"args={args!r:.100}: expected an object with an attribute for each flag, such as "
            "argparse.Namespace(**flags)"
        )
    file = _file(args)
    problems = file.problems
    wrong = _value_problems(args)
    sound = _without(args, wrong)
    rules = (fleet_problems, snapshot_problems, data_problems, run_problems)
    found = [problem for rule in rules for problem in rule(sound)]
    if not file.was_read:
        found = []  # what is missing may stand in it
    # A rule that speaks of a flag whose value is wrong has to wait until that is mended.
    names = [BY_DEST[dest].name for dest in wrong]
    problems += [*wrong.values(), *(p for p in found if not any(n in p for n in names))]
    if problems:
        raise ConfigError(problems)
    get = value_of(args)
    args.eval_uses_snapshots = bool(get("eval_num_gpus") or names_checkpoint_fn(args))


def _file(args: argparse.Namespace) -> ConfigFile:
    """The file of ``--eval-config``; what ``args`` lacks is taken from it."""
    path = getattr(args, "eval_config", None)
    if path is None:
        return ConfigFile()
    flag = BY_DEST["eval_config"]
    if flag.problem(path) or flag.place_problem(path):
        return ConfigFile(was_read=False)  # which is told with the other flags
    file = read_config_file(path)
    for dest, value in file.values.items():
        if not hasattr(args, dest):
            setattr(args, dest, value)
    return file


def _value_problems(args: argparse.Namespace) -> dict[str, str]:
    """Each flag by itself: its type, its choices, its bounds, where it leads."""
    problems = {}
    for flag in FLAGS:
        value = getattr(args, flag.dest, flag.default)
        problem = flag.problem(value) or flag.place_problem(value)
        if problem:
            problems[flag.dest] = f"{flag.name} {problem}"
    return problems


def _without(args: argparse.Namespace, wrong: Iterable[str]) -> argparse.Namespace:
    """A shallow copy in which the flags with wrong values have their defaults."""
    return argparse.Namespace(**{**vars(args), **{dest: BY_DEST[dest].default for dest in wrong}})
