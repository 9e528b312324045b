"""Adds the flags to a framework's own parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from vime.eval.config.engines import mirror_engine_flags
from vime.eval.config.file import read_config_file
from vime.eval.config.flags import FLAGS, Flag


def add_eval_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to ``parser`` that it does not define already; returns ``parser``.

    Call it after the framework has added its own: each ``--vllm-X`` among them gets an
    ``--eval-vllm-X`` as well. The parser reads the file of ``--eval-config`` before the command
    line, which wins. Words of the wrong type are left to :func:`vime.eval.validate_eval_args`.
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
            switch = argparse.BooleanOptionalAction
            group.add_argument(flag.name, action=switch, default=flag.default, help=text)
            continue
        if flag.default not in (None, 0) or flag.minimum == 0:
            text += " (default: %(default)s)"
        group.add_argument(
            flag.name,
            type=flag.read,
            default=flag.default,
            nargs="+" if flag.many else None,
            metavar=_metavar(flag),
            help=text,
        )
    mirror_engine_flags(parser)
    _read_file_first(parser)
    return parser


def _read_file_first(parser: argparse.ArgumentParser) -> None:
    """Make the file of ``--eval-config`` the defaults of each parse, and of that one alone."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        path = _config_path(words, parser.get_default("eval_config"))
        if path is None:
            return parse(words, namespace)
        values = read_config_file(path).values  # its problems are the validation's to report
        before = {dest: parser.get_default(dest) for dest in values}
        parser.set_defaults(**values)
        try:
            return parse(words, namespace)
        finally:
            parser.set_defaults(**before)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _config_path(words: Sequence[str], default: str | None) -> str | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--eval-config", default=default)
    try:
        path: str | None = finder.parse_known_args(list(words))[0].eval_config
    except argparse.ArgumentError:  # nothing follows it: the real parser says so
        return None
    return path


def _metavar(flag: Flag) -> str | tuple[str, ...] | None:
    if flag.choices:
        return f"{{{','.join(flag.choices)}}}"
    if flag.dest == "eval_prompt_data":
        return ("NAME", "PATH")
    if flag.parse in (int, float):
        return "SECONDS" if flag.name.endswith("-timeout") else "N"
    return flag.dest.rsplit("_", 1)[-1].upper()
