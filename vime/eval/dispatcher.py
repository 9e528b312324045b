"""``EvalDispatcher``: the synchronous face of asynchronous evaluation, for a training loop.

A thin layer: one daemon thread with an event loop of its own runs the
:class:`~vime.eval.dispatch_actor.DispatchActor`, and every method here asks it something.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from vime.eval.actor import LocalActor
from vime.eval.assembly import Parts, assemble
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, Outcome
from vime.eval.dispatch_actor import Admit, Admitted, DispatchActor, Drain, Launch, Settle
from vime.eval.point_life import PointLife
from vime.eval.shared import shared_output
from vime.fsm.trace import Trace
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger("vime")

#: The largest number that JSON and the trackers take as a step.
_LAST_STEP = 2**53

SharedEval = Callable[[int], Any]


class SkippedPointsError(RuntimeError):
    """Under ``--ci-test``: points were skipped. ``outcomes`` holds them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        lines = [
            f"step {o.rollout_id}: {o.reason}: {o.detail or ''}".rstrip(": ") for o in outcomes
        ]
        super().__init__(
            f"--ci-test: {len(outcomes)} eval point(s) were skipped:\n  " + "\n  ".join(lines)
        )
        self.outcomes = outcomes


class EvalHandle:
    """One dispatched point, as its caller sees it."""

    def __init__(self, life: PointLife) -> None:
        self._life = life

    @property
    def rollout_id(self) -> int:
        """The training step that names the point."""
        return self._life.point.rollout_id

    @property
    def state(self) -> str:
        """``queued``, ``exporting``, ``pinning``, ``running``, ``done`` or ``skipped``."""
        return self._life.state

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: in seconds; ``None`` waits until the point settles, which its own
                deadlines bound.

        Raises:
            TimeoutError: it has not settled in time.
        """
        return self._life.outcome.result(timeout)

    def __repr__(self) -> str:
        return f"<EvalHandle step={self.rollout_id} {self.state}>"


class EvalDispatcher:
    """Evaluates checkpoints beside training; made by :meth:`from_args`.

    Use it as a context manager: leaving it normally drains, leaving it by an exception cancels
    what is pending; either way every process of the run has ended afterwards.
    """

    def __init__(self, config: EvalConfig, parts: Parts, shared_eval: SharedEval | None) -> None:
        self.config = config
        self._parts = parts
        self._shared_eval = shared_eval
        self._calling = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
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
    ) -> EvalDispatcher:
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
            trackers: objects with ``log(outcome)``, or callables that take an outcome.

        Raises:
            ConfigError: flags are wrong, or the machine cannot do what they ask.
        """
        config = EvalConfig.from_args(args)
        parts = assemble(config, args, exporter, shared_eval, trackers)
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
        """The outcomes that have been reported, in the order of their arrival."""
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
        _check_step("step", step)
        self._actor.training_step = step

    def dispatch(
        self, rollout_id: int, hf_dir: str | Path | None = None, force: bool = False
    ) -> EvalHandle:
        """Hand over one eval point; training goes on when this returns.

        It holds the caller for the copy of the weights and, under ``backpressure``, until a
        pending eval has ended (under ``latest``, until the one that it replaces has let go).
        With shared engines it blocks for the whole evaluation.

        Args:
            rollout_id: the training step; each is dispatched once.
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
        point = _checked_point(rollout_id, hf_dir, force)
        with self._calling:
            self._raise_if_skipped()
            admitted: Admitted = self._ask(Admit(point))
            if admitted.life.outcome.done():
                return EvalHandle(admitted.life)
            if self._parts.store is None:
                self._run_shared(admitted, started)
            elif point.hf_dir is not None:
                self._tell(Launch(admitted, None, time.perf_counter() - started))
            else:
                self._capture(admitted, started)
            return EvalHandle(admitted.life)

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

        Takes at most ``--eval-dispose-timeout`` seconds; calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self.config.dispose_timeout_s)
        if self._thread.is_alive():
            log.warning(
                "closing took longer than --eval-dispose-timeout %s s; what is left ends with "
                "this process",
                self.config.dispose_timeout_s,
            )
        self._parts.trackers.close(self.config.dispose_timeout_s)
        if not self._thread.is_alive():
            self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self.drain()
        finally:
            self.close()

    # -- the caller's own part of a point ------------------------------------------------------

    def _capture(self, admitted: Admitted, started: float) -> None:
        exporter = self._parts.exporter
        assert admitted.draft is not None
        assert exporter is not None, "with a store there is an exporter"
        try:
            capture = exporter.capture(admitted.life.point.rollout_id, admitted.draft.directory)
        except BaseException as error:
            skip = EvalSkip("export_failed", "".join(traceback.format_exception(error)))
            self._tell(Settle(admitted, skip, time.perf_counter() - started))
            if not isinstance(error, Exception):  # Ctrl-C is the driver's to see
                raise
            return
        self._tell(Launch(admitted, capture, time.perf_counter() - started))

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
            skipped = [o for o in self._outcomes if o.state == "skipped"]
            if skipped:
                raise SkippedPointsError(skipped)

    # -- the thread ----------------------------------------------------------------------------

    def _ask(self, message: Any) -> Any:
        return self._call(self._ref.ask(message))

    def _tell(self, message: Any) -> None:
        self._call(self._ref.tell(message))

    def _call(self, coroutine: Any) -> Any:
        """Run a coroutine on the dispatcher's loop and wait for it."""
        if self._closed or self._loop is None or not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("this EvalDispatcher is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("this EvalDispatcher was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _run_thread(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
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
            )
            async with LocalActor(self._actor, name="dispatcher") as ref:
                self._ref = ref
                self._started.set_result(None)
                await self._stop.wait()
            points.cancel_scope.cancel()

    def _report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._parts.trackers.log(outcome)


def _check_step(name: str, step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _LAST_STEP:
        raise ValueError(
            f"{name}={step!r}: expected an integer from 0 to {_LAST_STEP}, the training step's "
            "number"
        )


def _checked_point(rollout_id: int, hf_dir: str | Path | None, force: bool) -> EvalPoint:
    _check_step("rollout_id", rollout_id)
    if hf_dir is None:
        return EvalPoint(rollout_id, None, bool(force))
    if not isinstance(hf_dir, (str, os.PathLike)) or not str(hf_dir):
        raise ValueError(f"hf_dir={hf_dir!r}: expected the path of a Hugging Face checkpoint")
    directory = Path(hf_dir)
    if not directory.is_dir():
        raise ValueError(
            f"hf_dir={str(hf_dir)!r}: no such directory; expected a Hugging Face checkpoint"
        )
    return EvalPoint(rollout_id, directory.absolute(), bool(force))
