"""The command line of the benchmarks: parses, runs one, shows and writes what it came to.

Statuses: 0 fine, 1 the benchmark failed, 2 bad usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn, Protocol

from bench.figures import Report

FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143

#: Name → what it measures; each is the module ``bench.NAME``.
BENCHMARKS = {
    "dispatch": "how long dispatch holds its caller when there is nothing to copy",
    "stall": "how long training stands still at each point, beside blocking saves and evals",
    "interference": "training speed with no evaluation, with one in flight, with two",
    "pin": "pinning 1, 2, 4 real engines, beside raw reload_weights",
    "runner": "samples per second of the EvalRunner, beside a bare client and lm-eval",
    "latency": "from dispatch to the outcome, beside the parts that cannot be avoided",
    "trace": "cost of a transition, speed of replay and check",
    "tracing": "training speed with every transition written to the trace, and without",
    "ray": "on a Ray cluster: dispatch, a snapshot to one node and to four, layouts",
    "scale": "many points on 1, 16 and 256 simulated engines: time, memory, files, trace",
}


class UsageError(Exception):
    """The user asked for something that cannot be; the message is one line."""


class Benchmark(Protocol):
    """What each module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's own flags."""

    def run(self, args: argparse.Namespace) -> Report:
        """Measure.

        Raises:
            UsageError: the flags, or this machine, do not allow it.
        """


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; nothing heavy is imported for it."""
    parser = Parser(
        prog="python -m bench",
        description="Measures what evaluating often costs, on this machine.",
        epilog="Every benchmark warms up, repeats, and measures its baseline in the same run.",
    )
    commands = parser.add_subparsers(metavar="NAME", required=True, dest="bench")
    for name, purpose in BENCHMARKS.items():
        command = commands.add_parser(name, help=purpose, description=f"Measures {purpose}.")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        command.add_argument("--png", type=Path, metavar="FILE", help="draw the figures there")
        benchmark(name).add_arguments(command)
    return parser


def benchmark(name: str) -> Benchmark:
    """The module that measures ``name``."""
    module: Benchmark = import_module(f"bench.{name}")
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = make_parser().parse_args(given)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        _check_targets(args)
        with _ending_in_order():
            return _run(args, given)
    except Terminated:
        return TERMINATED
    except BaseExceptionGroup as group:  # the same, out of a group of tasks
        if group.subgroup(Terminated) is None:
            raise
        return TERMINATED
    except UsageError as error:
        return _complain(str(error), USAGE_ERROR)
    except OSError as error:  # --json or --png, or the scratch directory
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace, given: list[str]) -> int:
    from bench.machine import describe_machine
    from bench.output import print_report, write_json, write_picture

    machine = describe_machine(given)
    report = benchmark(args.bench).run(args)
    print_report(report, machine)
    if args.json:
        write_json(args.json, report, machine)
    if args.png:
        write_picture(args.png, report, machine)
    return 0


class Terminated(SystemExit):
    """SIGTERM came: leave through every ``finally``, so that nothing is left behind."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn SIGTERM into an exception."""

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_targets(args: argparse.Namespace) -> None:
    """Say at once what would else be found out after minutes."""
    for flag, path in (("--json", args.json), ("--png", args.png)):
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{flag} {path}: this is a directory; name a file")
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{flag} {path}: {path.parent} is no directory to write into")
    if args.png is not None and args.png.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--png {args.png}: expected a name that ends in .png, .svg or .pdf")


def _complain(message: str, status: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"python -m bench: {line}\n")
    return status


def positive(text: str) -> int:
    """An argument that is a whole number above 0."""
    value = int(text) if text.strip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return value


def positive_number(text: str) -> float:
    """An argument that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value
