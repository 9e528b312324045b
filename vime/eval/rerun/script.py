"""What a trace says of a run's callers and collaborators: who did what, and when, as cues.

Every cue stands before the record that it brings about. What the dispatcher decided by itself
(``busy``, ``superseded``, its own deadlines, the order at the fleet) has no cue: it must come out
of the rerun by itself. A record that no cue precedes is such a decision.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vime.eval.config import EvalConfig
from vime.eval.dispatch import causes
from vime.eval.rerun.parts import Part, dispatched, error, output, proof, snapshot
from vime.fsm.check_rule import number
from vime.fsm.record import Record
from vime.fsm.tables import POINT


class Act(Enum):
    """What a cue asks for."""

    TAKE_UP = "the run begins with what an earlier one has left"
    ADMIT = "the caller dispatches"
    INTERRUPT = "the caller gives up waiting"
    LAUNCH = "the caller hands the capture over"
    SETTLE = "the caller has evaluated by itself"
    SNAPSHOT = "the store answers"
    PROOF = "the fleet answers"
    OUTPUT = "the evaluator answers"
    DRAIN = "the run ends what is pending"
    AT_STEP = "training has come to a step"
    EXPECT = "the record must have come out"


@dataclass(frozen=True)
class Cue:
    """One thing to do at one moment.

    Attributes:
        at_s: seconds since the first record of the run.
        act: what.
        point: whose.
        value: the answer, an exception to raise, or the record that is expected.
    """

    at_s: float
    act: Act
    point: str
    value: Any = None


class Script:
    """The cues of one run, in order.

    Args:
        records: all records of one run and node, in the order of ``seq``.

    Attributes:
        config: the limits and deadlines that the run recorded; defaults where it did not.
        has_store, has_fleet: which collaborators the run had.
        parts: point → what is known of it.
        cues: what to do.
        records: the point records.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records: list[Record] = []
        self.parts: dict[str, Part] = {}
        self._verified: dict[str, list[Record]] = {}
        for record in records:
            if record.machine == "point":
                self._take(record)
            elif record.machine == "snapshot" and record.trigger == "verify":
                self._verified.setdefault(record.id, []).append(record)
        self.has_fleet = _has_fleet(self.records)
        self.has_store = not any(
            r.trigger == "run" and (r.detail or {}).get("engines") == "shared"
            for r in self.records
        )  # fmt: skip
        self.config = _config([r for r in self.records if r.trigger == "dispatch"])
        self._times = [self._at_s(r) for r in self.records]
        self._seqs = [r.seq for r in self.records]
        self._placed: list[tuple[tuple[int, int, float], Cue]] = []
        for part in self.parts.values():
            self._find_version(part)
            self._cue_calls(part)
        for index, record in enumerate(self.records):
            self._cue_record(index, record)
        self._cue_waiting_snapshots()
        self._placed.sort(key=lambda placed: placed[0])
        self.cues = [cue for _, cue in self._placed]

    def _take(self, record: Record) -> None:
        if record.id not in self.parts:
            point = dispatched(record)
            if point is not None:
                self.parts[record.id] = Part(point)
        if record.id in self.parts:
            self.parts[record.id].records.append(record)
            self.parts[record.id].indices.append(len(self.records))
        self.records.append(record)

    def _at_s(self, record: Record) -> float:
        return (record.mono_ns - self.records[0].mono_ns) / 1e9

    def _find_version(self, part: Part) -> None:
        """One altered record is outvoted by the others."""
        told = [r.weight_version for r in part.records if r.weight_version]
        told += [r.weight_version for r in self._verifications(part) if r.weight_version]
        part.version = Counter(told).most_common(1)[0][0] if told else ""

    def _verifications(self, part: Part) -> list[Record]:
        step = part.point.rollout_id
        name = f"step_{step}" if part.point.hf_dir is None else f"hf:{step}"
        return self._verified.get(name, [])

    # -- placing --------------------------------------------------------------------------

    def _put(self, index: int, order: int, cue: Cue) -> None:
        """Place a cue before (``order`` < 0) or after the expectation of record ``index``."""
        self._placed.append(((index, order, cue.at_s), cue))

    def _put_at(self, at_s: float, part: Part, act: Act, after: int, before: int,
                value: Any = None) -> int:  # fmt: skip
        """Place a cue by time, between two records; returns the index that it stands before."""
        index = min(max(bisect_right(self._times, at_s), after + 1), before)
        if index < len(self._times):
            at_s = min(at_s, self._times[index])
        self._put(index, -2, Cue(at_s, act, part.records[0].id, value))
        return index

    # -- the caller -----------------------------------------------------------------------

    def _cue_calls(self, part: Part) -> None:
        """The hand-over, which has no record: the caller had waited for ``stall_s`` then."""
        if part.left is not None:  # nobody called
            return
        admitted = part.indices[0]
        following = part.indices[1:]
        if part.point.hf_dir is None:
            if len(part.records) < 2 or part.records[1].trigger != "export":
                return
            admitted, following = part.indices[1], part.indices[2:]
        if not self.has_store or part.end_detail.get("message") == causes.NOT_HANDED_OVER:
            return
        before = following[0] if following else len(self.records)
        for index in range(admitted + 1, before):  # one caller: it hands over, then dispatches
            if self.records[index].trigger == "dispatch" or _is_drain(self.records[index]):
                before = index
                break
        at_s = self._times[part.indices[0]] + part.stall_s
        self._put_at(at_s, part, Act.LAUNCH, admitted, before, part.stall_s)

    # -- records --------------------------------------------------------------------------

    def _cue_record(self, index: int, record: Record) -> None:
        at_s = self._times[index]
        self._put(index, 0, Cue(at_s, Act.EXPECT, record.id, record))
        part = self.parts.get(record.id)
        if part is None:
            return
        found = self._answer(part, record)
        if found is not None:
            self._put(index, -1, Cue(at_s, found[0], record.id, found[1]))
        lag = (record.detail or {}).get("lag_steps")
        if record.dest in POINT.terminal and isinstance(lag, int) and lag > 0 and index:
            step = Cue(self._times[index - 1], Act.AT_STEP, record.id, part.point.rollout_id + lag)
            self._put(index - 1, 1, step)

    def _answer(self, part: Part, record: Record) -> tuple[Act, Any] | None:
        """Who made ``record`` happen by which answer; ``None``: the dispatcher by itself."""
        match record.trigger:
            case "dispatch":
                return (Act.ADMIT, part.point) if part.left is None else (Act.TAKE_UP, part.left)
            case "pin":
                return Act.SNAPSHOT, snapshot(part)
            case "run" if record.source == "pinning":
                return Act.PROOF, proof(part, record)
            case "finish":
                return (Act.OUTPUT if self.has_store else Act.SETTLE), output(record)
            case "skip":
                return self._ending(part, record)
        return None

    def _ending(self, part: Part, record: Record) -> tuple[Act, Any] | None:
        message = str((record.detail or {}).get("message", ""))
        if record.reason == "cancelled" and message == causes.NO_SLOT:
            return Act.INTERRUPT, None
        if _is_drain(record):
            return Act.DRAIN, None
        if is_own(record) or (part.left is not None and part.left.loss is not None):
            return None
        if record.reason == "export_failed" and message.startswith(causes.NO_DIRECTORY):
            part.begin_error = OSError(message.removeprefix(causes.NO_DIRECTORY))
            return None
        raised = error(part, record, message)
        if not self.has_store:
            return Act.SETTLE, raised
        if record.source == "running":
            return Act.OUTPUT, raised
        if record.source == "pinning":
            return Act.PROOF, raised
        if record.weight_version is not None:
            part.lease_error = raised
            return Act.SNAPSHOT, snapshot(part)
        return Act.SNAPSHOT, raised

    # -- snapshots whose point waits for its turn without a record ----------------------------

    def _cue_waiting_snapshots(self) -> None:
        """Without a fleet a point's snapshot is ready some time before it runs, or is skipped."""
        if self.has_fleet or not self.has_store:
            return
        placed, placed_s, latest_run = 0, 0.0, 0
        turn_ended = -1
        for index, record in enumerate(self.records):
            part = self.parts.get(record.id)
            if part is None:
                continue
            if record.source == "running":
                turn_ended = index
            runs = record.trigger == "run"
            if record.source not in ("queued", "exporting") or not (
                runs or (record.weight_version and is_own(record))
            ):
                continue
            had_to_wait = turn_ended >= 0 and self._times[turn_ended] == self._times[index]
            otherwise = (0 if had_to_wait else index) if runs else latest_run
            at_s, after = self._ready(part, record, otherwise)
            if runs:  # turns are given in the order of the calls
                placed_s, after = max(placed_s, at_s), max(after, placed - 1)
                placed = self._put_at(placed_s, part, Act.SNAPSHOT, after, index, snapshot(part))
                latest_run = index
            else:
                before = index
                if record.reason == "superseded":  # by the point whose dispatch was the cause
                    before = bisect_left(self._seqs, record.cause_seq or 0)
                self._put_at(at_s, part, Act.SNAPSHOT, after, before, snapshot(part))

    def _ready(self, part: Part, record: Record, otherwise: int) -> tuple[float, int]:
        """When the snapshot of a point was ready, and the record before that moment.

        It is not told of a given checkpoint in a trace without snapshots: any moment of its wait
        will do then, and ``otherwise`` stands for one.
        """
        index = part.indices[part.records.index(record) - 1]
        told = [r for r in self._verifications(part) if r.seq < record.seq]
        if told:
            return self._at_s(told[-1]), index
        export_s = part.metric("eval/export_time_seconds")
        if export_s is not None:
            return self._times[index] + export_s, index
        otherwise = max(index, otherwise)
        return self._times[otherwise], otherwise


