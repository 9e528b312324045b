"""``EvalDispatcher``: the synchronous face of asynchronous evaluation, for a training loop.

A thin layer: one daemon thread with an event loop of its own runs the
:class:`~vime.eval.dispatch.actor.DispatchActor`, and every method here asks it something.
``dispatch`` waits for an answer only when it has to: not while a slot is free and the exporter
needs no directory. Then admission happens beside the capture.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio

from vime.eval.actor import LocalActor
from vime.eval.assembly import Parts, assemble
from vime.eval.config import EvalConfig
from vime.eval.contracts import Capture, EvalOutput, EvalPoint, Outcome
from vime.eval.dispatch import considerate
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.dispatch.call_checks import check_step, checked_point
from vime.eval.dispatch.handle import EvalHandle
from vime.eval.dispatch.leaving import DrainedOnLeaving, SkippedPointsError
from vime.eval.dispatch.messages import (
    Admit,
    Admitted,
    Captured,
    Drain,
    Launch,
    Settle,
    TakeUp,
)
from vime.eval.dispatch.point_life import life_id, point_id
from vime.eval.dispatch.shared import shared_output
from vime.eval.journal.past import Past
from vime.eval.site import Site
from vime.fsm.trace import Trace
from vime.rollout.checkpoint_eval import EvalSkip

__all__ = ["EvalDispatcher", "SharedEval", "SkippedPointsError"]

log = logging.getLogger("vime")

SharedEval = Callable[[int], Any]
T = TypeVar("T")


class EvalDispatcher(DrainedOnLeaving):
    """Evaluates checkpoints beside training; made by :meth:`from_args`.

    Use it as a context manager: leaving it normally drains, leaving it by an exception cancels
    what is pending; either way every process of the run has ended afterwards.
    """

    def __init__(self, config: EvalConfig, parts: Parts, shared_eval: SharedEval | None) -> None:
        self.config = config
        self._parts = parts
        self._shared_eval = shared_eval
        self._calling = threading.Lock()
        past = parts.past or Past()
        self._outcomes: list[Outcome] = list(past.outcomes)
        self._dispatched = {life_id(o) for o in past.outcomes} | {
            point_id(left.point) for left in past.left
        }
        for outcome in past.unreported:
            parts.trackers.log(outcome)
        self._told: Future[None] | None = None
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: anyio.Event | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run_thread, name="vime", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        *,
        exporter: Any = None,
        shared_eval: SharedEval | None = None,
        trackers: Iterable[Any] = (),
        site: Site | None = None,
    ) -> Self:
        """Validate ``args``, make the run directory, and start what evaluation needs.

        Engines start in the background; :meth:`wait_until_ready` waits for them.

        Args:
            args: the flags of :func:`vime.eval.add_eval_arguments`; missing ones have defaults.
            exporter: a ``(model, tokenizer)`` pair of ``transformers`` objects, a callable
                ``export(rollout_id, directory)``, or an :class:`~vime.eval.contracts.Exporter`.
                Needed for snapshot eval.
            shared_eval: ``shared_eval(rollout_id)``, the framework's own blocking eval; used
                when there is neither a fleet nor a ``CheckpointEvalFn``. It may return metrics
                (a dictionary), a ``RolloutFnEvalOutput`` or ``None``.
            trackers: objects with ``log(outcome)`` and, if they hold something, ``close()``;
                callables that take an outcome; or the names ``tensorboard``, ``wandb`` and
                ``mlflow``. The classes behind those names, with their settings, are in
                :mod:`vime.eval.outcomes.tracking`.
            site: where engines and runner live; this machine if absent. On a Ray cluster use
                :class:`vime.ray.dispatcher.RayEvalDispatcher`, which brings its own.

        Raises:
            ConfigError: flags are wrong, or the machine cannot do what they ask.
        """
        config = EvalConfig.from_args(args)
        parts = assemble(config, args, exporter, shared_eval, trackers, site)
        return cls(config, parts, shared_eval)

    @property
    def run_dir(self) -> Path:
        """Where the evidence of the run is written."""
        return self._parts.run_dir

    @property
    def run_id(self) -> str:
        """The run's name, unique in the world."""
        return self._parts.trace.run_id

    @property
    def trace(self) -> Trace:
        """The trace of the run; subscribe to it for a live view."""
        return self._parts.trace

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes that have been reported, in the order of their arrival.

        Those of the runs that this one continues come first.
        """
        return list(self._outcomes)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the first point could be evaluated at once: fleet and runner are up.

        Args:
            timeout: in seconds; ``--eval-start-timeout`` if absent.

        Raises:
            FleetStartError: an engine could not start; the message ends with its log's tail.
            TimeoutError: they were not ready in time.
        """
        limit = self.config.start_timeout_s if timeout is None else timeout

        async def wait() -> None:
            with anyio.fail_after(limit):
                await self._parts.wait_ready()

        self._call(wait())

    def at_step(self, step: int) -> None:
        """Say where training stands, so that ``eval/lag_steps`` is right; costs nothing.

        Raises:
            ValueError: no integer of 0 or more.
        """
        check_step("step", step)
        self._actor.training_step = step

    def dispatch(
        self, rollout_id: int, hf_dir: str | Path | None = None, force: bool = False
    ) -> EvalHandle:
        """Hand over one eval point; training goes on when this returns.

        It holds the caller for the copy of the weights and, under ``backpressure``, until a
        pending eval has ended (under ``latest``, until the one that it replaces has let go).
        With shared engines it blocks for the whole evaluation.

        Args:
            rollout_id: the training step; each is dispatched once. One that a run was asked for
                which this one continues has its outcome, or is on its way to it, as it was then.
            hf_dir: an existing checkpoint to evaluate instead of the present weights (the
                pre-training baseline); it is never deleted.
            force: never drop it: for the last point of a run.

        Returns:
            A handle with ``state`` and ``result(timeout)``.

        Raises:
            ValueError: a caller's mistake: no integer, dispatched already, no such directory.
            RuntimeError: the dispatcher is closed.
            SkippedPointsError: under ``--ci-test``, an earlier point was skipped.
        """
        started = time.perf_counter()
        point = checked_point(rollout_id, hf_dir, force)
        with self._calling:
            self._raise_if_skipped()
            if self._may_go_ahead(point):
                return self._go_ahead(point, started)
            admission = self._post(self._ref.ask(Admit(point)))
            admitted: Admitted = self._await(admission)
            self._dispatched.add(admitted.life.id)
            if admitted.is_earlier or admitted.life.outcome.done():
                pass
            elif self._parts.store is None:
                self._run_shared(admitted, started)
            elif point.hf_dir is not None:
                self._tell(Launch(admitted, None, time.perf_counter() - started))
            else:
                self._capture(admitted, started)
            return EvalHandle(point, admission)

    def drain(self, timeout: float | None = None) -> list[Outcome]:
        """Wait until every dispatched point has its outcome, and return all of them.

        Args:
            timeout: in seconds, ``--eval-drain-timeout`` if absent; what is pending then is
                skipped as ``cancelled``.

        Raises:
            SkippedPointsError: under ``--ci-test``, a point was skipped.
        """
        with self._calling:
            self._ask(Drain(self.config.drain_timeout_s if timeout is None else timeout))
            self._parts.trackers.flush(self.config.dispose_timeout_s)
            self._raise_if_skipped()
            return self.outcomes

    def close(self) -> None:
        """End everything that the run started; pending points are skipped as ``cancelled``.

        Takes at most ``--eval-dispose-timeout`` seconds and one more; calling it again does
        nothing.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self.config.dispose_timeout_s
        self._end_loop()
        self._thread.join(self.config.dispose_timeout_s)
        if self._thread.is_alive():
            log.warning(
                "closing took longer than --eval-dispose-timeout %s s; what is left ends with "
                "this process",
                self.config.dispose_timeout_s,
            )
        self._parts.trackers.close(max(deadline - time.monotonic(), 1.0))
        if not self._thread.is_alive():
            self._parts.close()

    def _end_loop(self) -> None:
        """Have the loop end, once all messages are in the actor's mailbox."""
        loop, stop = self._loop, self._stop
        if loop is None or stop is None or loop.is_closed():
            return
        if self._told is None:
            loop.call_soon_threadsafe(stop.set)
        else:
            self._told.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.set))

    # -- the caller's own part of a point ------------------------------------------------------

    def _may_go_ahead(self, point: EvalPoint) -> bool:
        """Whether its admission is certain, and nothing of the reply is needed for the capture."""
        return (
            point.hf_dir is None
            and self._parts.store is not None
            and not getattr(self._parts.exporter, "needs_directory", True)
            # Outcomes come one a point, after its slot has become free.
            and len(self._dispatched) - len(self._outcomes) < self.config.max_in_flight
            and point_id(point) not in self._dispatched
        )

    def _go_ahead(self, point: EvalPoint, started: float) -> EvalHandle:
        """Capture while the dispatcher's thread admits the point."""
        assert self.config.hf_dir is not None, "there is a store"
        admission = self._post(self._ref.ask(Admit(point)))
        self._dispatched.add(point_id(point))
        place = self.config.hf_dir / f"step_{point.rollout_id}"
        self._captured(
            point, place, lambda result: Captured(point, result, time.perf_counter() - started)
        )
        return EvalHandle(point, admission)

    def _capture(self, admitted: Admitted, started: float) -> None:
        """Capture for a point that has been admitted."""
        assert admitted.draft is not None

        def message(result: Capture | EvalSkip) -> Launch | Settle:
            stall_s = time.perf_counter() - started
            if isinstance(result, EvalSkip):
                return Settle(admitted, result, stall_s)
            return Launch(admitted, result, stall_s)

        self._captured(admitted.life.point, admitted.draft.directory, message)

    def _captured(
        self, point: EvalPoint, directory: Path, message: Callable[[Capture | EvalSkip], Any]
    ) -> None:
        """Have the exporter capture, and tell the actor what came of it."""
        exporter = self._parts.exporter
        assert exporter is not None, "with a store there is an exporter"
        try:
            capture = exporter.capture(point.rollout_id, directory)
        except BaseException as error:
            failed = EvalSkip("export_failed", "".join(traceback.format_exception(error)))
            self._tell(message(failed))
            if not isinstance(error, Exception):  # Ctrl-C is the driver's to see
                raise
        else:
            self._tell(message(capture))

    def _run_shared(self, admitted: Admitted, started: float) -> None:
        assert self._shared_eval is not None
        result: EvalOutput | EvalSkip
        try:
            result = shared_output(self._shared_eval(admitted.life.point.rollout_id))
        except EvalSkip as skip:
            result = skip
        except BaseException as error:
            result = EvalSkip("crashed", "".join(traceback.format_exception(error)))
            if not isinstance(error, Exception):
                self._ask(Settle(admitted, result, time.perf_counter() - started))
                raise
        self._ask(Settle(admitted, result, time.perf_counter() - started))

    def _raise_if_skipped(self) -> None:
        if self.config.ci_test:
            SkippedPointsError.raise_for(self._outcomes)

    # -- the thread ----------------------------------------------------------------------------

    def _ask(self, message: Any) -> Any:
        return self._call(self._ref.ask(message))

    def _tell(self, message: Any) -> None:
        """Messages arrive in their order; nobody waits for it, since the mailbox has room."""
        self._told = self._post(self._ref.tell(message))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the dispatcher's loop and wait for it."""
        return self._await(self._post(coroutine))

    def _post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have a coroutine run on the dispatcher's loop."""
        if self._closed or self._loop is None or not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("this EvalDispatcher is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _await(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this EvalDispatcher was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _run_thread(self) -> None:
        try:
            options = {"loop_factory": considerate.new_loop}
            anyio.run(self._main, backend="asyncio", backend_options=options)
        except BaseException as error:
            if self._started.done():
                log.exception("the dispatcher's thread ended by an error; evals have stopped")
            else:
                self._started.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = anyio.Event()
        async with self._parts.running(), anyio.create_task_group() as points:
            self._actor = DispatchActor(
                self.config,
                points,
                self._parts.trace,
                store=self._parts.store,
                fleet=self._parts.fleet,
                evaluator=self._parts.evaluator,
                report=self._report,
                ready=self._until_ready,
            )
            async with LocalActor(self._actor, name="dispatcher") as ref:
                self._ref = ref
                if self._parts.past is not None:
                    await ref.tell(TakeUp(self._parts.past.outcomes, self._parts.past.left))
                self._started.set_result(None)
                await self._stop.wait()
            points.cancel_scope.cancel()

    async def _until_ready(self) -> None:
        """Wait for fleet and runner; if they do not come, a point's own pin says why."""
        with anyio.move_on_after(self.config.start_timeout_s):
            try:
                await self._parts.wait_ready()
            except Exception as error:
                log.warning("points that an earlier run has left find no fleet: %s", error)

    def _report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._parts.trackers.log(outcome)
