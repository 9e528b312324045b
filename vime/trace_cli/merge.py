"""``vime trace merge``: the traces of several nodes as one, by cause and not by clock."""

from __future__ import annotations

import argparse
import sys

from vime.fsm.encode import encode
from vime.fsm.lives import TraceClock
from vime.fsm.merge import Merge
from vime.fsm.record import FIELDS
from vime.fsm.text import count
from vime.trace_cli import common


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace merge``."""
    parser.add_argument(
        "files",
        type=common.a_path,
        metavar="FILE",
        nargs="+",
        help="the traces (or run directories) of the nodes",
    )
    common.add_output(parser)
    common.add_json(parser, "print what was merged as JSON; needs --output")
    common.add_filters(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the merged trace."""
    if args.json and args.output is None:
        raise common.UsageError("--json needs --output: otherwise the trace itself is printed")
    traces = [common.open_trace(path) for path in args.files]
    if args.output is not None:
        common.refuse_to_overwrite(args.output, traces)
    asked, clock = common.filter_of(args), TraceClock()
    merged = Merge(traces)
    with common.output(args.output) as file:
        for record in merged:
            if asked.wants(record, clock.at(record), clock):
                fields = {name: getattr(record, name) for name in FIELDS}
                file.write(encode(fields).decode() + "\n")
        for trace in traces:
            common.tell_problems(trace)
    if merged.num_broken:
        text = f"{count(merged.num_broken, 'record')} came without the cause that they name"
        sys.stderr.write(f"vime: {text}\n")
    facts = {
        "nodes": merged.nodes,
        "repeated": merged.num_repeated,
        "without_cause": merged.num_broken,
    }
    if args.json:
        common.write_json(facts)
    elif args.output is not None:
        records, nodes = (
            count(sum(merged.nodes.values()), "record"),
            count(len(merged.nodes), "node"),
        )
        sys.stdout.write(f"{records} of {nodes} merged\n")
    return common.OK
