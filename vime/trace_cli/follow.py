"""``vime trace follow``: prints the records of a running run as they are written."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from vime.fsm.filters import Filter
from vime.fsm.follow import Follower
from vime.fsm.lives import TraceClock
from vime.fsm.record import Record
from vime.fsm.sentences import line
from vime.trace_cli import common

_INTERVAL_S = 0.2


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace follow``."""
    common.add_file(parser)
    common.add_json(parser, "print each record as a line of JSON")
    common.add_filters(parser)
    parser.add_argument(
        "--idle",
        type=common.seconds,
        metavar="SECONDS",
        help="end when nothing was written for so long (default: go on until interrupted)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what is there and what comes."""
    with Follower(args.file) as follower:
        _follow(follower, common.filter_of(args), _writer(args.json), args.idle)
        common.tell_problems(follower.trace)
    return common.OK


def _writer(as_json: bool) -> Callable[[Record, int], None]:
    def write(record: Record, at_ns: int) -> None:
        if as_json:
            common.write_json(asdict(record))
        else:
            sys.stdout.write(line(record, at_ns) + "\n")

    return write


def _follow(
    follower: Follower,
    asked: Filter,
    write: Callable[[Record, int], None],
    idle_s: float | None,
) -> None:
    clock, restarted = TraceClock(), 0
    last_news_s = time.monotonic()
    while True:
        records = follower.poll()
        if follower.restarted != restarted:
            sys.stderr.write("vime: the trace was replaced; it is read from its beginning\n")
            clock, restarted = TraceClock(), follower.restarted
        for record in records:
            at_ns = clock.at(record)
            if asked.wants(record, at_ns, clock):
                write(record, at_ns)
        sys.stdout.flush()
        if records:
            last_news_s = time.monotonic()
        elif idle_s is not None and time.monotonic() - last_news_s >= idle_s:
            return
        else:
            time.sleep(_INTERVAL_S)
