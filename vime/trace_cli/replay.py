"""``vime trace replay``: drives the tables again, tells states at a moment, steps by key."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import takewhile

from vime.fsm.filters import Filter, Moment
from vime.fsm.lives import Key, TraceClock
from vime.fsm.read import TraceFile
from vime.fsm.record import Record
from vime.fsm.replay import Divergence, Present, Replay, replay, replay_until
from vime.fsm.tables import TABLES
from vime.fsm.text import clean, count
from vime.trace_cli import common


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace replay``."""
    common.add_file(parser)
    common.add_json(parser)
    common.add_filters(parser)
    common.add_last(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--at",
        type=_place,
        metavar="SEQ|TIME",
        help="print each machine's state after record SEQ (or NODE:SEQ), or at a time (12.5s)",
    )
    group.add_argument(
        "--step", action="store_true", help="walk through the records by key, in a terminal"
    )
    parser.set_defaults(run=run)


def _place(text: str) -> tuple[str | None, int] | Moment:
    """A record (``17``, ``driver:17``) or a moment (``12.5``, ``12s``, a date and time)."""
    node, _, seq = text.rpartition(":")
    if seq.isascii() and seq.isdigit() and (not node or not text[:4].isdigit()):
        return node or None, int(seq)
    try:
        return Moment.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a record's seq (17)") from None


def run(args: argparse.Namespace) -> int:
    """Replay; status 1 when a record diverges."""
    trace = common.open_trace(args.file)
    if args.step:
        from vime.trace_cli import step

        return step.run(trace, common.filter_of(args))
    if args.at is not None:
        return _print_states(args, trace)
    wanted = _Wanted(trace, common.filter_of(args))
    replayed, divergence = replay(wanted, wanted.counts)
    common.tell_problems(trace)
    if args.json:
        common.write_json(
            {
                "records": replayed.num_records,
                "machines": len(replayed.machines),
                "divergence": divergence and _as_json(divergence),
            }
        )
    elif divergence is not None:
        _print_divergence(divergence, wanted.at_ns)
    else:
        records = count(replayed.num_records, "record")
        machines = count(len(replayed.machines), "machine")
        sys.stdout.write(f"{records} of {machines} replayed: every state is as recorded\n")
    return common.OK if divergence is None else common.FAULT


class _Wanted:
    """The records, with the time of the present one kept for the filter."""

    def __init__(self, trace: TraceFile, filter: Filter) -> None:
        self._trace = trace
        self._filter = filter
        self._clock = TraceClock()
        self.at_ns = 0

    def __iter__(self) -> Iterator[Record]:
        for record in self._trace:
            self.at_ns = self._clock.at(record)
            yield record

    def counts(self, record: Record) -> bool:
        """Whether a divergence at the present record is to be reported."""
        return self._filter.wants(record, self.at_ns, self._clock)


def _print_divergence(divergence: Divergence, at_ns: int) -> None:
    from vime.fsm.sentences import line

    sys.stdout.write(
        f"the replay diverges at: {line(divergence.record, at_ns)}\n"
        f"  field:    {divergence.field}\n"
        f"  expected: {clean(divergence.expected)}\n"
        f"  found:    {clean(divergence.found)}\n"
    )
    if divergence.missing:
        sys.stdout.write(f"  {count(divergence.missing, 'record')} missing right before it\n")


def _as_json(divergence: Divergence) -> dict[str, object]:
    return {
        "field": divergence.field,
        "expected": divergence.expected,
        "found": divergence.found,
        "missing_before": divergence.missing,
        "record": asdict(divergence.record),
    }


def _print_states(args: argparse.Namespace, trace: TraceFile) -> int:
    replayed, found = _replayed_to(args.at, trace)
    common.tell_problems(trace)
    if not found:
        where = ":".join(str(part) for part in args.at if part is not None)
        raise common.UsageError(f"{args.file}: no record {where} in this trace")
    asked = common.filter_of(args)
    shown = {
        key: present
        for key, present in replayed.machines.items()
        if asked.wants_machine(key[2], key[3])
        and (not asked.states or present.state in asked.states)
    }
    states = [
        {
            "run": key[0],
            "node": key[1],
            "machine": key[2],
            "id": key[3],
            "state": present.state,
            "since_seq": present.since_seq,
            "attempt": present.attempt,
            "weight_version": present.weight_version,
        }
        for key, present in _latest(shown, args.last)
    ]
    if args.json:
        common.write_json({"records": replayed.num_records, "machines": states})
        return common.OK
    from vime.fsm.render import plain_table

    columns = ("machine", "id", "state", "since_seq", "weight_version")
    rows = [[str(state[name] or "") for name in columns] for state in states]
    out = common.console()
    out.print(f"after {count(replayed.num_records, 'record')}")
    common.print_table(out, plain_table(("machine", "id", "state", "since seq", "weights"), rows))
    return common.OK


def _latest(machines: dict[Key, Present], last: int) -> Iterator[tuple[Key, Present]]:
    """All that go on, and the latest ``last`` of a kind that have ended; 0: all of them."""
    ended: dict[str, list[Key]] = {}
    for key, present in machines.items():
        if key[2] in TABLES and present.state in TABLES[key[2]].terminal:
            ended.setdefault(key[2], []).append(key)
    dropped = {machine: keys[:-last] if last else [] for machine, keys in ended.items()}
    common.tell_left_out({machine: len(keys) for machine, keys in dropped.items()})
    left_out = {key for keys in dropped.values() for key in keys}
    return (item for item in machines.items() if item[0] not in left_out)


def _replayed_to(place: tuple[str | None, int] | Moment, trace: TraceFile) -> tuple[Replay, bool]:
    if isinstance(place, tuple):
        node, seq = place
        return replay_until(trace, lambda r: r.seq == seq and node in (None, r.node))
    clock = TraceClock()
    before = takewhile(lambda record: clock.at(record) <= place.on(clock), trace)
    return replay_until(before, lambda _: False)[0], True
