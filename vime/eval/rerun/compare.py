"""Compares a record that came out of a rerun with the one that was recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from vime.eval.dispatch import causes
from vime.eval.dispatch.point_life import MAX_MESSAGE
from vime.fsm.record import CONTINUES, Record
from vime.fsm.replay import Divergence

_FIELDS = ("trigger", "source", "dest", "rejected", "reason", "weight_version")

#: What was measured by a clock, and comes out a little different.
_TIMED = frozenset(
    {
        "duration_s",
        "stall_s",
        "eval/duration_seconds",
        "eval/stall_seconds",
        "eval/export_time_seconds",
        "eval/pin_seconds",
    }
)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def compare(
    recorded: Record,
    found: Record,
    *,
    late_s: float,
    tolerance_s: float,
    recorded_seq: Callable[[int | None], int | None],
) -> Divergence | None:
    """The first difference.

    Args:
        recorded: the record of the trace.
        found: the record of the rerun.
        late_s: how much later it came, in seconds; negative: earlier.
        tolerance_s: how far times may be apart.
        recorded_seq: the recorded ``seq`` that stands for one of the rerun.
    """
    for name in _FIELDS:
        ours, theirs = getattr(found, name), getattr(recorded, name)
        if ours != theirs:
            return Divergence(recorded, name, _text(ours), _text(theirs))
    if abs(late_s) > tolerance_s:
        when = f"{abs(late_s):.6g} s {'later' if late_s > 0 else 'earlier'}"
        return Divergence(recorded, "mono_ns", when, _text(recorded.mono_ns))
    cause = recorded_seq(found.cause_seq)
    if cause != recorded.cause_seq:
        return Divergence(recorded, "cause_seq", _text(cause), _text(recorded.cause_seq))
    for name, ours, theirs in _details(found.detail or {}, recorded.detail or {}):
        if not _alike(name.rpartition(".")[2], ours, theirs, tolerance_s):
            return Divergence(recorded, name, _text(ours), _text(theirs))
    return None


def _details(ours: Any, theirs: Any, path: str = "detail") -> Iterator[tuple[str, Any, Any]]:
    """The leaves of what was recorded, beside ours; an older record may have fewer."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in theirs.items():
            if (path, name) == ("detail", CONTINUES):  # said by the trace, not by the dispatcher
                continue
            yield from _details(ours.get(name), value, f"{path}.{name}")
    else:
        yield path, ours, theirs


def _alike(name: str, ours: Any, theirs: Any, tolerance_s: float) -> bool:
    if name in _TIMED and _is_number(ours) and _is_number(theirs):
        return bool(abs(ours - theirs) <= tolerance_s)
    if name == "message" and isinstance(ours, str) and isinstance(theirs, str):
        if theirs.startswith("Traceback "):  # the rerun's own traceback ends with the recorded one
            return theirs.strip() in ours or _have_one_end(ours, theirs)
        if theirs.startswith(causes.WAITS) and " (--" not in theirs:
            # An older record says what was left of the deadline, and not whose it was.
            return ours.partition(" took ")[0] == theirs.partition(" took ")[0]
        if theirs.startswith(causes.WAITS):
            return _alike_but_for_numbers(ours, theirs, tolerance_s)
    return bool(ours == theirs)


def _have_one_end(ours: str, theirs: str) -> bool:
    """Of a message that was shortened, the end is whole."""
    is_cut = len(ours) > MAX_MESSAGE - 100
    return is_cut and ours.strip()[-MAX_MESSAGE // 3 :] == theirs.strip()[-MAX_MESSAGE // 3 :]


def _alike_but_for_numbers(ours: str, theirs: str, tolerance_s: float) -> bool:
    """Four digits of a wait that began a moment after its clock."""
    mine, other = _NUMBER.split(ours), _NUMBER.split(theirs)
    if mine[::2] != other[::2]:
        return False
    pairs = zip(mine[1::2], other[1::2], strict=True)
    return all(abs(float(a) - float(b)) <= tolerance_s + 1e-3 * float(b) for a, b in pairs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return "nothing" if value is None else str(value)
