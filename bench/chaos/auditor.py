"""Starts drivers, kills them where that is the plan, and makes the report of what they left."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from bench.chaos import leftovers, private, rescore, reward, victims, weights
from bench.chaos.audit import Attribution, Evidence, violations_of
from bench.chaos.driver import READY, Order
from bench.chaos.faults import NUM_PROMPTS, NUM_SHORT_POINTS, Fault, as_json
from bench.chaos.leftovers import Leftovers
from bench.chaos.report import Report
from vime.fsm.read import read_trace
from vime.fsm.record import Record

_ROOT = Path(__file__).parents[2]

#: A driver that is not done after so long is killed, and that is reported.
_SECONDS_A_POINT, _SECONDS_TO_START = 60.0, 300.0

#: What a whole run consists of; it is killed in an order that is drawn.
_ROLES = ("driver", "runner", "router", "server")

_KEEP_SNAPSHOTS = 2


class Auditor:
    """Knows nothing of what a driver does but what it leaves on disk and prints.

    Args:
        root: a new directory, for everything.
        seed: of weights and prompts.
        schedule: the faults of the first run.
        refusal: why there is no file system of our own here, if there is none.
        min_engines: ``--eval-min-engines``.
    """

    def __init__(
        self,
        root: Path,
        seed: int,
        schedule: Sequence[Fault],
        refusal: str | None,
        min_engines: int | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._root = root
        self._min_engines = min_engines
        self._seed = seed
        self._schedule = schedule
        self._rng = random.Random(seed + 1)
        self._found = Leftovers()
        self._broken_off: list[str] = []
        self._kills: list[str] = []
        self._refusal = refusal
        mount = root / "mount"
        if refusal is None:
            private.mount_staging(mount)
        else:
            mount.mkdir()
        self._staging = mount / "staging"

    def long(self, num_points: int, num_kills: int, num_cold: int) -> Report:
        """All faults in one run that ends by itself; then runs that are killed as a whole."""
        self._drive("faults", num_points, self._schedule, "close")
        violations = self._violations("faults", ended=True)
        for number in range(num_kills):
            name = f"kill_{number}"
            self._drive(name, 1, [], "hold")
            violations += self._violations(name, ended=False)
        return self._report(violations, num_cold)

    def short(self) -> Report:
        """A few faults, and then the kill of everything, engines that are starting included."""
        self._drive("faults", NUM_SHORT_POINTS, self._schedule, "kill")
        return self._report(self._violations("faults", ended=False), 0)

    def copy_evidence(self, target: Path) -> None:
        """Copy traces, samples, logs and snapshots of every run."""
        for order in self._root.glob("*/order.json"):
            run = order.parent
            shutil.copytree(run, target / run.name, ignore=shutil.ignore_patterns("fifo"))

    def close(self) -> None:
        """Let go of the file system."""
        if self._refusal is None:
            private.unmount(self._root / "mount")

    # -- one run -------------------------------------------------------------------------------

    def _drive(self, name: str, num_points: int, schedule: Sequence[Fault], end: str) -> None:
        """Run one driver to its end, and look for what it leaves."""
        root = self._root / name
        (root / "kept").mkdir(parents=True)
        temporary = self._root / f"t{name[-1]}"  # a short name: see main()
        temporary.mkdir()
        weights.write_checkpoint(root / "base", self._seed, 0)
        weights.write_eval_set(root / "prompts.jsonl", self._seed, NUM_PROMPTS)
        order = Order(
            root=str(root),
            staging=str(self._staging),
            seed=self._seed,
            points=num_points,
            schedule=as_json(schedule),
            end=end,
            min_engines=self._min_engines,
        )
        order.write(root / "order.json")
        before = leftovers.names_in(private.SHARED_MEMORY)
        mark = secrets.token_hex(8)
        env = os.environ | {
            victims.MARK: mark,
            reward.ANSWERS: str(root / "fifo"),
            reward.HOLD: str(root / "hold"),
            "TMPDIR": str(temporary),
        }
        command = [sys.executable, "-m", "bench.chaos.driver", str(root / "order.json")]
        limit_s = _SECONDS_TO_START + _SECONDS_A_POINT * num_points
        with (
            (root / "driver.log").open("wb") as log,
            subprocess.Popen(
                command, cwd=_ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True
            ) as driver,
        ):
            overdue = threading.Timer(limit_s, driver.kill)
            overdue.start()
            try:
                ready = self._follow(driver, name)
                if ready:
                    self._kill_all(driver, mark)
                status = driver.wait()
            finally:
                overdue.cancel()
                driver.kill()
        expected = 0 if end == "close" else -signal.SIGKILL
        if status != expected or ready != (end != "close"):
            tail = (root / "driver.log").read_text(encoding="utf-8", errors="replace")[-2000:]
            self._broken_off.append(f"{name}: its driver ended with status {status}\n{tail}")
        self._look(name, mark, before, temporary, end)

    def _follow(self, driver: subprocess.Popen[str], name: str) -> bool:
        """Pass on what it prints, until it ends; whether it waits to be killed."""
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.strip() == READY:
                return True
            elapsed_s = time.monotonic() - self._began
            print(f"{elapsed_s:6.1f} s  {name}: {line.rstrip()}", flush=True)
        return False

    def _kill_all(self, driver: subprocess.Popen[str], mark: str) -> None:
        """Kill one process of every role, one right after the other."""
        by_role: dict[str, list[psutil.Process]] = {"driver": [psutil.Process(driver.pid)]}
        for process in victims.marked(mark):
            by_role.setdefault(victims.role_of(process) or "helper", []).append(process)
        doomed = [(role, p) for role in _ROLES for p in by_role.get(role, [])]
        self._rng.shuffle(doomed)
        self._kills.append(" ".join(role for role, _ in doomed))
        for _, process in doomed:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went with the one before it

    def _look(self, name: str, mark: str, before: set[str], temporary: Path, end: str) -> None:
        found = Leftovers(
            processes=[f"{name}: {process}" for process in leftovers.living(mark)],
            directories=[f"{name}: {path}" for path in sorted(leftovers.names_in(temporary))],
            shared_memory=[f"{name}: {path}" for path in leftovers.shared_memory_since(before)],
            ports=leftovers.taken_ports(self._urls(name)),
        )
        strangers = (
            leftovers.strangers_in_staging(self._staging, _KEEP_SNAPSHOTS)
            if end == "close"
            else leftovers.strangers_after_sweep(self._staging)
        )
        found.directories += [f"{name}: staging/{path}" for path in strangers]
        self._found.add(found)

    def _urls(self, name: str) -> list[str]:
        return [
            record.detail["url"]
            for record in self._records(name)
            if record.machine == "engine" and record.trigger == "ready" and record.detail
        ]

    # -- all of it -----------------------------------------------------------------------------

    def _records(self, name: str) -> list[Record]:
        path = self._root / name / "run" / "trace.jsonl"
        return list(read_trace(path)) if path.exists() else []

    def _violations(self, name: str, *, ended: bool) -> list[str]:
        found = violations_of(self._records(name), ended=ended)
        return [f"{name}: {violation}" for violation in found]

    def _report(self, violations: list[str], num_cold: int) -> Report:
        evidence = Evidence.read(self._root / "faults", self._schedule)
        report = Report(
            self._seed,
            self._schedule,
            evidence,
            Attribution(evidence),
            violations=violations,
            leftovers=self._found,
            broken_off=self._broken_off,
            kills=self._kills,
            notes=[] if self._refusal is None else [f"no fault by a full disk: {self._refusal}"],
        )
        report.wrong_scores += [
            f"point {point} has a score, and its snapshot was damaged"
            for point in report.attribution.wrongly_done
        ]
        self._recompute(report, num_cold)
        return report

    def _recompute(self, report: Report, num_cold: int) -> None:
        """Every score by ``transformers``, and some of them by a cold engine too."""
        torch.set_num_threads(1)  # quicker, for a model as small as this
        root = self._root / "faults"
        prompts = weights.prompts(self._seed, NUM_PROMPTS)
        scored = {n: p for n, p in report.evidence.points.items() if p.score is not None}
        cold = self._rng.sample(sorted(scored), min(num_cold, len(scored)))
        for number, point in sorted(scored.items()):
            kept = root / "kept" / f"step_{number}"
            answers = rescore.read_answers(root / "run" / "samples" / f"step_{number}.jsonl")
            assert point.score is not None
            version = str(point.outcomes[0]["weight_version"])
            problems = rescore.problems_of(answers, point.score, version, kept, prompts)
            if number in cold:
                problems += rescore.engine_problems(answers, kept, root / f"cold_{number}.log")
            report.wrong_scores += [f"point {number}: {problem}" for problem in problems]
        report.recomputed = (len(scored), len(cold))
