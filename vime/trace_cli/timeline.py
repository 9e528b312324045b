"""``vime trace timeline``: bars of every point and engine over time."""

from __future__ import annotations

import argparse

from vime.trace_cli import common

KINDS = ("point", "engine", "snapshot")


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace timeline``."""
    common.add_file(parser)
    common.add_json(parser)
    common.add_filters(parser)
    common.add_last(parser)
    parser.add_argument(
        "--machine",
        action="append",
        choices=KINDS,
        help="only this kind of machine (default: points and engines)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the bars between --since and --until, or JSON."""
    trace = common.open_trace(args.file)
    lives, shown = common.read_lives(args, trace, args.machine or KINDS[:2])
    asked = common.filter_of(args)
    start_ns = asked.since.on(lives.clock) if asked.since else 0
    end_ns = min(asked.until.on(lives.clock), lives.now_ns) if asked.until else lives.now_ns
    if args.json:
        common.write_json(
            [
                {
                    "machine": life.machine,
                    "id": life.id,
                    "state": life.state,
                    "spans": [
                        {"state": state, "start_s": start / 1e9, "end_s": end / 1e9}
                        for state, start, end in life.all_spans(lives.now_ns)
                    ],
                }
                for life in shown
            ]
        )
        return common.OK
    from vime.fsm import render

    out = common.console()
    if shown:
        out.print(render.timeline(shown, start_ns, end_ns, out.width, ascii=common.is_ascii(out)))
    else:
        out.print(common.NOTHING)
    return common.OK
