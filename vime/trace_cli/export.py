"""``vime trace export``: a trace for Perfetto, as Mermaid diagrams, or as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vime.fsm.filters import Filter
from vime.fsm.read import TraceFile
from vime.trace_cli import common

FORMATS = ("perfetto", "mermaid", "html")


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace export``."""
    common.add_file(parser)
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to make of it")
    common.add_output(parser)
    common.add_json(parser, "print what was written as JSON; needs --output")
    common.add_filters(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the trace in the format asked for."""
    if args.json and args.output is None:
        raise common.UsageError("--json needs --output: otherwise the export itself is printed")
    trace = common.open_trace(args.file)
    with common.output(args.output) as file:
        for piece in _pieces(args.format, trace, common.filter_of(args)):
            file.write(piece)
        common.tell_problems(trace)  # here: a file without a record leaves no output behind
    if args.json:
        facts = {"format": args.format, "output": args.output, "records": trace.num_records}
        common.write_json(facts)
    return common.OK


def _pieces(format: str, trace: TraceFile, asked: Filter) -> Iterator[str]:
    if format == "perfetto":
        from vime.fsm.export_perfetto import perfetto

        yield from perfetto(trace, asked)
    elif format == "html":
        from vime.fsm.export_html import html_page

        yield html_page(trace, asked)
    else:
        from vime.fsm.export_mermaid import mermaid_states

        for line in mermaid_states(trace, asked):
            yield line + "\n"
