"""Reads the evidence of a run: what became of each point, and which fault it is due to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.faults import KINDS, Fault
from bench.chaos.weights import NAME
from bench.json_lines import json_lines
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.fsm.record import Record

#: Why a point that no fault hit may be skipped while the fleet is not whole.
_WAITING = frozenset({"unhealthy", "timeout_pin", "busy"})

_SCORE = f"eval/{NAME}"


@dataclass(frozen=True)
class Injected:
    """A fault that has struck.

    Attributes:
        fault: of the schedule.
        mono_ns: when.
        points: those that were at work then.
        survivors: what should have died with it, and was alive 10 s later.
    """

    fault: Fault
    mono_ns: int
    points: tuple[int, ...]
    survivors: tuple[str, ...] = ()


@dataclass
class Point:
    """What the trace and the metrics say of one point.

    Attributes:
        ends: its terminal states, in the trace.
        reason: why it was skipped.
        ended_ns: when.
        outcomes: the lines of the metrics file that report it.
    """

    ends: list[str] = field(default_factory=list)
    reason: str | None = None
    ended_ns: int = 0
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """As reported; ``None`` without one."""
        found = [o["metrics"][_SCORE] for o in self.outcomes if _SCORE in o["metrics"]]
        return found[0] if found else None


@dataclass
class Cost:
    """What one fault came to.

    Attributes:
        skipped: the points that have no score because of it.
        recovery_s: from its injection until every engine that it cost was up again; ``None``
            where it cost none.
        cold_start_s: how much of that the (slowest) engine took to start.
    """

    skipped: list[int] = field(default_factory=list)
    recovery_s: float | None = None
    cold_start_s: float | None = None


@dataclass
class Evidence:
    """A run as its files tell it.

    Attributes:
        records: its trace.
        points: by rollout id.
        injected: by number in the schedule.
    """

    records: list[Record]
    points: dict[int, Point]
    injected: dict[int, Injected]

    @classmethod
    def read(cls, root: Path, schedule: Sequence[Fault]) -> Evidence:
        """Read everything below the root of a run."""
        records = list(read_trace(root / "run" / "trace.jsonl"))
        points = points_of(records, _lines(root / "run" / "metrics.jsonl"))
        return cls(records, points, injected_of(schedule, _lines(root / "injected.jsonl")))


def _lines(path: Path) -> list[dict[str, Any]]:
    return json_lines(path) if path.exists() else []


def points_of(records: Iterable[Record], outcomes: Iterable[dict[str, Any]]) -> dict[int, Point]:
    """Every point that was dispatched or reported."""
    points: dict[int, Point] = {}
    for record in records:
        if record.machine != "point" or record.rejected:
            continue
        point = points.setdefault(int(record.id), Point())
        if record.dest in ("done", "skipped"):
            point.ends.append(record.dest)
            point.reason, point.ended_ns = record.reason, record.mono_ns
    for outcome in outcomes:
        points.setdefault(outcome["rollout_id"], Point()).outcomes.append(outcome)
    return points


def injected_of(schedule: Sequence[Fault], rows: Iterable[dict[str, Any]]) -> dict[int, Injected]:
    """The faults that have struck, by their number in the schedule."""
    rows = list(rows)
    survivors = {row["fault"]: tuple(row["survivors"]) for row in rows if "survivors" in row}
    return {
        row["fault"]: Injected(
            schedule[row["fault"]],
            row["mono_ns"],
            tuple(row["points"]),
            survivors.get(row["fault"], ()),
        )
        for row in rows
        if "mono_ns" in row
    }


class Attribution:
    """Which fault each skip and each restart is due to.

    Attributes:
        costs: by number of the fault.
        unattributed: a sentence for each point without exactly one end and one report, and for
            each skip that no fault explains.
        wrongly_done: points with a score whose snapshot was damaged.
        restarts: how many engines were started again.
        restarts_without_fault: those that no fault explains.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.costs = {number: Cost() for number in evidence.injected}
        self._whole_ns: dict[int, int] = {}
        self.restarts = self.restarts_without_fault = 0
        self._attribute_deaths()
        self.unattributed = list(self._attribute_points())
        self.wrongly_done = [
            point
            for hit in evidence.injected.values()
            for point in hit.points
            if not KINDS[hit.fault.kind].may_finish and "done" in evidence.points[point].ends
        ]

    # -- engines -------------------------------------------------------------------------------

    def _attribute_deaths(self) -> None:
        engines = [r for r in self._evidence.records if r.machine == "engine" and not r.rejected]
        taken: set[int] = set()
        for index, record in enumerate(engines):
            self.restarts += record.trigger == "restart"
            if record.trigger != "suspect":
                continue
            number = self._fault_of(record, taken)
            if number is None:
                self.restarts_without_fault += 1
                continue
            if KINDS[self._evidence.injected[number].fault.kind].engines == 1:
                taken.add(number)
            later = (r for r in engines[index:] if (r.id, r.trigger) == (record.id, "ready"))
            ready = next(later, None)
            self._note_recovery(number, ready)

    def _fault_of(self, suspect: Record, taken: set[int]) -> int | None:
        """The last fault before that which can have brought the engine down."""
        found = None
        for number, hit in self._evidence.injected.items():
            kind = KINDS[hit.fault.kind]
            if not kind.engines or hit.mono_ns > suspect.mono_ns or number in taken:
                continue
            if kind.may_finish:
                fits = suspect.id == f"engine_{hit.fault.engine}"
            else:
                fits = _step_of(suspect) in hit.points
            if fits:
                found = number
        return found

    def _note_recovery(self, number: int, ready: Record | None) -> None:
        hit, cost = self._evidence.injected[number], self.costs[number]
        if ready is None:  # the run ended before
            self._whole_ns[number] = max(r.mono_ns for r in self._evidence.records)
            return
        assert ready.detail is not None
        recovery_s = (ready.mono_ns - hit.mono_ns) / 1e9
        if cost.recovery_s is None or recovery_s > cost.recovery_s:
            cost.recovery_s, cost.cold_start_s = recovery_s, float(ready.detail["seconds"])
        self._whole_ns[number] = max(self._whole_ns.get(number, 0), ready.mono_ns)

    # -- points --------------------------------------------------------------------------------

    def _attribute_points(self) -> Iterable[str]:
        for number, point in sorted(self._evidence.points.items()):
            reported = [outcome["state"] for outcome in point.outcomes]
            if len(point.ends) != 1 or reported != point.ends:
                yield f"point {number} ended as {point.ends} and was reported as {reported}"
            elif point.ends == ["skipped"]:
                fault = self._cause_of(number, point)
                if fault is None:
                    detail = " ".join(str(point.outcomes[0]["detail"]).split())
                    yield f"point {number} was skipped as {point.reason}: {detail[:300]}"
                else:
                    self.costs[fault].skipped.append(number)

    def _cause_of(self, number: int, point: Point) -> int | None:
        hits = self._evidence.injected.items()
        for fault, hit in hits:
            if number in hit.points and point.reason in KINDS[hit.fault.kind].reasons:
                return fault
        for fault, hit in hits:
            if point.reason in _WAITING and hit.mono_ns <= point.ended_ns <= self._whole_ns.get(
                fault, 0
            ):
                return fault
        return None

    @property
    def skipped_by_reason(self) -> Counter[str]:
        """How many points were skipped for each reason."""
        points = self._evidence.points.values()
        return Counter(str(p.reason) for p in points if "skipped" in p.ends)


def _step_of(record: Record) -> int | None:
    """The point whose weights an engine carries or awaits."""
    parts = (record.weight_version or "").split(":")
    return int(parts[1]) if len(parts) == 3 else None


def violations_of(records: Iterable[Record], *, ended: bool) -> list[str]:
    """The invariants that a trace breaks, one sentence each."""
    return [f"{broken.invariant}: {broken.text}" for broken in check(records, ended=ended)]
