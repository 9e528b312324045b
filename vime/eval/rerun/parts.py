"""What a trace tells of one point: its records, and the answers that its collaborators gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.eval.contracts import EngineProof, EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.dispatch.point_life import point_of
from vime.eval.journal.past import LeftPoint
from vime.fsm.record import TAKEN_UP, Record
from vime.fsm.tables import POINT
from vime.rollout.checkpoint_eval import EvalSkip


class RecordedError(Exception):
    """Stands for an exception that is known by its recorded traceback only."""


@dataclass
class Part:
    """What is known of one point.

    Attributes:
        point: what was dispatched.
        records: its records, in order.
        indices: where they stand among the point records of the run.
        version: the weights of its snapshot, as most of its records say.
        begin_error: what the store said instead of making a directory.
        lease_error: what the store raised instead of a lease.
    """

    point: EvalPoint
    records: list[Record] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    version: str = ""
    begin_error: OSError | None = None
    lease_error: Exception | None = None

    @property
    def left(self) -> LeftPoint | None:
        """What an earlier run had left of it; ``None`` when a caller dispatched it."""
        record = self.records[0]
        told = (record.detail or {}).get(TAKEN_UP)
        if not isinstance(told, dict) or record.cause_seq is None:
            return None
        loss = told.get("loss")
        return LeftPoint(
            self.point,
            str(told.get("state")),
            str(told.get("run_id")),
            record.cause_seq,
            record.attempt,
            None if loss is None else str(loss),
        )

    @property
    def end(self) -> Record | None:
        """Its last record, if that is an end."""
        last = self.records[-1]
        return last if last.dest in POINT.terminal else None

    @property
    def end_detail(self) -> dict[str, Any]:
        """The detail of its end, as far as there is one."""
        return (self.end and self.end.detail) or {}

    @property
    def stall_s(self) -> float:
        """Seconds that its caller waited."""
        value = self.end_detail.get("stall_s")
        return float(value) if isinstance(value, (int, float)) else 0.0

    def metric(self, name: str) -> float | None:
        """A number among the metrics of its end."""
        metrics = self.end_detail.get("metrics")
        value = metrics.get(name) if isinstance(metrics, dict) else None
        return float(value) if isinstance(value, (int, float)) else None


#: What the dispatcher itself adds to the metrics of an evaluation.
TIMINGS = frozenset(
    f"eval/{name}"
    for name in ("step", "lag_steps", "duration_seconds", "stall_seconds", "export_time_seconds",
                 "pin_seconds", "transfer_seconds", "transfer_bytes")
)  # fmt: skip
_OWN_DETAIL = frozenset({"metrics", "lag_steps", "duration_s", "stall_s", "message"})


def dispatched(record: Record) -> EvalPoint | None:
    """The point that a record is about; ``None`` if its name is none of the dispatcher's."""
    hf_dir = (record.detail or {}).get("hf_dir")
    if hf_dir is None and record.id.startswith("hf:"):
        hf_dir = "unknown"
    return point_of(record, None if hf_dir is None else Path(str(hf_dir)))


def snapshot(part: Part) -> Snapshot:
    """What the store answered: a snapshot of the recorded weights."""
    return Snapshot(
        part.point.rollout_id,
        part.point.hf_dir or Path(f"step_{part.point.rollout_id}"),
        part.version,
        part.version.rpartition(":")[2],
        owned=part.point.hf_dir is None,
    )


def proof(part: Part, record: Record) -> PinProof:
    """What the fleet answered before ``record``."""
    engines = (record.detail or {}).get("engines")
    names = [str(name) for name in engines] if isinstance(engines, list) else []
    return PinProof(
        "http://recorded",
        "recorded",
        part.version,
        tuple(EngineProof(name, part.version) for name in names),
        pin_seconds=part.metric("eval/pin_seconds") or 0.0,
        cause_seq=given_cause(part, record),
        transfer_seconds=part.metric("eval/transfer_seconds") or 0.0,
        transfer_bytes=int(part.metric("eval/transfer_bytes") or 0),
    )


def given_cause(part: Part, record: Record) -> int | None:
    """The record that the collaborator named; by itself a machine names its own last one."""
    before = part.records[part.records.index(record) - 1]
    return None if record.cause_seq == before.seq else record.cause_seq


def output(record: Record) -> EvalOutput:
    """What the evaluator answered before ``record``."""
    detail = record.detail or {}
    metrics = detail.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    path = detail.get("samples_path")
    return EvalOutput(
        {name: value for name, value in metrics.items() if name not in TIMINGS},
        None if path is None else Path(str(path)),
        {name: value for name, value in detail.items() if name not in _OWN_DETAIL},
    )


def error(part: Part, record: Record, message: str) -> Exception:
    """What a collaborator raised, so that the point ended by ``record``."""
    if record.reason == "crashed" and message.startswith("Traceback "):
        return RecordedError(message)
    try:
        skip = EvalSkip(str(record.reason), message)
    except ValueError:
        return RecordedError(f"no reason for a skip: {record.reason!r}")
    skip.cause_seq = given_cause(part, record)
    return skip
