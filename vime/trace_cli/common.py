"""What the trace commands share: arguments, filters, and writing to the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vime.fsm.filters import Filter, Moment
from vime.fsm.lives import Life, Lives, lives_of
from vime.fsm.read import TraceFile, TraceUnreadableError
from vime.fsm.text import clean, count
from vime.limits import EMPTY_PATH, LONGEST_S

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OK = 0
FAULT = 1
_PIPE_WIDTH = 140

NOTHING = "nothing to show: no machine of the trace fits"

EPILOG = "Exit status: 0 fine, 1 the trace shows a fault, 2 bad usage or unreadable input."


def a_path(text: str) -> str:
    """An argument that is a path: an empty one would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError(EMPTY_PATH)
    return text


def seconds(text: str, least: float = 0.0) -> float:
    """An argument that is a time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected seconds, {least:g} or more and at most {LONGEST_S} (30 days)"
        )
    return value


def add_file(parser: argparse.ArgumentParser, name: str = "file") -> None:
    """The argument FILE."""
    parser.add_argument(
        name,
        type=a_path,
        metavar=name.upper(),
        help="a trace, or the directory of a run (its trace.jsonl)",
    )


def add_json(parser: argparse.ArgumentParser, help: str = "print JSON instead of text") -> None:
    """The switch ``--json``."""
    parser.add_argument("--json", action="store_true", help=help)


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option ``--output``."""
    parser.add_argument(
        "-o", "--output", type=a_path, metavar="PATH", help="where to (default: print it)"
    )


def add_filters(parser: argparse.ArgumentParser, but: tuple[str, ...] = ()) -> None:
    """The filters; each may be given several times. Those of ``but`` are left out."""
    group = parser.add_argument_group("filters")
    names = {"--point": "ID", "--engine": "ID", "--state": "STATE", "--reason": "REASON"}
    for name, metavar in names.items():
        dest = f"filter_{name[2:]}"
        if name in but:
            parser.set_defaults(**{dest: []})
            continue
        what = _FILTER_HELP[name]
        group.add_argument(name, action="append", default=[], dest=dest, metavar=metavar, help=what)
    for name, what in (("--since", "nothing before"), ("--until", "nothing after")):
        group.add_argument(
            name,
            type=_moment,
            metavar="TIME",
            help=f"{what}: seconds since the start (12.5, 1h30m) or a date and time",
        )


_FILTER_HELP = {
    "--point": "this eval point",
    "--engine": "this engine",
    "--state": "what was in this state",
    "--reason": "what has this reason",
}


def _moment(text: str) -> Moment:
    try:
        return Moment.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_LAST = 1_000


def add_last(parser: argparse.ArgumentParser) -> None:
    """The option ``--last``."""
    parser.add_argument(
        "--last",
        type=_number,
        default=_LAST,
        metavar="N",
        help=f"only the latest N finished machines of a kind; 0 for all (default: {_LAST})",
    )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def read_lives(
    args: argparse.Namespace, trace: TraceFile, machines: Sequence[str]
) -> tuple[Lives, list[Life]]:
    """The lives that the arguments ask for, kind by kind; says on stderr what was not usable."""
    asked = filter_of(args)
    lives = lives_of(trace, machines=machines, keep=asked.wants_life, last=args.last or None)
    tell_problems(trace)
    tell_left_out(lives.num_dropped)
    shown = [life for machine in machines for life in lives.of(machine)]
    return lives, [life for life in shown if asked.wants_life(life, lives.now_ns, lives.clock)]


def tell_left_out(numbers: dict[str, int]) -> None:
    """Say on stderr how many machines of a kind ``--last`` has left out."""
    for machine, number in numbers.items():
        if number:
            text = f"{count(number, f'earlier {machine}')} left out; --last 0 shows all"
            sys.stderr.write(f"vime: {text}\n")


def filter_of(args: argparse.Namespace) -> Filter:
    """The filter that the arguments ask for."""
    return Filter(
        points=tuple(args.filter_point),
        engines=tuple(args.filter_engine),
        states=tuple(args.filter_state),
        reasons=tuple(args.filter_reason),
        since=args.since,
        until=args.until,
    )


class UsageError(Exception):
    """What the user asked for cannot be; the message is one line."""


@contextmanager
def output(path: str | None) -> Iterator[TextIO]:
    """The file at ``path``, replaced once all is written, or standard output.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        with _written(Path(path)) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


@contextmanager
def _written(target: Path) -> Iterator[TextIO]:
    if target.exists() and not target.is_file():  # a pipe, /dev/stdout
        with target.open("w", encoding="utf-8") as file:
            yield file
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def refuse_to_overwrite(path: str, traces: list[TraceFile]) -> None:
    """An output must not be one of the inputs.

    Raises:
        UsageError: it is.
    """
    target = Path(path)
    if target.exists() and any(target.samefile(trace.path) for trace in traces):
        raise UsageError(f"{path}: is one of the traces to read; choose another --output")


def open_trace(path: str) -> TraceFile:
    """The trace at ``path``.

    Raises:
        TraceUnreadableError: there is none.
    """
    return TraceFile(path)


def tell_problems(trace: TraceFile) -> None:
    """After reading: say on stderr what could not be used, or that nothing is there yet.

    An empty file is no fault: it is the trace of a run that has not begun.

    Raises:
        TraceUnreadableError: nothing at all could be used, though something is there.
    """
    problems = trace.problems
    if problems and not trace.num_records:
        raise TraceUnreadableError(f"{trace.path}: holds no trace record; {problems[0]}")
    if not trace.num_records:
        problems = ["empty: its run has not written a record yet"]
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


def print_table(out: Console, table: Table) -> None:
    """Print a table whole: where the terminal is too narrow, it wraps the lines itself."""
    from vime.fsm.render import least_width

    before = out.width
    out.width = max(before, least_width(table))
    out.print(table, crop=False)
    out.width = before


def is_ascii(out: Console) -> bool:
    """Whether the output can show no block characters."""
    return not out.encoding.startswith("utf")


def write_json(value: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
