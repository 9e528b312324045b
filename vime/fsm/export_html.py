"""A trace as one HTML page: curve, timeline, skips, and for each point the chain of causes.

The page is self-contained and asks the network for nothing. What the trace holds (prompts, paths,
messages) is data in it: embedded as JSON without any ``<``, shown as text, under a content
security policy that runs no script but the page's own.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from importlib.resources import files
from typing import Any

from vime.fsm.filters import Filter
from vime.fsm.lives import Key, Life, Lives, lives_of, scores_of
from vime.fsm.read import TraceFile
from vime.fsm.render import LOOKS
from vime.fsm.sentences import message_in
from vime.fsm.tables import POINT
from vime.fsm.text import clean, count, duration, headline
from vime.fsm.why import Link, stories

KINDS = ("point", "engine")
MAX_POINTS = 2_000
"""The page shows so many of the latest points, and says how many there were."""

_MAX_SPANS = 20_000
_CHAIN_STEPS = 300
_CHAIN_LINKS = 12


def html_page(trace: TraceFile, filter: Filter | None = None) -> str:
    """The whole page; reads ``trace`` several times."""
    asked = filter or Filter()
    lives = lives_of(trace, machines=KINDS, keep=asked.wants_life, last=MAX_POINTS)
    notes = [clean(problem) for problem in trace.problems]
    wanted = [
        life
        for machine in KINDS
        for life in lives.of(machine)
        if asked.wants_life(life, lives.now_ns, lives.clock)
    ]
    points = [life for life in wanted if life.machine == "point"]
    dropped = lives.num_dropped.get("point", 0)
    if dropped:
        notes.append(f"the last {len(points)} of {len(points) + dropped} points are shown")
    shown = [*points, *(life for life in wanted if life.machine == "engine")]
    chains = _chains(trace)
    start_ns = min((life.start_ns for life in points), default=0)
    runs = ", ".join(clean(run, 60) for run in lives.runs)
    data = {
        "title": runs or "no run",
        "summary": f"{count(lives.num_records, 'record')} over {duration(lives.now_ns)}",
        "notes": notes,
        "states": [*LOOKS, *POINT.terminal],
        "start_ms": start_ns / 1e6 if dropped else 0,
        "end_ms": lives.now_ns / 1e6,
        "lives": [_life(life, lives, chains.get(life.key, [])) for life in shown],
    }
    return _fill(data)


def _chains(trace: TraceFile) -> dict[Key, list[dict[str, Any]]]:
    return {
        story.key: [_link(link) for link in story.chain[:_CHAIN_LINKS]]
        for story in stories(trace, KINDS, with_own=False, max_steps=_CHAIN_STEPS, last=MAX_POINTS)
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "text": str(link),
        "ms": link.at_ns / 1e6,
        "crosses": link.crosses,
    }


def _life(life: Life, lives: Lives, chain: list[dict[str, Any]]) -> dict[str, Any]:
    spans = list(life.all_spans(lives.now_ns))[-_MAX_SPANS:]
    return {
        "machine": life.machine,
        "id": clean(life.id, 200),
        "state": life.state,
        "reason": clean(life.reason or "", 200),
        "message": clean(headline(message_in(life.detail)), 500),
        "weights": clean(life.weight_version or "", 200),
        "scores": {clean(name, 200): score for name, score in scores_of(life).items()},
        "spans": [[span.state, span.start_ns / 1e6, span.end_ns / 1e6] for span in spans],
        "end_ms": life.entered_ns / 1e6,
        "chain": chain,
    }


def _fill(data: dict[str, Any]) -> str:
    """Put everything into the page's frame; each part is fit for its place."""
    page = files("vime.fsm").joinpath("page")
    style, script = (page.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    parts = {
        "title": html.escape(data["title"]),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "data": _as_script_text(data),
    }
    frame = page.joinpath("page.html").read_text("utf-8")
    # In one pass: what a trace holds may look like a place to fill.
    return re.sub(r"\{(\w+)\}", lambda place: parts[place[1]], frame)


def _as_script_text(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment there."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()
