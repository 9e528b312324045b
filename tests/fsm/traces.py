"""Small traces for the tests: written by the real writer, on a clock of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.fsm.machine import TracedMachine
from vime.fsm.tables import TABLES
from vime.fsm.trace import Trace

SECOND = 1_000_000_000
START_WALL_NS = 1_790_000_000 * SECOND


class Clock:
    """Counts whole seconds when told to; ``mono`` starts at a senseless value, as real ones do."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mono(self) -> int:
        return 77 * SECOND + int(self.now_s * SECOND)

    def wall(self) -> int:
        return START_WALL_NS + int(self.now_s * SECOND)


class Run:
    """A run under way: names machines, fires their triggers, moves the clock."""

    def __init__(
        self, path: Path, run_id: str = "run-1", node: str = "driver", **more: Any
    ) -> None:
        self.clock = Clock()
        self.path = path
        self.trace = Trace(
            path, run_id, node, mono_ns=self.clock.mono, wall_ns=self.clock.wall, **more
        )
        self._machines: dict[tuple[str, str], TracedMachine] = {}

    def machine(self, kind: str, id: object) -> TracedMachine:
        key = kind, str(id)
        if key not in self._machines:
            self._machines[key] = TracedMachine(TABLES[kind], str(id), self.trace)
        return self._machines[key]

    def fire(
        self, kind: str, id: object, trigger: str, after_s: float = 1.0, **facts: object
    ) -> int:
        self.clock.now_s += after_s
        return self.machine(kind, id).fire(trigger, **facts).seq


def version(step: int) -> str:
    return f"run-1:{step}:{step:012x}"


def pinned_point(run: Run, step: int, score: float = 0.5) -> None:
    """A point that is exported, verified, pinned on engine ``eval-0``, scored and cleaned up."""
    v = version(step)
    dispatch = {"hf_dir": None, "force": False, "policy": "skip", "max_in_flight": 2}
    run.fire("point", step, "dispatch", detail=dispatch)
    run.fire("point", step, "export")
    run.fire("snapshot", step, "write")
    run.fire("snapshot", step, "seal", weight_version=v)
    run.fire("snapshot", step, "verify", weight_version=v)
    run.fire("snapshot", step, "lease", weight_version=v)
    run.fire("point", step, "pin", weight_version=v)
    pin = run.fire("engine", "eval-0", "pin", weight_version=v)
    serve = run.fire("engine", "eval-0", "serve", weight_version=v, cause_seq=pin)
    run.fire("point", step, "run", weight_version=v, cause_seq=serve)
    metrics = {"eval/sums": score, "eval/step": step, "eval/lag_steps": 1}
    detail = {"metrics": metrics, "lag_steps": 1, "duration_s": 10.0, "stall_s": 0.25}
    run.fire("point", step, "finish", 5.0, weight_version=v, detail=detail)
    run.fire("snapshot", step, "leave", weight_version=v)
    run.fire("snapshot", step, "delete", weight_version=v)


def healthy_run(path: Path, num_points: int = 3) -> Path:
    """A whole run of one engine without a fault; returns ``path``."""
    run = Run(path)
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready", 30)
    for i in range(1, num_points + 1):
        pinned_point(run, 10 * i, score=i / 10)
    run.fire("engine", "eval-0", "stop")
    run.trace.close()
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """Forge a trace: rewrite each record, or drop it (``None``); returns ``path``."""
    changed = [change(json.loads(line)) for line in path.read_bytes().splitlines()]
    path.write_text("".join(json.dumps(fields) + "\n" for fields in changed if fields is not None))
    return path
