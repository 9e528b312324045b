"""Whose moment in a trace is a false one: the wall clock of the same record tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vime.fsm.record import Record
from vime.fsm.replay import Divergence

_NEIGHBOURS = 2


def backwards(points: Sequence[Record]) -> Divergence | None:
    """A monotonic clock never goes back: the record that stands out, if it does."""
    for index in range(1, len(points)):
        before, record = points[index - 1], points[index]
        if record.mono_ns < before.mono_ns:
            following = points[index + 1] if index + 1 < len(points) else None
            fits = following is None or before.mono_ns <= following.mono_ns
            earlier = points[index - 2] if index > 1 else None
            rises = not fits if earlier is None else earlier.mono_ns <= record.mono_ns
            odd = before if rises else record
            return Divergence(odd, "mono_ns", "a clock that never goes back", str(odd.mono_ns))
    return None


def displaced(records: Sequence[Record], tolerance_s: float) -> tuple[int, Record] | None:
    """The one record whose two clocks do not belong together, as its neighbours' do.

    Args:
        records: of one run.
        tolerance_s: how far the clocks may be apart, in seconds.

    Returns:
        Its place, and the record as its wall clock has it; ``None`` when there is none, or more
        than one: the wall clock was set, and says nothing.
    """
    offsets = [record.wall_ns - record.mono_ns for record in records]
    limit_ns = tolerance_s * 1e9
    found = []
    for index, offset in enumerate(offsets):
        first = max(min(index - _NEIGHBOURS, len(offsets) - 1 - 2 * _NEIGHBOURS), 0)
        around = [*offsets[first:index], *offsets[index + 1 : first + 2 * _NEIGHBOURS + 1]]
        agree = len(around) > 1 and max(around) - min(around) <= limit_ns
        if agree and abs(offset - around[0]) > limit_ns:
            found.append((index, around[0]))
    if len(found) != 1:
        return None
    ((index, offset),) = found
    record = records[index]
    return index, replace(record, mono_ns=record.wall_ns - offset)
