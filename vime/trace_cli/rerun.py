"""``vime trace rerun``: runs the dispatcher again on virtual time, and compares what it does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from vime.fsm.lives import TraceClock
from vime.fsm.record import Record
from vime.fsm.text import clean, count
from vime.trace_cli import common

if TYPE_CHECKING:
    from vime.eval.rerun import Rerun


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace rerun``."""
    common.add_file(parser)
    common.add_json(parser)
    parser.add_argument(
        "--tolerance",
        type=partial(common.seconds, least=1e-6),
        default=1.0,
        metavar="SECONDS",
        help="how far moments may be apart; real clocks and busy loops are late (default: 1)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run again; status 1 when a record diverges."""
    trace = common.open_trace(args.file)
    clock = TraceClock()
    times: dict[tuple[str, str, int], int] = {}

    def wanted(record: Record) -> bool:
        at_ns = clock.at(record)
        if record.machine == "point":
            times[record.run_id, record.node, record.seq] = at_ns
        return record.machine == "point" or record.trigger == "verify"

    records = [record for record in trace if wanted(record)]
    common.tell_problems(trace)
    if not times:
        raise common.UsageError(f"{args.file}: no eval point in this trace, nothing to run again")
    done = _rerun(records, args.tolerance)
    divergence = done.divergence
    if args.json:
        common.write_json(
            {
                "records": done.num_records,
                "points": done.num_points,
                "runs": done.num_runs,
                "divergence": divergence
                and {
                    "field": divergence.field,
                    "expected": divergence.expected,
                    "found": divergence.found,
                    "record": asdict(divergence.record),
                },
            }
        )
    elif divergence is not None:
        from vime.fsm.sentences import line

        r = divergence.record
        sys.stdout.write(
            f"the rerun diverges at: {line(r, times[r.run_id, r.node, r.seq])}\n"
            f"  field:     {divergence.field}\n"
            f"  rerun:     {clean(divergence.expected)}\n"
            f"  recorded:  {clean(divergence.found)}\n"
        )
    else:
        records_of = f"{count(done.num_records, 'record')} of {count(done.num_points, 'point')}"
        sys.stdout.write(f"{records_of}: the dispatcher does again what was recorded\n")
    return common.OK if divergence is None else common.FAULT


def _rerun(records: list[Record], tolerance_s: float) -> Rerun:
    from vime.eval.rerun import rerun

    try:
        return rerun(records, tolerance_s)
    except ValueError as error:
        raise common.UsageError(f"cannot be run again: {error}") from None