def is_own(record: Record) -> bool:
    """Whether the dispatcher ended the point by itself, unasked."""
    message = str((record.detail or {}).get("message", ""))
    if record.source == "queued" and record.reason == "busy":
        return True
    if record.source in ("queued", "exporting", "pinning") and record.reason in (
        "superseded", "cancelled",
    ):  # fmt: skip
        return True
    if record.source == "running" and message == causes.STILL_PENDING:
        return True
    return str(record.reason).startswith("timeout_") and message.startswith(
        tuple(f"{wait} took longer than " for wait in causes.WAITS)
    )


def _is_drain(record: Record) -> bool:
    """Whether the run's end, or that of the patience in ``drain``, cancelled the point."""
    message = (record.detail or {}).get("message")
    return record.reason == "cancelled" and message in (
        causes.STILL_PENDING,
        causes.NOT_HANDED_OVER,
    )


def _has_fleet(records: list[Record]) -> bool:
    """Without a fleet the wait for a turn counts to the state ``exporting``."""
    told = [
        (number(r, "timeouts_s", "export"), number(r, "deadlines_s", "exporting"))
        for r in records
        if r.trigger == "dispatch"
    ]
    known = [export == longest for export, longest in told if export is not None]
    if not known:
        return any(r.trigger == "pin" for r in records)
    return 2 * sum(known) > len(known)


