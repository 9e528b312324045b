"""What the trace commands share: arguments, filters, and writing to the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from vime.fsm.filters import Filter, Moment
from vime.fsm.read import TraceFile, TraceUnreadableError
from vime.fsm.text import clean

if TYPE_CHECKING:
    from rich.console import Console

OK = 0
FAULT = 1
_PIPE_WIDTH = 140

EPILOG = "Exit status: 0 fine, 1 the trace shows a fault, 2 bad usage or unreadable input."


def add_file(parser: argparse.ArgumentParser, name: str = "file") -> None:
    """The argument FILE."""
    parser.add_argument(
        name, metavar=name.upper(), help="a trace, or the directory of a run (its trace.jsonl)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The switch ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """The filters; each may be given several times."""
    group = parser.add_argument_group("filters")
    group.add_argument("--point", action="append", default=[], metavar="ID", help="this eval point")
    group.add_argument("--engine", action="append", default=[], metavar="ID", help="this engine")
    group.add_argument("--state", action="append", default=[], help="what was in this state")
    group.add_argument("--reason", action="append", default=[], help="what has this reason")
    for name, what in (("--since", "nothing before"), ("--until", "nothing after")):
        group.add_argument(
            name,
            type=_moment,
            metavar="TIME",
            help=f"{what}: seconds since the start (12.5, 1h30m) or a date and time",
        )


def _moment(text: str) -> Moment:
    try:
        return Moment.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def filter_of(args: argparse.Namespace) -> Filter:
    """The filter that the arguments ask for."""
    return Filter(
        points=tuple(args.point),
        engines=tuple(args.engine),
        states=tuple(args.state),
        reasons=tuple(args.reason),
        since=args.since,
        until=args.until,
    )


def open_trace(path: str) -> TraceFile:
    """The trace at ``path``.

    Raises:
        TraceUnreadableError: there is none.
    """
    return TraceFile(path)


def tell_problems(trace: TraceFile) -> None:
    """After reading: say on stderr what could not be used.

    Raises:
        TraceUnreadableError: nothing at all could be used, though something is there.
    """
    problems = trace.problems
    if problems and not trace.num_records:
        raise TraceUnreadableError(f"{trace.path}: holds no trace record; {problems[0]}")
    for problem in problems:
        sys.stderr.write(f"vime: {clean(str(trace.path))}: {clean(problem)}\n")


def console() -> Console:
    """Where tables go: the terminal's width, or a fixed one into a pipe."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # what is being handled is the BrokenPipeError, and vime.cli knows best

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Terminal(width=wide, highlight=False, markup=False, emoji=False)


def is_ascii(out: Console) -> bool:
    """Whether the output can show no block characters."""
    return not out.encoding.startswith("utf")


def write_json(value: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
