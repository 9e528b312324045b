"""The ``vime`` command: parses arguments, and turns every failure into one line and a status.

Statuses: 0 fine, 1 a fault was found, 2 bad usage or something unreadable, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from vime import __version__
from vime.fsm.text import clean

USAGE_ERROR = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: {clean(message)} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; ``args.run(args)`` runs what was asked for."""
    from vime import eval_cli, trace_cli

    parser = Parser(
        prog="vime",
        description="Evaluate every checkpoint of an RL post-training run without stopping it.",
        epilog="Exit status: 0 fine, 1 a fault was found, 2 bad usage or unreadable input.",
    )
    parser.add_argument("--version", action="version", version=f"vime {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    trace_cli.add_commands(
        commands.add_parser("trace", help="look into the trace of a run: show, check, replay, …")
    )
    eval_cli.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status and never raises for what a user may do."""
    _prepare_output()
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough (| head)
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # the output cannot be written: a full disk, say
        _discard_output()
        return _complain(f"the output: {error.strerror or error}")


def _run(argv: Sequence[str] | None) -> int:
    from vime.fsm.read import TraceUnreadableError
    from vime.trace_cli.common import UsageError

    try:
        args = make_parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version or a wrong argument
        return int(stop.code or 0)
    try:
        return int(args.run(args))
    except (TraceUnreadableError, UsageError) as error:
        return _complain(str(error))


def _complain(message: str) -> int:
    sys.stderr.write(f"vime: {clean(message)}\n")
    return USAGE_ERROR


def _prepare_output() -> None:
    """Characters that the terminal's encoding lacks are replaced; closed streams are opened."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 -- until exit
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's exit does not fail on it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
