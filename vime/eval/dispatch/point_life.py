"""One eval point: its machine, its clocks, and the one outcome that it comes to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from vime.eval.contracts import EvalOutput, EvalPoint, Outcome, PinProof
from vime.fsm.machine import TracedMachine
from vime.fsm.record import Record
from vime.fsm.tables import POINT
from vime.fsm.trace import Trace

_GIVEN = "hf:"

#: Most characters of what is told of a skip, and as many as a long traceback needs.
MAX_MESSAGE = 10_000


class PointLife:
    """Everything that is known of one dispatched point.

    It is owned by the dispatcher's actor; other threads only read ``state`` and wait for
    ``outcome``.

    Args:
        point: what was dispatched.
        trace: where its transitions are written.
        attempt: above 0 when earlier runs have left it.
    """

    def __init__(self, point: EvalPoint, trace: Trace, attempt: int = 0) -> None:
        self.point = point
        self.machine = TracedMachine(POINT, point_id(point), trace)
        self.machine.attempt = attempt
        self.dispatched_at = anyio.current_time()
        self.export_started_at = self.dispatched_at
        self.weight_version: str | None = None
        self.stall_s = 0.0
        self.export_s: float | None = None
        self.pin_s: float | None = None
        self.transfer: dict[str, float] = {}
        self.canary: str | None = None
        self.handed_over = anyio.Event()
        self.settled = anyio.Event()
        self.outcome: Future[Outcome] = Future()

    @property
    def id(self) -> str:
        """The point's name in the trace."""
        return self.machine.id

    @property
    def state(self) -> str:
        """The point's state, one of :data:`vime.fsm.tables.POINT`."""
        return self.machine.state

    def pinned(self, proof: PinProof) -> None:
        """Note what the pin took and showed."""
        self.pin_s, self.canary = proof.pin_seconds, proof.canary
        if proof.transfer_bytes:
            self.transfer = {
                "eval/transfer_seconds": proof.transfer_seconds,
                "eval/transfer_bytes": float(proof.transfer_bytes),
            }

    @classmethod
    def ended(cls, outcome: Outcome, trace: Trace) -> PointLife:
        """A point that had its outcome in an earlier run; nothing is written."""
        hf_dir = None if outcome.hf_dir is None else Path(outcome.hf_dir)
        life = cls(EvalPoint(outcome.rollout_id, hf_dir), trace)
        life.machine.restore(outcome.state)
        life.settled.set()
        life.outcome.set_result(outcome)
        return life

    def finish(self, output: EvalOutput, training_step: int) -> Outcome:
        """Settle the point as done; the record is written before anybody hears of it."""
        return self._settle("finish", None, None, None, output, training_step)

    def skip(
        self, reason: str, message: str, training_step: int, cause_seq: int | None = None
    ) -> Outcome:
        """Settle the point as skipped for ``reason``; ``message`` says it in a sentence.

        This is the one place where a message is cut, to :data:`MAX_MESSAGE` characters: whoever
        reports it, it is no longer.
        """
        return self._settle("skip", reason, shortened(message), cause_seq, None, training_step)

    def _settle(
        self,
        trigger: str,
        reason: str | None,
        message: str | None,
        cause_seq: int | None,
        output: EvalOutput | None,
        training_step: int,
    ) -> Outcome:
        duration_s = anyio.current_time() - self.dispatched_at
        lag_steps = max(0, training_step - self.point.rollout_id)
        metrics = output.metrics if output else {f"eval/skipped_{reason}": 1.0}
        metrics = metrics | self._timings(duration_s, lag_steps)  # nobody else says those
        outcome = Outcome(
            rollout_id=self.point.rollout_id,
            state="skipped" if output is None else "done",
            reason=reason,
            detail=message,
            weight_version=self.weight_version,
            metrics=metrics,
            lag_steps=lag_steps,
            duration_s=duration_s,
            stall_s=self.stall_s,
            hf_dir=None if self.point.hf_dir is None else str(self.point.hf_dir),
            canary=self.canary,
        )
        self.machine.fire(
            trigger,
            reason=reason,
            detail=_record_detail(outcome, output),
            cause_seq=cause_seq,
            weight_version=self.weight_version,
        )
        return outcome

    def _timings(self, duration_s: float, lag_steps: int) -> dict[str, float]:
        known = {
            "eval/step": float(self.point.rollout_id),
            "eval/lag_steps": float(lag_steps),
            "eval/duration_seconds": duration_s,
            "eval/stall_seconds": self.stall_s,
            "eval/export_time_seconds": self.export_s,
            "eval/pin_seconds": self.pin_s,
        }
        return {name: value for name, value in known.items() if value is not None} | self.transfer


def shortened(message: str) -> str:
    """A message of at most :data:`MAX_MESSAGE` characters: its beginning and its end.

    What lies between is replaced by how much it was.
    """
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2 - 50  # which leaves room for the words in between
    cut = f"\n[... {len(message) - 2 * half} of {len(message)} characters are left out ...]\n"
    return f"{message[:half]}{cut}{message[-half:]}"


def point_name(rollout_id: int, *, is_given: bool) -> str:
    """The trace's name of a point; a given checkpoint and an export of one step differ."""
    return f"{_GIVEN}{rollout_id}" if is_given else str(rollout_id)


def point_id(point: EvalPoint) -> str:
    """The trace's name of a point."""
    return point_name(point.rollout_id, is_given=point.hf_dir is not None)


def point_of(record: Record, hf_dir: Path | None) -> EvalPoint | None:
    """The point that a ``dispatch`` record is about; ``None`` if vime gives no such name.

    Args:
        record: the record.
        hf_dir: the given checkpoint that the reader takes its detail to name.
    """
    try:
        rollout_id = int(record.id.removeprefix(_GIVEN))
    except ValueError:
        return None
    point = EvalPoint(rollout_id, hf_dir, bool((record.detail or {}).get("force", False)))
    return point if point_id(point) == record.id else None


def with_canary(output: EvalOutput, proof: PinProof) -> EvalOutput:
    """Add what the engines answered to the canary prompts: a curve that stands still betrays a
    load that did nothing.

    ``eval/pin_canary`` is a number from 0 to 2**24 − 1, made of the first six digits of the digest:
    exact in single precision.
    """
    if proof.canary is None:
        return output
    numbers = {
        "eval/pin_canary": float(int(proof.canary[:6], 16)),
        "eval/pin_unchanged": float(proof.unchanged_since is not None),
    }
    facts = {"canary": proof.canary, "unchanged_since": proof.unchanged_since}
    return replace(output, metrics=output.metrics | numbers, detail=output.detail | facts)


def life_id(outcome: Outcome) -> str:
    """The trace's name of the point that an outcome is of."""
    return point_name(outcome.rollout_id, is_given=outcome.hf_dir is not None)


def _record_detail(outcome: Outcome, output: EvalOutput | None) -> dict[str, Any]:
    """What the final record must hold, so that a trace alone can explain and resume a run."""
    detail: dict[str, Any] = {
        "metrics": outcome.metrics,
        "lag_steps": outcome.lag_steps,
        "duration_s": outcome.duration_s,
        "stall_s": outcome.stall_s,
    }
    if outcome.detail is not None:
        detail["message"] = outcome.detail
    if output is not None:
        detail |= output.detail
        if output.samples_path is not None:
            detail["samples_path"] = str(output.samples_path)
    return detail
