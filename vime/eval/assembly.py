"""Makes the real collaborators of a run from its config, and runs them beside the dispatcher."""

from __future__ import annotations

import argparse
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from vime.eval.config import ConfigError, EvalConfig
from vime.eval.contracts import Evaluator, Exporter
from vime.eval.journal.directory import RunDirectory
from vime.eval.journal.past import LeftPoint, Past
from vime.eval.outcomes.tracking import JsonLinesTracker, Trackers, as_tracker
from vime.eval.runner.runner import RunnerEvaluator
from vime.eval.site import Site, ThisMachine, check_machine
from vime.fsm.trace import Trace

log = logging.getLogger("vime")

if TYPE_CHECKING:
    from vime.eval.actor import ActorRef
    from vime.eval.fleet.supervisor import FleetSupervisor
    from vime.eval.snapshot.store import SnapshotStore


@dataclass
class Parts:
    """The collaborators of one run; ``None`` where the mode of evaluation needs none."""

    config: EvalConfig
    run_dir: Path
    trace: Trace
    trackers: Trackers
    exporter: Exporter | None = None
    store: SnapshotStore | None = None
    fleet: FleetSupervisor | None = None
    evaluator: Evaluator | None = None
    runner: ActorRef | None = None
    site: Site = field(default_factory=ThisMachine)
    prepared: anyio.Event = field(default_factory=anyio.Event)
    directory: RunDirectory | None = None
    past: Past | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the fleet; on leaving, end it and the runner's process."""
        try:
            async with self.site.running(), anyio.create_task_group() as tasks:
                if self.fleet is not None:
                    await tasks.start(self.fleet.run)
                tasks.start_soon(self._prepare_runner)
                yield
                tasks.cancel_scope.cancel()
        finally:
            if self.runner is not None:
                with anyio.CancelScope(shield=True):
                    await self.runner.stop()

    async def _prepare_runner(self) -> None:
        """Warm the runner up while the engines start: its imports take seconds.

        What fails here will fail each evaluation with a reason of its own; it is only logged.
        """
        try:
            if isinstance(self.evaluator, RunnerEvaluator):
                await self.evaluator.prepare()
        except Exception as error:
            log.warning("the eval runner could not prepare itself: %s", error)
        finally:
            self.prepared.set()

    async def wait_ready(self) -> None:
        """Wait until the fleet can be pinned and the runner has loaded what it needs.

        Raises:
            FleetStartError: an engine could not start.
        """
        if self.fleet is not None:
            await self.fleet.wait_ready()
        await self.prepared.wait()

    def close(self) -> None:
        """Give back what the calling thread took: the staging lock, the trace file."""
        if self.store is not None:
            self.store.close()
        self.trace.close()
        if self.directory is not None:
            self.directory.release()


def assemble(
    config: EvalConfig,
    args: argparse.Namespace,
    exporter: Any,
    shared_eval: Any,
    trackers: Iterable[Any],
    site: Site | None = None,
) -> Parts:
    """Check what only this machine can say, then make everything; nothing is started yet.

    Raises:
        ConfigError: the machine, the data or the caller's objects do not fit the flags.
    """
    site = site or ThisMachine()
    _check_caller(config, exporter, shared_eval)
    if config.num_gpus:
        check_machine(config, site)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    run_dir = (config.run_dir or Path("runs") / run_id).absolute()
    directory = RunDirectory(run_dir, run_id, resume=config.resume)
    # Whatever is in that file has been reported: it comes first, and once.
    journal = JsonLinesTracker(directory.metrics_path)
    try:
        sinks = [as_tracker(tracker, run_dir) for tracker in trackers if tracker != "jsonl"]
    except ValueError as error:
        directory.trace.close()
        directory.forget()
        raise ConfigError([str(error)]) from error
    reporters = Trackers(sinks, journal=journal)
    parts = Parts(config, run_dir, directory.trace, reporters, site=site, directory=directory)
    try:
        if config.uses_snapshots:
            _add_snapshot_parts(parts, args, exporter)
    except (ValueError, OSError) as error:
        parts.trackers.close(config.dispose_timeout_s)
        parts.close()
        directory.forget()
        raise error if isinstance(error, ConfigError) else ConfigError([str(error)]) from error
    parts.past = _claimed(directory.past, parts)
    return parts


