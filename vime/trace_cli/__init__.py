"""``vime trace …``: one module a command, each thin over :mod:`vime.fsm`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vime.trace_cli import common, show

Setup = Callable[[argparse.ArgumentParser], None]

#: Name, one line of help, and what adds the arguments and sets ``run``.
COMMANDS: tuple[tuple[str, str, Setup], ...] = (
    ("show", "the points and engines of a run, as tables and a timeline", show.setup),
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every subcommand of ``vime trace``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what, setup in COMMANDS:
        command = commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=common.EPILOG
        )
        setup(command)
