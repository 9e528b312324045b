"""A whole run without processes and sockets, on virtual time.

Real are the dispatcher's actor, the store on a disk, the supervisor, the runner and its generator.
Fake are the vLLM servers and the router: see :mod:`tests.fleet.world`. What the store does on
worker threads is done in its task, after a virtual while: a virtual clock does not wait for threads.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.fleet.answers import answer_of
from tests.fleet.world import World
from vime.eval.actor import LocalActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, Outcome, PinProof, Snapshot
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.dispatch.messages import Admit, Admitted, Drain, Launch
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.supervisor import FleetSupervisor
from vime.eval.runner.generate import Generator, open_generator
from vime.eval.runner.runner import EvalRunner, RunnerEvaluator
from vime.eval.snapshot.store import SnapshotStore
from vime.fsm.trace import Record, Trace

NUM_TOKENS = 6
PROMPTS = [[10, 20, number] for number in range(4)]
RUN = "run"


def write_tiny(directory: Path, weights: bytes) -> None:
    """The smallest whole checkpoint: one tensor of bytes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    entry = {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}
    header = json.dumps({"w": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + weights
    (directory / "model.safetensors").write_bytes(content)


@dataclass
class Weights:
    """A capture of a few bytes; ``spoil`` may damage what was written, or raise."""

    step: int
    spoil: Callable[[Path], None] | None = None
    released: int = 0

    def write(self, directory: Path) -> None:
        write_tiny(directory, bytes([self.step % 250, 1, 2, 3, 4, 5, 6, 7]))
        if self.spoil is not None:
            self.spoil(directory)

    def release(self) -> None:
        self.released += 1


@dataclass
class Questions:
    """In the place of the stock evaluation: asks some prompts, several at once, and keeps answers.

    Attributes:
        pause: how long each prompt is thought about, in seconds.
        scored: weight version → the answers behind a score.
    """

    config: EvalConfig
    world: World
    pause: Callable[[], float] = float
    scored: dict[str, list[list[int]]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    async def evaluate(self, point: EvalPoint, snapshot: Snapshot, proof: PinProof) -> EvalOutput:
        """Raises as :class:`vime.eval.runner.generate.Generator` does."""
        answers: dict[int, list[int]] = {}

        async def ask(generator: Generator, number: int) -> None:
            await anyio.sleep(self.pause())
            sampling = {"n": 1, "temperature": 0.0, "max_tokens": NUM_TOKENS}
            generation = await generator.generate(PROMPTS[number], number, sampling)
            assert generation.weight_version == snapshot.weight_version
            answers[number] = generation.token_ids

        async with (
            open_generator(self.config, proof, self.world.connect) as generator,
            anyio.create_task_group() as tasks,
        ):
            for number in range(len(PROMPTS)):
                tasks.start_soon(ask, generator, number)
        self.digests[snapshot.weight_version] = snapshot.digest
        found = [answers[number] for number in range(len(PROMPTS))]
        self.scored[snapshot.weight_version] = found
        return EvalOutput({"eval/fake": float(sum(map(sum, found)))})

    def is_sound(self, version: str) -> bool:
        """Whether a score stands on the answers of an engine that was started on the snapshot."""
        digest = self.digests[version]
        cold = [answer_of(digest, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
        return self.scored[version] == cold


@dataclass
class WholeRun:
    """What a run consists of, and all that came out of it."""

    world: World
    staging: Path
    questions: Questions
    records: list[Record]
    outcomes: list[Outcome]
    captures: list[Weights]
    ref: Any = None
    fleet: FleetSupervisor | None = None

    async def dispatch(
        self, step: int, *, force: bool, spoil: Callable[[Path], None] | None = None
    ) -> None:
        """What the training thread does at a due step."""
        admitted: Admitted = await self.ref.ask(Admit(EvalPoint(step, None, force)))
        if admitted.life.outcome.done():
            return
        capture = Weights(step, spoil)
        self.captures.append(capture)
        await self.ref.tell(Launch(admitted, capture, 0.0))

    async def drain(self, timeout_s: float) -> None:
        await self.ref.ask(Drain(timeout_s))


class PromptJanitor:
    """Removes at once, in the place of a thread: what is on disk then depends on the seed alone."""

    def __init__(self, remove: Callable[[Path], None]) -> None:
        self.remove = remove

    def settle(self, timeout_s: float) -> bool:
        return True

    def stop(self, timeout_s: float) -> bool:
        return True


def threads_take(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Do in the task what belongs on a worker thread, after a virtual while."""

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await anyio.sleep(seconds())
        return function(*args)

    monkeypatch.setattr("vime.eval.snapshot.store.to_thread.run_sync", run_sync)
    monkeypatch.setattr("vime.eval.snapshot.store.Janitor", PromptJanitor)
    for module in ("engine", "router"):  # a start is looked at a few times, not hundreds
        monkeypatch.setattr(f"vime.eval.fleet.{module}._POLL_S", 4.0)


@asynccontextmanager
async def open_run(
    world: World, root: Path, config: EvalConfig, settings: dict[str, Any]
) -> AsyncIterator[WholeRun]:
    """A run under way; on leaving it is ended in whatever state it is."""
    records: list[Record] = []
    trace = Trace(None, RUN, mono_ns=lambda: int(anyio.current_time() * 1e9))
    trace.subscribe(records.append)
    trace.subscribe(world.listen)
    write_tiny(root / "base", bytes(8))
    store = SnapshotStore(root / "staging", run_id=RUN, trace=trace, base=root / "base",
                          keep=config.keep_snapshots)  # fmt: skip
    store.open()
    run = WholeRun(world, root / "staging", Questions(config, world), records, [], [])
    fleet = FleetSupervisor(
        FleetSettings(base=root / "base", run_dir=root, **settings),
        trace, spawn=world.spawn, make_client=world.make_short_client,
    )  # fmt: skip
    run.fleet = fleet
    runner = EvalRunner(config, Namespace(), root)
    runner._stock = run.questions  # type: ignore[assignment]
    try:
        async with (
            anyio.create_task_group() as engines,
            LocalActor(runner, name="runner") as runner_ref,
            anyio.create_task_group() as points,
        ):
            await engines.start(fleet.run)
            actor = DispatchActor(
                config, points, trace,
                store=store, fleet=fleet,
                evaluator=RunnerEvaluator(runner_ref, config.eval_timeout_s),
                report=run.outcomes.append,
            )  # fmt: skip
            async with LocalActor(actor, name="dispatcher") as run.ref:
                yield run
            points.cancel_scope.cancel()
            engines.cancel_scope.cancel()
    finally:
        store.close()
