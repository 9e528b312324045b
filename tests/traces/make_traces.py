"""Writes the committed traces: ``python -m tests.traces.make_traces DIRECTORY``.

The files beside this one were written once and stay as they are: a change of the tables must
still replay them, or say why it cannot. Run this only to add another.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fsm.traces import Run, edit, version
from vime.fsm.read import next_seq


def two_engines(path: Path) -> None:
    """Two engines, a baseline, scores, a busy skip, an engine that hangs and comes back."""
    run = Run(path)
    for engine in ("eval-0", "eval-1"):
        run.fire("engine", engine, "start", 0.01)
    for engine in ("eval-0", "eval-1"):
        run.fire("engine", engine, "ready", 31)
    baseline(run)
    for step in (10, 20):
        pinned_on_both(run, step)
    run.fire("point", 30, "dispatch", detail={"max_in_flight": 2, "pending": 2, "policy": "skip"})
    detail = {
        "message": "2 evals were pending (--eval-max-in-flight 2)",
        "metrics": {"eval/step": 30},
    }
    run.fire("point", 30, "skip", 0.001, reason="busy", detail=detail)
    hung(run, 40)
    pinned_on_both(run, 50)
    for engine in ("eval-0", "eval-1"):
        run.fire("engine", engine, "stop", 0.5)
    run.trace.close()


def baseline(run: Run) -> None:
    """The checkpoint before training: adopted, scored, let go untouched."""
    v = version(0)
    run.fire("point", "hf:0", "dispatch", detail={"hf_dir": "base", "max_in_flight": 2})
    run.fire("snapshot", "hf:0", "adopt", detail={"path": "base"})
    run.fire("snapshot", "hf:0", "verify", 0.4, weight_version=v)
    run.fire("snapshot", "hf:0", "lease", 0.001, weight_version=v)
    evaluate(run, "hf:0", 0, 0.125)
    run.fire("snapshot", "hf:0", "leave", 0.001, weight_version=v)
    run.fire("snapshot", "hf:0", "release", 0.001, weight_version=v)


def pinned_on_both(run: Run, step: int) -> None:
    """An exported point, evaluated on both engines."""
    v = version(step)
    run.fire(
        "point", step, "dispatch", 8, detail={"hf_dir": None, "force": False, "max_in_flight": 2}
    )
    export = run.fire("point", step, "export", 0.01)
    run.fire("snapshot", f"step_{step}", "write", 0.01, cause_seq=export)
    for trigger, after_s in (("seal", 2.5), ("verify", 0.3), ("lease", 0.001)):
        run.fire("snapshot", f"step_{step}", trigger, after_s, weight_version=v)
    evaluate(run, str(step), step, step / 100)
    for trigger in ("leave", "delete"):
        run.fire("snapshot", f"step_{step}", trigger, 0.01, weight_version=v)


def evaluate(run: Run, point: str, step: int, score: float) -> None:
    """Pin both engines, run, score."""
    v = version(step)
    asked = run.fire("point", point, "pin", 0.01, weight_version=v)
    for engine in ("eval-0", "eval-1"):
        run.fire("engine", engine, "pin", 0.01, weight_version=v, cause_seq=asked)
    for engine in ("eval-0", "eval-1"):
        served = run.fire("engine", engine, "serve", 0.2, weight_version=v)
    engines = {"engines": ["eval-0", "eval-1"]}
    run.fire("point", point, "run", 0.01, weight_version=v, cause_seq=served, detail=engines)
    metrics = {
        "eval/sums": score,
        "eval/step": step,
        "eval/lag_steps": 2,
        "eval/sums/weight_version/mixed_ratio": 0.0,
    }
    detail = {"metrics": metrics, "lag_steps": 2, "duration_s": 9.5, "stall_s": 0.2}
    run.fire("point", point, "finish", 6, weight_version=v, detail=detail)


def hung(run: Run, step: int) -> None:
    """An engine does not answer while it is pinned: it is killed and started again."""
    v = version(step)
    run.fire("point", step, "dispatch", detail={"max_in_flight": 2})
    run.fire("point", step, "export", 0.01)
    for trigger in ("write", "seal", "verify", "lease"):
        run.fire("snapshot", f"step_{step}", trigger, 0.5, weight_version=v)
    asked = run.fire("point", step, "pin", 0.01, weight_version=v)
    for engine in ("eval-0", "eval-1"):
        run.fire("engine", engine, "pin", 0.01, weight_version=v, cause_seq=asked)
    run.fire("engine", "eval-0", "serve", 0.2, weight_version=v)
    error = {"error": "POST /collective_rpc: no answer within 60 s"}
    suspect = run.fire("engine", "eval-1", "suspect", 60, reason="hung", detail=error)
    detail = {"message": "engine eval-1 is hung", "metrics": {"eval/step": step}}
    run.fire("point", step, "skip", 0.01, reason="pin_violation", cause_seq=suspect, detail=detail)
    for trigger in ("leave", "delete"):
        run.fire("snapshot", f"step_{step}", trigger, 0.01, weight_version=v)
    run.fire("engine", "eval-1", "kill", 0.3)
    run.machine("engine", "eval-1").attempt = 1
    run.fire("engine", "eval-1", "restart", 0.001)
    run.fire("engine", "eval-1", "start", 1)
    run.fire("engine", "eval-1", "ready", 28)


def resumed(path: Path) -> None:
    """The driver was killed; the next run continues the journal and takes the point up again."""
    run = Run(path)
    run.fire("point", 10, "dispatch")
    run.fire("point", 10, "export")
    run.fire("snapshot", "step_10", "write")
    run.trace.close()
    run = Run(path, run_id="run-2", first_seq=next_seq(path))
    run.fire("point", 10, "dispatch", 100)
    run.fire("point", 10, "run", detail={"engines": "shared"})
    run.fire("point", 10, "finish", 5, detail={"metrics": {"eval/sums": 0.5, "eval/step": 10}})
    run.trace.close()


def diverges(path: Path) -> None:
    """As ``two_engines``, but record 33 says that point 20 went where the tables do not lead."""
    two_engines(path)

    def forge(fields: dict) -> dict:
        is_run_of_20 = (fields["machine"], fields["id"], fields["trigger"]) == (
            "point",
            "20",
            "run",
        )
        return {**fields, "dest": "done"} if is_run_of_20 else fields

    edit(path, forge)


if __name__ == "__main__":
    for make in (two_engines, resumed, diverges):
        make(Path(sys.argv[1]) / f"{make.__name__}.jsonl")
