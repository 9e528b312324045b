"""A story in one sentence: how a point ended, what on another machine decided it, and what then."""

from __future__ import annotations

import time

from vime.fsm.record import Record
from vime.fsm.sentences import message_of, sentence, subject
from vime.fsm.text import clean, duration, headline
from vime.fsm.why import Recovery, Story


def explain(story: Story) -> str | None:
    """The end of a point and the cause of it, as people tell it.

    "point 40 was skipped as pin_violation, because engine eval-1 became suspect at 12:03:07
    (misloaded: Error while deserializing header); it was restarted, and ready 31 s later".

    Returns:
        ``None`` where no other machine decided it: then its own last record says all.
    """
    if story.key[2] != "point" or len(story.chain) < 2 or not story.chain[1].crosses:
        return None
    end, cause = story.chain[0].record, _decisive(story)
    if end.trigger != "skip":
        return None
    text = f"{subject(end)} was skipped as {clean(end.reason or 'nothing', 60)}, because "
    text += f"{sentence(cause, bare=True)} at {_clock(cause)}"
    said = [clean(cause.reason, 60)] if cause.reason else []
    said += [clean(m, 300) for m in [headline(message_of(cause))] if m]
    if said:
        text += f" ({': '.join(said)})"
    told = [_recovery(r) for r in story.recoveries if r.suspect == cause]
    return "; ".join([text, *told])


def _decisive(story: Story) -> Record:
    """The record that the point's end names; of an engine that was away, why it was away."""
    first = story.chain[1].record
    for link in story.chain[1:]:
        if (link.record.machine, link.record.id) != (first.machine, first.id):
            break
        if link.record.trigger == "suspect":
            return link.record
    return first


def _recovery(recovery: Recovery) -> str:
    took = duration(recovery.end.mono_ns - recovery.suspect.mono_ns)
    match recovery.end.dest:
        case "ready" if recovery.was_restarted:
            return f"it was restarted, and ready {took} later"
        case "lost":
            return f"it was given up {took} later"
        case "stopped":
            return f"it was stopped with the run {took} later"
        case state:
            return f"it is {clean(state, 40)} when the trace ends"


def _clock(record: Record) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(record.wall_ns / 1e9))
