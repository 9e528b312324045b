"""Drivers that die at a given moment, forked from one warm process: mortal.py; a JSON line each.

A line of the standard input is ``{"root": DIRECTORY, "kill_at": N, "seed": S}``. The answer is
the status of the driver, and how many moments it lived through if nothing killed it. A moment is
each side and the middle of every write to the trace and to ``metrics.jsonl``, and whatever is
opened, made, renamed or removed below the directory. With a negative ``kill_at`` the driver is
killed by another process at some time, after so many microseconds.

Dispatcher, store, trace, trackers and lock are the real ones; fleet and evaluator are quick.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.from_thread
from anyio._backends import _asyncio  # noqa: F401 -- warm, for the forks

from vime.eval import assembly
from vime.eval.config import EvalConfig
from vime.eval.contracts import EngineProof, EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.outcomes import trackers
from vime.fsm import journal_file
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import ENGINE
from vime.fsm.trace import Trace
from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

NUM_STEPS = 5
SKIPPED_STEP = 3
EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"})


def weight_of(step: int) -> float:
    """What training has made of the weights by that step, every time."""
    return 1.0 / (step + 2)


def write_checkpoint(directory: Path, weight: float) -> None:
    """The smallest checkpoint that there can be."""
    header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    content = struct.pack("<Q", len(header)) + header + struct.pack("<d", weight)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)


def read_weight(directory: Path) -> float:
    return float(struct.unpack("<d", (directory / "model.safetensors").read_bytes()[-8:])[0])


class Moments:
    """Counts them, and ends the process at one."""

    def __init__(self, root: Path, kill_at: int) -> None:
        self.root = str(root)
        self.kill_at = kill_at
        self.count = 0
        self._lock = threading.Lock()

    def pass_by(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and str(args[0]).startswith(self.root):
            self.pass_by()

    def around(self, write: Callable[..., int]) -> Callable[..., int]:
        """``write``, with a moment before, one in the middle of the bytes, and one after."""

        def written(target: Any, data: bytes) -> int:
            self.pass_by()
            if self.count + 1 == self.kill_at:
                write(target, bytes(data)[: len(data) // 2])
            self.pass_by()
            size = write(target, data)
            self.pass_by()
            return size

        return written


class QuickFleet:
    """One engine that loads whatever it is given; its life is in the trace."""

    def __init__(self, trace: Trace) -> None:
        self._engine = TracedMachine(ENGINE, "eval-0", trace)
        self._turn = anyio.Lock()

    async def run(self, *, task_status: Any) -> None:
        self._engine.fire("start")
        self._engine.fire("ready")
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            self._engine.fire("stop")

    async def wait_ready(self) -> None:
        """It always is."""

    @asynccontextmanager
    async def pin(
        self, snapshot: Snapshot, cause_seq: int | None = None
    ) -> AsyncIterator[PinProof]:
        async with self._turn:
            version = snapshot.weight_version
            self._engine.fire("pin", weight_version=version, cause_seq=cause_seq)
            served = self._engine.fire("serve", weight_version=version)
            proof = EngineProof("eval-0", version)
            yield PinProof("http://quick", "m", version, (proof,), cause_seq=served.seq)


class QuickEvaluator:
    """The score is the weight; it takes a moment."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def evaluate(
        self, point: EvalPoint, snapshot: Snapshot, proof: PinProof | None
    ) -> EvalOutput:
        await anyio.sleep(self._chance.random() * 0.002)
        if point.rollout_id == SKIPPED_STEP:
            raise EvalSkip("service_away", "503 from the scoring service")
        return EvalOutput({"eval/sums": read_weight(snapshot.path)})


class Exporter:
    """Captures without a directory, as that of ``transformers`` does."""

    needs_directory = False

    def capture(self, rollout_id: int, directory: Path) -> Any:
        return Held(weight_of(rollout_id))


class Held:
    def __init__(self, weight: float) -> None:
        self._weight = weight

    def write(self, directory: Path) -> None:
        write_checkpoint(directory, self._weight)

    def release(self) -> None:
        """A number is held by nobody."""


class Backend(CheckpointEvalFn):
    """Asks for snapshots; it is never called."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        raise NotImplementedError


@contextmanager
def opened(root: Path, seed: int, **flags: object) -> Iterator[EvalDispatcher]:
    """A dispatcher on ``root/run`` and ``root/staging``, with a quick fleet and evaluator."""
    args = argparse.Namespace(
        eval_run_dir=str(root / "run"),
        eval_resume=True,
        eval_hf_dir=str(root / "staging"),
        eval_interval=1,
        eval_keep_snapshots=1,
        eval_function_path=f"{Backend.__module__}.Backend",
    )
    vars(args).update(flags)

    def see(outcome: Any) -> None:
        with (root / "seen").open("a") as file:
            file.write(f"{outcome.hf_dir is not None}:{outcome.rollout_id}\n")

    config = EvalConfig.from_args(args)
    parts = assembly.assemble(config, args, Exporter(), None, [see])
    parts.fleet = QuickFleet(parts.trace)  # type: ignore[assignment]
    parts.evaluator = QuickEvaluator(random.Random(seed))
    parts.runner = None
    with EvalDispatcher(config, parts, None) as dispatcher:
        yield dispatcher


def drive(root: Path, seed: int) -> None:
    """A training run that begins anew each time, and comes to the same weights."""
    with opened(root, seed) as dispatcher:
        dispatcher.dispatch(0, hf_dir=root / "base")
        for step in range(1, NUM_STEPS + 1):
            dispatcher.at_step(step)
            dispatcher.dispatch(step, force=step == NUM_STEPS)
        dispatcher.drain()


def child(root: Path, kill_at: int, seed: int, answer: int) -> None:
    """Never returns."""
    moments = Moments(root, kill_at)
    sys.addaudithook(moments.audit)
    file_class = journal_file.JournalFile
    file_class.write = moments.around(file_class.write)  # type: ignore[method-assign]
    told = moments.around(os.write)
    trackers.os = SimpleNamespace(**vars(os) | {"write": told})  # type: ignore[attr-defined]
    drive(root, seed)
    os.write(answer, str(moments.count).encode())
    os._exit(0)


def fork(root: Path, kill_at: int, seed: int) -> dict[str, int]:
    reading, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(root, kill_at, seed, answer)
        finally:
            os._exit(1)
    os.close(answer)
    if kill_at < 0:
        time.sleep(-kill_at / 1e6)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    told = os.read(reading, 100)
    os.close(reading)
    return {"status": os.waitstatus_to_exitcode(status), "moments": int(told or b"0")}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        result = fork(Path(order["root"]), order["kill_at"], order["seed"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.modules["tests.programs.mortal"] = sys.modules["__main__"]
    main()
