"""``vime trace check``: the ten invariants, as far as the trace shows them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

from vime.fsm.check import INVARIANTS, Check
from vime.fsm.check_rule import Violation
from vime.fsm.lives import TraceClock
from vime.fsm.record import Record
from vime.fsm.sentences import line
from vime.fsm.text import count
from vime.trace_cli import common

_MAX_SHOWN = 20
_MAX_RECORDS = 6


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace check``."""
    common.add_file(parser)
    common.add_json(parser)
    common.add_filters(parser)
    parser.add_argument(
        "--ended",
        action="store_true",
        help="the run is over: whatever is pending, up or in use is a fault",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"print more than {_MAX_SHOWN} faults of an invariant"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check; status 1 when an invariant is violated."""
    trace = common.open_trace(args.file)
    asked = common.filter_of(args)
    check = Check(ended=args.ended)
    clock = TraceClock()
    limit = sys.maxsize if args.all else _MAX_SHOWN
    counts = dict.fromkeys(INVARIANTS, 0)
    kept: list[tuple[Violation, dict[int, int]]] = []

    def note(found: list[Violation] | Iterator[Violation]) -> None:
        for violation in found:
            at = {id(record): clock.at(record) for record in violation.records}
            if not any(asked.wants(r, at[id(r)], clock) for r in violation.records):
                continue
            counts[violation.invariant] += 1
            if counts[violation.invariant] <= limit:
                kept.append((violation, at))

    num_records = 0
    for record in trace:
        clock.at(record)
        num_records += 1
        note(check.feed(record))
    note(check.end())
    common.tell_problems(trace)
    if args.json:
        _write_json(num_records, check, counts, kept)
    else:
        _print(num_records, check, counts, kept)
    return common.FAULT if any(counts.values()) else common.OK


def _write_json(
    num_records: int,
    check: Check,
    counts: dict[int, int],
    kept: list[tuple[Violation, dict[int, int]]],
) -> None:
    common.write_json(
        {
            "records": num_records,
            "pending": check.num_pending,
            "rejected": check.num_rejected,
            "unchanged": check.num_unchanged,
            "counts": counts,
            "violations": [
                {
                    "invariant": violation.invariant,
                    "text": violation.text,
                    "records": [asdict(record) for record in violation.records],
                }
                for violation, _ in kept
            ],
        }
    )


def _print(
    num_records: int,
    check: Check,
    counts: dict[int, int],
    kept: list[tuple[Violation, dict[int, int]]],
) -> None:
    for violation, at in kept:
        sys.stdout.write(f"invariant {violation.invariant}: {violation.text}\n")
        for record in _some(violation.records):
            text = line(record, at[id(record)]) if record else "…"
            sys.stdout.write(f"    {text}\n")
    for invariant, number in counts.items():
        state = "ok" if not number else count(number, "fault")
        sys.stdout.write(f"{invariant:>2}  {state:<10}  {INVARIANTS[invariant]}\n")
    notes = [count(num_records, "record")]
    if check.num_pending:
        notes.append(f"{count(check.num_pending, 'point')} pending when the trace ends")
    if check.num_rejected:
        notes.append(f"{count(check.num_rejected, 'illegal trigger')} refused")
    if check.num_unchanged:
        points = count(check.num_unchanged, "point")
        notes.append(f"{points} whose engines answered exactly as with other weights")
    sys.stdout.write(f"{', '.join(notes)}\n")


def _some(records: tuple[Record, ...]) -> tuple[Record | None, ...]:
    if len(records) <= _MAX_RECORDS:
        return records
    return (*records[: _MAX_RECORDS - 2], None, records[-1])
