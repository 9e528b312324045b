"""``vime trace why``: the chain of causes behind what became of a point."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict

from vime.fsm.explain import explain
from vime.fsm.lives import TraceClock
from vime.fsm.read import TraceFile
from vime.fsm.sentences import message_of
from vime.fsm.text import clean, duration
from vime.fsm.why import Link, Story, stories
from vime.trace_cli import common

_KINDS = ("engine", "snapshot", "point")


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace why``."""
    common.add_file(parser)
    parser.add_argument(
        "point", metavar="POINT", help="an eval point's id, or engine:ID, or snapshot:ID"
    )
    common.add_json(parser)
    common.add_filters(parser, but=("--point",))
    parser.set_defaults(run=run, filter_point=[])


def run(args: argparse.Namespace) -> int:
    """Print the machine's own records and the causes of the last one."""
    trace = common.open_trace(args.file)
    machine, name = _named(args.point)
    told = stories(trace, [machine], [name])
    common.tell_problems(trace)
    if not told:
        raise common.UsageError(f"{args.file}: no {machine} {name!r}; {_known(trace, machine)}")
    asked = common.filter_of(args)
    clock = TraceClock()
    for record in trace:  # the first one says when the trace begins
        clock.at(record)
        break

    def wanted(links: Iterable[Link]) -> list[Link]:
        return [link for link in links if asked.wants(link.record, link.at_ns, clock)]

    if args.json:
        common.write_json(
            [_as_json(story, wanted(story.own), wanted(story.chain)) for story in told]
        )
        return common.OK
    for story in told:
        _print(story, wanted(story.own), wanted(story.chain))
    return common.OK


def _named(text: str) -> tuple[str, str]:
    """Machine and id: ``40`` and ``hf:0`` are points, ``engine:eval-0`` is not."""
    kind, _, name = text.partition(":")
    return (kind, name) if kind in _KINDS and name else ("point", text)


def _known(trace: TraceFile, machine: str) -> str:
    ids = dict.fromkeys(record.id for record in trace if record.machine == machine)
    if not ids:
        return f"the trace has no {machine}s"
    some = ", ".join(clean(name, 40) for name in list(ids)[:8])
    return f"the trace has {some}{', …' if len(ids) > 8 else ''}"


def _print(story: Story, own: list[Link], chain: list[Link]) -> None:
    last = story.own[-1]
    sys.stdout.write(f"{last}\n")
    for text in message_of(last.record).splitlines()[:40]:
        sys.stdout.write(f"  | {clean(text, 300)}\n")
    told = explain(story)
    if told:
        sys.stdout.write(f"{told}\n")
    sys.stdout.write("because, latest first:\n")
    for link in chain[1:]:
        mark = "because " if link.crosses else "after "
        sys.stdout.write(f"  +{duration(link.at_ns):<8} {mark}{link}\n")
    sys.stdout.write("its own life:\n")
    for link in own:
        sys.stdout.write(f"  +{duration(link.at_ns):<8} {link}\n")


def _as_json(story: Story, own: list[Link], chain: list[Link]) -> dict[str, object]:
    return {
        "run": story.key[0],
        "node": story.key[1],
        "machine": story.key[2],
        "id": story.key[3],
        "own": [_link(link) for link in own],
        "chain": [_link(link) for link in chain],
        "told": explain(story),
    }


def _link(link: Link) -> dict[str, object]:
    return {
        "at_s": link.at_ns / 1e9,
        "text": str(link),
        "crosses": link.crosses,
        "left_out": link.skipped,
        "record": asdict(link.record),
    }
