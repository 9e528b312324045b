"""``vime trace show``: what became of every point, and what the engines were doing."""

from __future__ import annotations

import argparse
from typing import Any

from vime.fsm.lives import Life, Lives, metrics_of, scores_of
from vime.fsm.sentences import message_in
from vime.trace_cli import common


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace show``."""
    common.add_file(parser)
    common.add_json(parser)
    common.add_filters(parser)
    common.add_last(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables and a timeline, or JSON."""
    trace = common.open_trace(args.file)
    kinds = ("point", "engine")
    lives, shown = common.read_lives(args, trace, kinds)
    points, engines = ([life for life in shown if life.machine == kind] for kind in kinds)
    if args.json:
        common.write_json(
            {
                "runs": list(lives.runs),
                "records": lives.num_records,
                "span_s": lives.now_ns / 1e9,
                "points": [_as_json(life, lives.now_ns) for life in points],
                "engines": [_as_json(life, lives.now_ns) for life in engines],
                "problems": trace.problems,
            }
        )
    else:
        _print(lives, points, engines)
    return common.OK


def _print(lives: Lives, points: list[Life], engines: list[Life]) -> None:
    from vime.fsm import render

    out = common.console()
    out.print(render.run_line(lives))
    if points:
        out.print()
        common.print_table(out, render.points_table(points, lives.now_ns))
        if notes := render.messages(points):
            out.print()
            out.print(notes)
    if engines:
        out.print()
        common.print_table(out, render.engines_table(engines, lives.now_ns))
    if not (points or engines) and lives.num_records:
        out.print(common.NOTHING)
    elif points or engines:
        out.print()
        both = [*points, *engines]
        out.print(render.timeline(both, 0, lives.now_ns, out.width, ascii=common.is_ascii(out)))


def _as_json(life: Life, now_ns: int) -> dict[str, Any]:
    dwell_s: dict[str, float] = {}
    for span in life.all_spans(now_ns):
        dwell_s[span.state] = dwell_s.get(span.state, 0.0) + span.dwell_ns / 1e9
    facts: dict[str, Any] = {
        "run": life.key[0],
        "node": life.key[1],
        "id": life.id,
        "state": life.state,
        "finished": life.finished,
        "attempt": life.attempt,
        "start_s": life.start_ns / 1e9,
        "dwell_s": dwell_s,
        "reason": life.reason,
        "weight_version": life.weight_version,
        "rejected": life.num_rejected,
    }
    if life.machine == "point":
        message = message_in(life.detail) or None
        facts |= {"scores": scores_of(life), "metrics": metrics_of(life), "message": message}
    return facts
