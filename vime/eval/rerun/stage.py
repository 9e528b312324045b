"""The rerun itself: the real dispatcher on virtual time, led through the script of a trace.

    trace ── Script ──▶ ┌───────┐ ── calls and answers, each at its moment ──▶ DispatchActor
                        │ Stage │ ◀── records ─────────────────────────────────     │
                        └───────┘ ── the first record that differs ──▶ Divergence

Virtual time stands still until every task waits, and then jumps: hours pass in milliseconds, and
one cue has had all its effects before the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from vime.eval.actor import LocalActor
from vime.eval.contracts import EvalPoint, Outcome
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.dispatch.messages import Admit, Admitted, Drain, Launch, Settle, TakeUp
from vime.eval.rerun.collaborators import (
    Answers,
    HeldCapture,
    RecordedEvaluator,
    RecordedFleet,
    RecordedStore,
)
from vime.eval.rerun.compare import compare
from vime.eval.rerun.moments import backwards, displaced
from vime.eval.rerun.script import Act, Cue, Script
from vime.eval.rerun.virtual_time import MockClock, wait_all_tasks_blocked
from vime.fsm.record import Record
from vime.fsm.replay import Divergence
from vime.fsm.trace import Trace

#: The rerun numbers its own records from here on; whatever is below is of the trace.
_FIRST_SEQ = 1 << 40

TOLERANCE_S = 1.0
"""How far a moment of the rerun may be from the recorded one, in seconds."""


@dataclass
class Rerun:
    """What came of a rerun.

    Attributes:
        num_records: how many point records came out as recorded.
        num_points: of how many points.
        num_runs: of how many runs.
        divergence: the first one that did not.
    """

    num_records: int = 0
    num_points: int = 0
    num_runs: int = 0
    divergence: Divergence | None = None


def rerun(records: Iterable[Record], tolerance_s: float = TOLERANCE_S) -> Rerun:
    """Run the dispatcher again for every run of a trace, up to the first divergence.

    Args:
        records: the trace.
        tolerance_s: how far moments may be apart, in seconds.

    Raises:
        ValueError: the recorded limits are none.
    """
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.machine == "point" or record.trigger == "verify":
            runs.setdefault((record.run_id, record.node), []).append(record)
    total = Rerun()
    for of_run in runs.values():
        if not any(record.machine == "point" for record in of_run):
            continue
        total.num_runs += 1
        of_it = _of_run(of_run, tolerance_s)
        total.num_records += of_it.num_records
        total.num_points += of_it.num_points
        total.divergence = _at_its_root(of_run, of_it.divergence, tolerance_s)
        if total.divergence is not None:
            break
    return total


def _of_run(records: list[Record], tolerance_s: float) -> Rerun:
    divergence = backwards([record for record in records if record.machine == "point"])
    if divergence is not None:
        return Rerun(divergence=divergence)
    stage = Stage(Script(records), tolerance_s)
    divergence = _on_virtual_time(stage)
    return Rerun(stage.num_matched, len(stage.script.parts), divergence=divergence)


def _at_its_root(
    records: list[Record], divergence: Divergence | None, tolerance_s: float
) -> Divergence | None:
    """The record with a false moment, rather than another one that diverges because of it.

    That it is the cause is proven where all comes out as recorded once the record stands at the
    moment of its wall clock. Where nothing diverged but two clocks contradict each other, the
    record is false all the same; only at either end of a run the wall clock may just have been set.
    """
    odd = displaced(records, tolerance_s)
    if odd is None:
        return divergence
    index, restored = odd
    if divergence is None:
        is_certain = 0 < index < len(records) - 1
    else:
        repaired = [*records[:index], restored, *records[index + 1 :]]
        is_certain = _of_run(repaired, tolerance_s).divergence is None
    if not is_certain:
        return divergence
    expected = f"{restored.mono_ns}, by its wall clock"
    return Divergence(records[index], "mono_ns", expected, str(records[index].mono_ns))


def _on_virtual_time(stage: Stage) -> Divergence | None:
    clock = MockClock(autojump_threshold=0)
    try:
        return anyio.run(stage.play, backend="trio", backend_options={"clock": clock})
    except BaseExceptionGroup as group:
        bugs, others = group.split(Exception)
        if others is not None or bugs is None or stage.cue is None:
            raise
        return stage.failed(bugs)


class Stage:
    """One run of a trace, run again.

    Args:
        script: what to do.
        tolerance_s: see :func:`rerun`.

    Attributes:
        script: what to do.
        cue: the present one.
        num_matched: how many records have come out as recorded.
    """

    def __init__(self, script: Script, tolerance_s: float) -> None:
        self.script = script
        self.cue: Cue | None = None
        self.num_matched = 0
        self._tolerance_s = tolerance_s
        self._came: dict[str, list[tuple[float, Record]]] = {}
        self._num_expected: dict[str, int] = {}
        self._seqs: dict[int, int] = {}
        self._refused: dict[str, Exception] = {}

    async def play(self) -> Divergence | None:
        """Lead the dispatcher through the script; the first divergence."""
        self._begun_s = anyio.current_time()
        self._answers = Answers()
        self._calls: dict[str, Call] = {}
        self._progress = anyio.Event()
        script = self.script
        trace = Trace(
            None, "rerun", first_seq=_FIRST_SEQ, mono_ns=lambda: int(anyio.current_time() * 1e9)
        )
        trace.subscribe(self._hear)
        async with anyio.create_task_group() as tasks:
            self._actor = DispatchActor(
                script.config,
                tasks,
                trace,
                store=RecordedStore(script.parts, self._answers) if script.has_store else None,
                fleet=RecordedFleet(script.parts, self._answers) if script.has_fleet else None,
                evaluator=RecordedEvaluator(self._answers) if script.has_store else None,
                report=_nobody,
            )
            async with LocalActor(self._actor, name="dispatcher") as self._ref:
                divergence = await self._lead(tasks) or self._surplus()
                tasks.cancel_scope.cancel()
        return divergence

    async def _lead(self, tasks: TaskGroup) -> Divergence | None:
        for cue in self.script.cues:
            self.cue = cue
            await anyio.sleep_until(self._begun_s + cue.at_s)
            if cue.act is Act.EXPECT:
                divergence = await self._expect(cue)
                if divergence is not None:
                    return divergence
            else:
                self._do(tasks, cue)
            await wait_all_tasks_blocked()
        return None

    def failed(self, error: BaseException) -> Divergence:
        """The divergence of a dispatcher that broke down."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cue = self.cue
        assert cue is not None
        record = next(
            (c.value for c in self.script.cues[self.script.cues.index(cue) :]
             if c.act is Act.EXPECT),
            self.script.records[-1],
        )  # fmt: skip
        broke = f"nothing: the dispatcher broke down by {type(error).__name__}: {error}"
        return Divergence(record, "trigger", broke, record.trigger)

    # -- cues -------------------------------------------------------------------------------

    def _do(self, tasks: TaskGroup, cue: Cue) -> None:
        match cue.act:
            case Act.ADMIT:
                self._calls[cue.point] = call = Call(cue.value)
                tasks.start_soon(self._call, cue.point, call)
            case Act.TAKE_UP:
                tasks.start_soon(self._ref.tell, TakeUp((), (cue.value,)))
            case Act.INTERRUPT | Act.LAUNCH | Act.SETTLE if cue.point not in self._calls:
                pass  # nobody dispatched it: the next expectation says so
            case Act.INTERRUPT:
                self._calls[cue.point].scope.cancel()
            case Act.LAUNCH:
                self._calls[cue.point].hand_over(HeldCapture(), cue.value)
            case Act.SETTLE:
                self._calls[cue.point].hand_over(cue.value, self.script.parts[cue.point].stall_s)
            case Act.DRAIN:
                tasks.start_soon(self._ref.tell, Drain(0.0))
            case Act.AT_STEP:
                self._actor.training_step = max(self._actor.training_step, cue.value)
            case _:
                self._answers.of(cue.act, cue.point).give(cue.value)

    async def _call(self, point: str, call: Call) -> None:
        """What the training thread does with one point."""
        with call.scope:
            try:
                admitted: Admitted = await self._ref.ask(Admit(call.point))
            except ValueError as error:
                self._refused[point] = error
                return
            if admitted.life.outcome.done():
                return
            await call.handed_over.wait()
            if not self.script.has_store:
                await self._ref.tell(Settle(admitted, call.result, call.stall_s))
            else:
                capture = None if call.point.hf_dir is not None else call.result
                await self._ref.tell(Launch(admitted, capture, call.stall_s))

    # -- records ----------------------------------------------------------------------------

    def _hear(self, record: Record) -> None:
        moment_s = anyio.current_time() - self._begun_s
        self._came.setdefault(record.id, []).append((moment_s, record))
        self._progress.set()
        self._progress = anyio.Event()

    async def _expect(self, cue: Cue) -> Divergence | None:
        """Wait for what should have come by now, and compare it."""
        recorded: Record = cue.value
        number = self._num_expected.get(recorded.id, 0)
        came = self._came.setdefault(recorded.id, [])
        with anyio.move_on_after(self._tolerance_s):
            while len(came) <= number:
                await self._progress.wait()
        if len(came) <= number:
            refused = self._refused.get(recorded.id)
            why = f": {refused}" if refused else ": the dispatcher did not move this point"
            return Divergence(recorded, "trigger", f"nothing{why}", recorded.trigger)
        moment_s, found = came[number]
        self._num_expected[recorded.id] = number + 1
        self._seqs[found.seq] = recorded.seq
        divergence = compare(
            recorded,
            found,
            late_s=moment_s - cue.at_s,
            tolerance_s=self._tolerance_s,
            recorded_seq=lambda seq: seq if seq is None else self._seqs.get(seq, seq),
        )
        self.num_matched += divergence is None
        return divergence

    def _surplus(self) -> Divergence | None:
        """What came out and is not in the trace, unless the trace may have been cut before it."""
        last_s = self.script.cues[-1].at_s
        for point, came in self._came.items():
            for moment_s, found in came[self._num_expected.get(point, 0) :]:
                if moment_s < last_s - self._tolerance_s:
                    last = self.script.parts[point].records[-1]
                    expected = f"{found.trigger} after it, at {moment_s:.6g} s"
                    return Divergence(last, "trigger", expected, "nothing")
        return None


class Call:
    """One call of ``dispatch``: the caller waits in it until it hands its part over."""

    def __init__(self, point: EvalPoint) -> None:
        self.point = point
        self.scope = anyio.CancelScope()
        self.handed_over = anyio.Event()
        self.result: Any = None
        self.stall_s = 0.0

    def hand_over(self, result: Any, stall_s: float) -> None:
        """Let the caller go on, after having waited so long."""
        self.result = result
        self.stall_s = stall_s
        self.handed_over.set()


def _nobody(_: Outcome) -> None:
    """Outcomes are in the records already."""
