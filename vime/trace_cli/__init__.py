"""``vime trace …``: one module a command, each thin over :mod:`vime.fsm`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vime.trace_cli import (
    check,
    common,
    diff,
    export,
    follow,
    merge,
    replay,
    rerun,
    show,
    stats,
    timeline,
    why,
)

Setup = Callable[[argparse.ArgumentParser], None]

#: Name, one line of help, and what adds the arguments and sets ``run``.
COMMANDS: tuple[tuple[str, str, Setup], ...] = (
    ("show", "the points and engines of a run, as tables and a timeline", show.setup),
    ("timeline", "bars of every point and engine over time", timeline.setup),
    ("check", "the ten invariants, as far as the trace shows them", check.setup),
    ("why", "the chain of causes behind what became of a point", why.setup),
    ("stats", "dwell times, reasons, stalls and lags in numbers", stats.setup),
    ("replay", "drive the state machines again, and compare every state", replay.setup),
    ("rerun", "run the dispatcher again on virtual time, and compare", rerun.setup),
    ("diff", "where two runs first behave differently", diff.setup),
    ("follow", "the records of a running run as they are written", follow.setup),
    ("merge", "the traces of several nodes as one, by cause and not by clock", merge.setup),
    ("export", "a trace for Perfetto, as a Mermaid chart, or as one HTML page", export.setup),
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every subcommand of ``vime trace``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what, setup in COMMANDS:
        command = commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=common.EPILOG
        )
        setup(command)
