"""What the earlier runs of a directory came to: their outcomes, and the points that they left.

The trace is the truth of what happened, ``metrics.jsonl`` of what was reported. An end is in the
trace before its outcome is reported, so a run that is killed in between leaves an outcome that
has to be reported by the next one; and whatever stands in ``metrics.jsonl`` is reported no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from vime.eval.contracts import EvalPoint, Outcome
from vime.eval.dispatch.point_life import life_id, point_of
from vime.fsm.read import read_trace
from vime.fsm.record import Record
from vime.fsm.tables import POINT


@dataclass(frozen=True)
class LeftPoint:
    """A point that has no end, because its run was cut off.

    Attributes:
        point: what was dispatched.
        state: where it stood.
        run_id: the run that left it.
        last_seq: its last record.
        attempt: the number of its next life.
        loss: why it cannot be evaluated any more; ``None``: its weights are still there.
    """

    point: EvalPoint
    state: str
    run_id: str
    last_seq: int
    attempt: int
    loss: str | None = None


@dataclass
class Past:
    """What earlier runs left in a run's directory.

    Attributes:
        run_ids: the runs, in the order of their first records.
        next_seq: the first ``seq`` that is free.
        outcomes: of the points that have ended, in the order of their ends.
        unreported: those of them that are not in ``metrics.jsonl``.
        left: the points that have no end, in the order of their dispatch.
    """

    run_ids: list[str] = field(default_factory=list)
    next_seq: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    unreported: list[Outcome] = field(default_factory=list)
    left: list[LeftPoint] = field(default_factory=list)


@dataclass
class _Known:
    """What the trace has told of a point so far."""

    point: EvalPoint
    last: Record


def read_past(trace_path: Path, metrics_path: Path, node: str) -> Past:
    """Read the trace and what was reported; neither may be written to meanwhile.

    Args:
        trace_path: the trace.
        metrics_path: ``metrics.jsonl``; it may be missing.
        node: whose records count.

    Raises:
        TraceUnreadableError: there is no trace.
        OSError: ``metrics.jsonl`` cannot be read.
    """
    past = Past()
    ended: dict[str, Outcome] = {}
    pending: dict[str, _Known] = {}
    for record in read_trace(trace_path):
        if record.node != node:
            continue
        past.next_seq = max(past.next_seq, record.seq + 1)
        if record.run_id not in past.run_ids:
            past.run_ids.append(record.run_id)
        if record.machine == "point" and not record.rejected:
            _take(record, pending, ended)
    reported = dict(_reported(metrics_path))
    # A record that a full disk has swallowed may lack here what was reported all the same.
    past.outcomes = list({**reported, **ended}.values())
    past.unreported = [o for name, o in ended.items() if name not in reported]
    past.left = [
        LeftPoint(known.point, r.dest, r.run_id, r.seq, r.attempt + 1)
        for name, known in pending.items()
        if name not in reported
        for r in (known.last,)
    ]
    return past


def _take(record: Record, pending: dict[str, _Known], ended: dict[str, Outcome]) -> None:
    if record.trigger == "dispatch":
        hf_dir = (record.detail or {}).get("hf_dir")
        point = point_of(record, Path(hf_dir) if isinstance(hf_dir, str) else None)
        if point is not None:
            pending[record.id] = _Known(point, record)
        return
    known = pending.get(record.id)
    if known is None:
        return
    known.last = record
    if record.dest in POINT.terminal:
        ended[record.id] = outcome_of(known.point, record)
        del pending[record.id]


def outcome_of(point: EvalPoint, end: Record) -> Outcome:
    """The outcome that was reported, or was about to be, when ``end`` was written."""
    detail = end.detail or {}
    message = detail.get("message")
    metrics = detail.get("metrics")
    return Outcome(
        rollout_id=point.rollout_id,
        state=end.dest,
        reason=end.reason,
        detail=message if isinstance(message, str) else None,
        weight_version=end.weight_version,
        metrics=_numbers(metrics if isinstance(metrics, dict) else {}),
        lag_steps=int(_number(detail.get("lag_steps"))),
        duration_s=_number(detail.get("duration_s")),
        stall_s=_number(detail.get("stall_s")),
        hf_dir=None if point.hf_dir is None else str(point.hf_dir),
    )


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else 0.0


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """JSON has no NaN: what it became ``null`` for is one again."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in metrics.items()
        if value is None or isinstance(value, (int, float))
    }


def _reported(path: Path) -> Iterator[tuple[str, Outcome]]:
    """Point → outcome, of the lines of ``metrics.jsonl``."""
    names = {f.name for f in fields(Outcome)}
    for line in _lines(path):
        try:
            told = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # torn when an earlier run was killed, and reported anew since
        if not isinstance(told, dict) or type(told.get("rollout_id")) is not int:
            continue
        if not names <= told.keys() or not isinstance(told["metrics"], dict):
            continue
        values = {name: told[name] for name in names}
        values["metrics"] = _numbers(told["metrics"])
        outcome = Outcome(**values)
        yield life_id(outcome), outcome


def _lines(path: Path) -> Iterable[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        return
