"""What the store says when a snapshot cannot be made, used or removed."""

from __future__ import annotations

import logging

from vime.eval.contracts import Capture
from vime.eval.snapshot.faults import StagingFault
from vime.eval.snapshot.writer import OccupiedError
from vime.fsm.machine import TracedMachine
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger(__name__)


def reject(machine: TracedMachine, error: Exception, version: str | None) -> EvalSkip:
    """The verifier's verdict, in the trace and as the reason of the skip."""
    problems = getattr(error, "problems", [explain(error)])
    machine.fire(
        "reject", reason="snapshot_invalid", detail={"problems": problems}, weight_version=version
    )
    return skip(machine, "snapshot_invalid", str(error))


def skip(machine: TracedMachine, reason: str, message: str) -> EvalSkip:
    """The skip of a point whose snapshot came to this."""
    refusal = EvalSkip(reason, message)
    refusal.cause_seq = machine.last_seq
    return refusal


def release(capture: Capture) -> None:
    """Release on the way out of a cancellation, which nothing may replace."""
    try:
        capture.release()
    except Exception:
        log.exception("a capture could not be released")


def explain(error: Exception) -> str:
    """One line for people."""
    if isinstance(error, OccupiedError | StagingFault):
        return str(error)
    return f"{type(error).__name__}: {error}"
