"""Records in words: one line for a log, one sentence for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.fsm.record import Record, taken_up_from
from vime.fsm.text import clean, duration, headline

#: (machine, trigger) → what happened; ``{id}`` and ``{weights}`` are filled in.
_SENTENCES = {
    ("point", "dispatch"): "point {id} was dispatched",
    ("point", "export"): "the export of point {id} began",
    ("point", "pin"): "point {id} asked the fleet for {weights}",
    ("point", "run"): "point {id} began to run on {weights}",
    ("point", "finish"): "point {id} was scored on {weights}",
    ("point", "skip"): "point {id} was skipped",
    ("engine", "start"): "engine {id} was started",
    ("engine", "ready"): "engine {id} answered and was ready",
    ("engine", "pin"): "engine {id} began to load {weights}",
    ("engine", "serve"): "engine {id} proved that it serves {weights}",
    ("engine", "suspect"): "engine {id} became suspect",
    ("engine", "kill"): "engine {id} was killed",
    ("engine", "restart"): "engine {id} waits for its restart",
    ("engine", "abandon"): "engine {id} was given up",
    ("engine", "stop"): "engine {id} was stopped",
    ("snapshot", "write"): "the writing of snapshot {id} began",
    ("snapshot", "adopt"): "snapshot {id} was taken as it is",
    ("snapshot", "inherit"): "snapshot {id} was found whole, as the run that died had left it",
    ("snapshot", "seal"): "snapshot {id} was complete",
    ("snapshot", "abandon"): "the writing of snapshot {id} was given up",
    ("snapshot", "verify"): "snapshot {id} was verified",
    ("snapshot", "reject"): "snapshot {id} was found unfit",
    ("snapshot", "lease"): "snapshot {id} got a reader",
    ("snapshot", "leave"): "a reader left snapshot {id}",
    ("snapshot", "delete"): "snapshot {id} was deleted",
    ("snapshot", "release"): "snapshot {id} was let go, untouched",
}


def subject(record: Record) -> str:
    """Whom a record is about: ``point 40``."""
    return f"{clean(record.machine, 20)} {clean(record.id, 80)}"


def sentence(record: Record, *, bare: bool = False) -> str:
    """What happened, and why as far as the record itself says it, unless ``bare``."""
    name = clean(record.id, 80)
    taken_up = taken_up_from(record)
    if taken_up is not None:
        text = f"point {name} was taken up again, which run {clean(taken_up, 80)} had left"
    elif record.rejected:
        text = f"{clean(record.machine, 20)} {name} refused {clean(record.trigger, 40)!r}, "
        text += f"which is illegal when {clean(record.source, 40)}"
    elif (record.machine, record.trigger) in _SENTENCES:
        weights = clean(record.weight_version, 80) if record.weight_version else "its weights"
        template = _SENTENCES[record.machine, record.trigger]
        text = template.replace("{weights}", weights).replace("{id}", name)
    else:
        text = f"{clean(record.machine, 20)} {name} went from {clean(record.source, 40)} "
        text += f"to {clean(record.dest, 40)} by {clean(record.trigger, 40)!r}"
    return text if bare else ": ".join(part for part in (text, *_facts(record)) if part)


def _facts(record: Record) -> tuple[str, str]:
    reason = clean(record.reason, 60) if record.reason else ""
    return reason, clean(headline(message_of(record)), 300)


def message_of(record: Record) -> str:
    """What a record's detail says in words, as it was written; empty without such words."""
    return message_in(record.detail or {})


def message_in(detail: Mapping[str, Any]) -> str:
    """The words of a detail: its message, an engine's error, or a verifier's problems."""
    for name in ("message", "error"):
        if isinstance(detail.get(name), str) and detail[name]:
            return str(detail[name])
    problems = detail.get("problems")
    return "\n".join(map(str, problems)) if isinstance(problems, list) else ""


def line(record: Record, at_ns: int) -> str:
    """One line for a log: when, which record, which machine, which transition."""
    arrow = f"{clean(record.source, 40)} → {clean(record.dest, 40)}"
    if record.rejected:
        arrow = f"{clean(record.source, 40)}, rejected"
    parts = [
        f"+{duration(at_ns):<7}",
        f"{clean(record.node, 20)}:{record.seq:<6}",
        f"{clean(record.machine, 20)} {clean(record.id, 80)}",
        f"{clean(record.trigger, 40)} ({arrow})",
        *(part for part in _facts(record) if part),
    ]
    return "  ".join(parts)
