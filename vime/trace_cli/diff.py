"""``vime trace diff``: where two runs first behave differently, and how long each took."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from vime.fsm.diff import Behaviour, Difference, Side, behaviour, differences
from vime.fsm.stats import Summary
from vime.fsm.text import clean, count, duration
from vime.trace_cli import common

_MAX_SHOWN = 10
_MAX_SCORES = 50


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace diff``."""
    common.add_file(parser, "a")
    common.add_file(parser, "b")
    common.add_json(parser)
    common.add_filters(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare; status 1 when the behaviour differs."""
    asked = common.filter_of(args)
    sides = []
    for path in (args.a, args.b):
        trace = common.open_trace(path)
        sides.append(behaviour(trace, asked))
        common.tell_problems(trace)
    a, b = sides
    found = differences(a, b)
    if args.json:
        common.write_json(
            {
                "differences": [_as_json(difference) for difference in found],
                "dwell_s": [
                    {"machine": m, "state": s, "a": x and asdict(x), "b": y and asdict(y)}
                    for m, s, x, y in _dwells(a, b)
                ],
                "scores": {"a": a.scores, "b": b.scores},
            }
        )
    else:
        _print(a, b, found)
    return common.FAULT if found else common.OK


def _as_json(difference: Difference) -> dict[str, object]:
    return {
        "machine": difference.name[0],
        "id": difference.name[1],
        "index": difference.index,
        "a": difference.a and _side_as_json(difference.a),
        "b": difference.b and _side_as_json(difference.b),
    }


def _side_as_json(side: Side) -> dict[str, object]:
    trigger, dest, rejected, reason = side.step
    return {
        "trigger": trigger,
        "dest": dest,
        "rejected": rejected,
        "reason": reason,
        "seq": side.seq,
        "at_s": side.at_ns / 1e9,
    }


def _print(a: Behaviour, b: Behaviour, found: list[Difference]) -> None:
    if not found:
        machines = count(a.num_machines, "machine")
        sys.stdout.write(f"the behaviour is the same: {machines}, step by step\n")
    for i, difference in enumerate(found[:_MAX_SHOWN]):
        machine, name = difference.name
        where = "the first difference" if i == 0 else "then"
        after = f"after {count(difference.index, 'same step')}"
        sys.stdout.write(f"{where}: {clean(machine, 20)} {clean(name, 80)}, {after}\n")
        sys.stdout.write(f"  A: {_side(difference.a)}\n  B: {_side(difference.b)}\n")
    if len(found) > _MAX_SHOWN:
        sys.stdout.write(f"and {count(len(found) - _MAX_SHOWN, 'more machine')}\n")
    _print_tables(a, b)


def _print_tables(a: Behaviour, b: Behaviour) -> None:
    from vime.fsm.render import plain_table

    out = common.console()
    rows = [
        [clean(machine, 20), clean(state, 40), *_cells(x), *_cells(y)]
        for machine, state, x, y in _dwells(a, b)
    ]
    if rows:
        out.print()
        heads = ("machine", "state", "A count", "A p50", "A max", "B count", "B p50", "B max")
        common.print_table(out, plain_table(heads, rows, right=range(2, 8)))
    differing = [
        point
        for point in dict.fromkeys([*a.scores, *b.scores])
        if a.scores.get(point) != b.scores.get(point)
    ]
    if differing:
        out.print()
        rows = [
            [clean(point, 40), _scores(a.scores.get(point)), _scores(b.scores.get(point))]
            for point in differing[:_MAX_SCORES]
        ]
        common.print_table(out, plain_table(("point", "A score", "B score"), rows))
        if len(differing) > _MAX_SCORES:
            out.print(f"and {count(len(differing) - _MAX_SCORES, 'more point')}; --json has all")


def _scores(scores: dict[str, float] | None) -> str:
    return "  ".join(f"{clean(name, 60)} {score:.4g}" for name, score in (scores or {}).items())


def _side(side: Side | None) -> str:
    if side is None:
        return "nothing more"
    trigger, dest, rejected, reason = side.step
    what = "rejected" if rejected else f"→ {clean(dest, 40)}"
    why = f": {clean(reason, 60)}" if reason else ""
    return f"{clean(trigger, 40)} {what}{why} (seq {side.seq}, +{duration(side.at_ns)})"


def _dwells(a: Behaviour, b: Behaviour) -> list[tuple[str, str, Summary | None, Summary | None]]:
    first, second = ({(m, s): x for m, s, x in run.stats.states()} for run in (a, b))
    return [(*key, first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])]


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["", "", ""]
    return [str(summary.count), duration(summary.p50 * 1e9), duration(summary.max * 1e9)]
