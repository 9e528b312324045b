"""Injects the faults of a schedule into the run that it listens to.

It hears of three things: the records of the trace (on the dispatcher's thread, before their
effects begin), the calls of the user's export (on the training thread), and the answers (on a
thread that reads a FIFO). Each injection is noted in a file at once, with the points that were at
work, so that the auditor can tell which fault a skip is due to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.chaos import victims, weights
from bench.chaos.faults import NEED_ROOM, Fault
from bench.chaos.private import Ballast
from vime.fsm.trace import Record

#: How long a worker stands still in the middle of a slow load, in seconds.
SLOW_LOAD_S = 4.0

_ENDS = ("finish", "skip")
_PARTS = {"kill_server": "server", "kill_core": "core", "kill_worker": "worker"}


class Injector:
    """See the module.

    Args:
        schedule: the faults.
        log: one JSON object a line: every injection, and what survived it.
        ballast: fills the staging file system.
        seed: of the run; says which byte flips.

    Attributes:
        first_answer: set once the point that is running has had an answer.
    """

    def __init__(self, schedule: Sequence[Fault], log: Path, ballast: Ballast, seed: int) -> None:
        self._waiting = dict(enumerate(schedule))
        self._log = log
        self._ballast = ballast
        self._seed = seed
        self._lock = threading.RLock()
        self._at_work: dict[int, str] = {}
        self._running: int | None = None
        self._answers = 0
        self._full_for: int | None = None
        self._servers: dict[str, int] = {}
        self._watches: list[threading.Thread] = []
        self.first_answer = threading.Event()

    # -- what it hears -------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        """A listener of the trace."""
        with self._lock:
            if record.machine == "point":
                self._on_point(int(record.id), record.trigger)
            elif record.machine == "engine":
                self._on_engine(record)
            elif record.machine == "snapshot" and record.trigger == "verify":
                self._on_verified(record)

    def _on_point(self, point: int, trigger: str) -> None:
        if trigger == "pin":
            self._at_work[point] = "pinning"
            self._strike("pinning", point)
        elif trigger == "run":
            self._at_work[point] = "running"
            self._running, self._answers = point, 0
            self.first_answer.clear()
            self._strike("running", point)
        elif trigger in _ENDS:
            self._at_work.pop(point, None)
            if point == self._full_for:
                self._ballast.empty()

    def _on_engine(self, record: Record) -> None:
        if record.trigger == "ready":
            assert record.detail is not None
            self._servers[record.id] = record.detail["pid"]
        elif record.trigger == "pin" and record.weight_version is not None:
            point = int(record.weight_version.split(":")[1])
            self._strike("loading", point, int(record.id.rsplit("_", 1)[1]))

    def _on_verified(self, record: Record) -> None:
        assert record.detail is not None
        directory = Path(record.detail["path"])
        point = int(record.id.removeprefix("step_"))
        for number, fault in self._due("verified", lambda fault: fault.point == point):
            if fault.kind == "rotten":
                weights.flip_a_byte(directory, random.Random(self._seed * 1009 + point))
            else:
                weights.truncate(directory)
            self._note(number, fault, [point])

    def on_answer(self) -> None:
        """The point that is running has had an answer."""
        with self._lock:
            self._answers += 1
            self.first_answer.set()
            if self._running is not None:
                self._strike("answer", self._running)

    def export(self, point: int, whole: Path, directory: Path) -> None:
        """The user's own export: copies the checkpoint ``whole``, or does it badly.

        Raises:
            OSError: the file system is full, by our own doing.
        """
        with self._lock:
            due = self._due("exporting", lambda fault: fault.point == point)
            for number, fault in due:
                self._note(number, fault, [point])
        kinds = {fault.kind for _, fault in due}
        if kinds & NEED_ROOM:
            self._full_for = point
        if "full_before" in kinds:
            self._ballast.fill()
        if "foreign" in kinds:
            whole = weights.write_checkpoint(whole.with_name(f"foreign_{point}"), 1, point, 32)
        weights.copy_checkpoint(whole, directory)
        for kind, damage in (
            ("truncated", weights.truncate),
            ("incomplete", weights.drop_layer),
            ("not_finite", weights.put_nan),
        ):
            if kind in kinds:
                damage(directory)
        if "full_after" in kinds:
            self._ballast.fill()

    # -- what it does --------------------------------------------------------------------------

    def _due(self, moment: str, fits: Callable[[Fault], bool]) -> list[tuple[int, Fault]]:
        """The faults whose time has come; each comes once."""
        found = [(n, f) for n, f in self._waiting.items() if f.moment == moment and fits(f)]
        for number, _ in found:
            del self._waiting[number]
        return found

    def _strike(self, moment: str, point: int, engine: int | None = None) -> None:
        def fits(fault: Fault) -> bool:
            return (
                point >= fault.point
                and (engine is None or engine == fault.engine)
                and (moment != "answer" or self._answers >= fault.answer)
            )

        for number, fault in self._due(moment, fits):
            victim = self._victim(fault)
            if victim is None:  # between death and birth: it strikes at the next occasion
                self._waiting[number] = fault
                continue
            self._note(number, fault, sorted(self._at_work))
            if fault.kind == "slow_load":
                self._stand_still(victim)
            elif fault.kind == "stop_engine":
                os.kill(victim.pid, signal.SIGSTOP)
            else:
                self._kill(number, fault, victim)

    def _victim(self, fault: Fault) -> psutil.Process | None:
        if fault.kind in ("kill_router", "kill_runner"):
            return victims.first(victims.below(os.getpid()), fault.kind.removeprefix("kill_"))
        server = self._servers.get(f"engine_{fault.engine}")
        tree = [] if server is None else victims.below(server)
        if fault.kind == "slow_load":
            return victims.first(tree, "worker") or victims.first(tree, "core")
        return victims.first(tree, _PARTS.get(fault.kind, fault.part))

    def _kill(self, number: int, fault: Fault, victim: psutil.Process) -> None:
        """Kill one process; whatever belongs to it must be gone soon, or live a full life."""
        top = self._servers.get(f"engine_{fault.engine}") if fault.kind in _PARTS else victim.pid
        assert top is not None
        doomed = victims.Doomed(victims.below(top))
        os.kill(victim.pid, signal.SIGKILL)
        watch = threading.Thread(target=self._watch, args=(number, doomed), daemon=True)
        watch.start()
        self._watches.append(watch)

    def _watch(self, number: int, doomed: victims.Doomed) -> None:
        self._write({"fault": number, "survivors": doomed.survivors()})

    def _stand_still(self, victim: psutil.Process) -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        timer = threading.Timer(SLOW_LOAD_S, _go_on, [victim])
        timer.daemon = True
        timer.start()
        self._watches.append(timer)

    def finish(self) -> None:
        """Wait until everything that was observed is in the file."""
        for watch in self._watches:
            watch.join()

    def _note(self, number: int, fault: Fault, points: list[int]) -> None:
        self._write({
            "fault": number, "kind": fault.kind, "when": fault.when, "points": points,
            "mono_ns": time.monotonic_ns(),
        })  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _go_on(process: psutil.Process) -> None:
    if process.is_running():
        os.kill(process.pid, signal.SIGCONT)
