"""A trace as a Mermaid gantt chart: one section a machine, one bar a stay in a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vime.fsm.lives import Life

_LOOKS = {"running": "active, ", "serving": "active, ", "suspect": "crit, ", "dead": "crit, "}


def mermaid_gantt(lives: Iterable[Life], now_ns: int) -> Iterator[str]:
    """The chart line by line; the axis shows minutes and seconds since the trace's start.

    Mermaid wants whole milliseconds; a shorter stay is drawn as one.
    """
    yield "gantt"
    yield "    title States of the run"
    yield "    dateFormat x"
    yield "    axisFormat %H:%M:%S"
    for life in lives:
        yield f"    section {_plain(f'{life.machine} {life.id}')}"
        for span in life.all_spans(now_ns):
            start_ms = span.start_ns // 1_000_000
            end_ms = max(span.end_ns // 1_000_000, start_ms + 1)
            look = _LOOKS.get(span.state, "")
            yield f"    {_plain(span.state)} :{look}{start_ms}, {end_ms}"
        if life.finished:
            at_ms = life.entered_ns // 1_000_000
            reason = f" {life.reason}" if life.state == "skipped" and life.reason else ""
            look = "crit, " if life.state in ("skipped", "lost") else "done, "
            yield f"    {_plain(life.state + reason)} :milestone, {look}{at_ms}, {at_ms}"


def _plain(text: str) -> str:
    """Without the characters that mean something to Mermaid."""
    kept = "".join(c if c.isalnum() or c in " _-." else " " for c in text)
    return " ".join(kept.split())[:80] or "-"