def _claimed(past: Past | None, parts: Parts) -> Past | None:
    """What earlier runs left, with the reason for each point that cannot be evaluated any more."""
    if past is None:
        return None
    left = [replace(point, loss=_loss(point, past.run_ids, parts)) for point in past.left]
    return replace(past, left=left)


def _loss(left: LeftPoint, run_ids: Sequence[str], parts: Parts) -> str | None:
    hf_dir, cut_off = left.point.hf_dir, f"run {left.run_id} was cut off while it was {left.state}"
    if parts.store is None:
        return f"{cut_off}, and only a snapshot could be evaluated later"
    if hf_dir is not None:
        return None if hf_dir.is_dir() else f"{cut_off}, and {hf_dir} is not there any more"
    if parts.store.claim(left.point.rollout_id, run_ids):
        return None
    return f"{cut_off}, and there is no whole snapshot of it in {parts.config.hf_dir}"


def _check_caller(config: EvalConfig, exporter: Any, shared_eval: Any) -> None:
    if config.uses_snapshots and exporter is None:
        raise ConfigError(
            ["exporter=None: snapshot eval needs one: (model, tokenizer), or a callable "
             "export(rollout_id, directory)"]
        )  # fmt: skip
    if not config.uses_snapshots and shared_eval is None:
        raise ConfigError(
            ["shared_eval=None: without --eval-num-gpus and without a CheckpointEvalFn, pass "
             "shared_eval(rollout_id), the blocking evaluation on the rollout engines"]
        )  # fmt: skip


def _add_snapshot_parts(parts: Parts, args: argparse.Namespace, exporter: Any) -> None:
    from vime.eval.snapshot.export import as_exporter, is_model
    from vime.eval.snapshot.store import SnapshotStore

    config, run_dir, site = parts.config, parts.run_dir, parts.site
    assert config.hf_dir is not None, "validated with the flags"
    if is_model(exporter):
        exporter = as_exporter(
            exporter, max_captures=config.max_captures, max_shard_bytes=config.max_shard_bytes
        )
    parts.exporter = site.make_exporter(exporter)
    store = SnapshotStore(
        config.hf_dir,
        run_id=parts.trace.run_id,
        trace=parts.trace,
        base=config.hf_checkpoint,
        keep=config.keep_snapshots,
        verify=config.verify,
    )
    store.open()
    parts.store = store
    _check_room(parts, store)
    if config.num_gpus:
        parts.fleet = site.make_fleet(config, run_dir, parts.trace)
    parts.runner = site.make_runner(
        "vime.eval.runner.runner:make_runner",
        (config, args, run_dir),
        run_dir / "logs" / "eval_runner.log",
    )
    parts.evaluator = RunnerEvaluator(parts.runner, config.eval_timeout_s)


def _check_room(parts: Parts, store: SnapshotStore) -> None:
    """See that snapshots and captures fit, before training finds out in the middle of a run.

    Raises:
        ValueError: they do not; it says how much is needed.
    """
    from vime.eval.snapshot.memory import check_captures, is_in_memory

    config = parts.config
    assert config.hf_dir is not None, "validated with the flags"
    size = 0 if store.base is None else store.base.num_bytes
    snapshots_bytes = size * (config.keep_snapshots + config.max_in_flight + 1)
    store.check_space(snapshots_bytes)
    check_captures(
        parts.exporter, snapshots_bytes=snapshots_bytes if is_in_memory(config.hf_dir) else 0
    )