def _config(dispatches: list[Record]) -> EvalConfig:
    def told(*names: str) -> Any:
        values: list[str] = []
        for record in dispatches:
            value: Any = record.detail
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                values.append(json.dumps(value))
        return json.loads(Counter(values).most_common(1)[0][0]) if values else None

    known = {
        "overflow_policy": told("policy"),
        "max_in_flight": told("max_in_flight"),
        "keep_snapshots": told("keep_snapshots"),
        "export_timeout_s": told("timeouts_s", "export"),
        "pin_timeout_s": told("timeouts_s", "pin"),
        "eval_timeout_s": told("timeouts_s", "eval"),
        "backpressure_timeout_s": told("timeouts_s", "backpressure"),
    }
    given = {name: value for name, value in known.items() if value is not None}
    for name, value in given.items():
        if type(value) is not str and name == "overflow_policy":
            raise ValueError(f"policy {value!r} in a dispatch record: expected a word")
        if name != "overflow_policy" and (type(value) not in (int, float) or value < 0):
            raise ValueError(f"{name} {value!r} in a dispatch record: expected a number, 0 or more")
    config = EvalConfig(uses_snapshots=True)
    for name, value in given.items():  # an older run may have had more patience than flags allow
        object.__setattr__(config, name, value)
    return config
