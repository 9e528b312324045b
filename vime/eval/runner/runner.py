"""The EvalRunner: the actor in whose process an evaluation runs, and the evaluator that asks it."""

from __future__ import annotations

import traceback
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from vime.eval.actor import Actor, ActorDied, ActorRef
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.rollout.checkpoint_eval import EvalSkip

if TYPE_CHECKING:
    from vime.eval.runner.backend import BackendEvaluation
    from vime.eval.runner.function import FunctionEvaluation
    from vime.eval.runner.stock import StockEvaluation

#: The runner ends an evaluation at its deadline by itself. Only when it does not answer for so
#: much longer is it taken for stuck.
ANSWER_GRACE_S = 10.0

_MAX_TRACEBACK = 8000


@dataclass(frozen=True)
class Evaluate:
    """Score one snapshot.

    Attributes:
        point: which evaluation.
        snapshot: the verified checkpoint directory.
        proof: the fleet that serves it; ``None`` when the user's backend loads it by itself.
    """

    point: EvalPoint
    snapshot: Snapshot
    proof: PinProof | None


@dataclass(frozen=True)
class Prepare:
    """Load what the first evaluation needs, while nobody waits for it yet."""


@dataclass(frozen=True)
class Refusal:
    """The answer in place of a score: an :class:`EvalSkip` that travels between processes.

    Attributes:
        reason: the skip reason.
        detail: a sentence, or a traceback of user code.
    """

    reason: str
    detail: str


class EvalRunner(Actor):
    """Runs evaluations, one at a time: requests, tokenising, rewards and user code.

    Consumes :class:`Prepare` and :class:`Evaluate`; produces an :class:`EvalOutput` or a
    :class:`Refusal`, and the samples file. It waits for the engines (or the user's backend) and
    for the user's reward, all of it under ``eval_timeout_s``; nobody else unblocks it. It never
    raises for what an evaluation does wrong. Code that blocks its event loop for good is the
    caller's to end, with the process.

    Args:
        config: the evaluation's settings.
        args: the run's arguments, for user code.
        run_dir: samples are written to ``run_dir/samples``.
    """

    def __init__(self, config: EvalConfig, args: Namespace, run_dir: Path) -> None:
        self._config = config
        self._args = args
        self._run_dir = Path(run_dir)
        self._stock: StockEvaluation | None = None
        self._backend: BackendEvaluation | None = None
        self._function: FunctionEvaluation | None = None

    async def handle(self, message: Any) -> EvalOutput | Refusal | None:
        """Run one evaluation to its end or its deadline.

        Raises:
            TypeError: the message is neither :class:`Evaluate` nor :class:`Prepare`.
            Exception: whatever keeps it from preparing; an evaluation would say the same.
        """
        if isinstance(message, Prepare):
            await self._prepare()
            return None
        if not isinstance(message, Evaluate):
            raise TypeError(f"EvalRunner was sent {message!r:.200}: expected Evaluate")
        limit_s = self._config.eval_timeout_s
        try:
            with anyio.move_on_after(limit_s):
                return await self._evaluate(message)
            return Refusal(
                "timeout_eval", f"the evaluation took longer than --eval-timeout {limit_s:.4g} s"
            )
        except Exception as error:
            skip = _only_skip(error)
            if skip is not None:
                return Refusal(skip.reason, skip.detail)
            return Refusal("crashed", traceback.format_exc()[-_MAX_TRACEBACK:])

    async def _evaluate(self, message: Evaluate) -> EvalOutput:
        if message.proof is None:
            return await self._own_backend().evaluate(message.point, message.snapshot)
        if self._config.function_path is not None:
            function = self._own_function()
            return await function.evaluate(message.point, message.snapshot, message.proof)
        return await self._own_stock().evaluate(message.point, message.snapshot, message.proof)

    async def _prepare(self) -> None:
        if self._config.function_path is None:
            await self._own_stock().prepare()
        elif self._config.num_gpus == 0:
            self._own_backend()

    def _own_stock(self) -> StockEvaluation:
        if self._stock is None:
            from vime.eval.runner.stock import StockEvaluation

            self._stock = StockEvaluation(self._config, self._run_dir)
        return self._stock

    def _own_backend(self) -> BackendEvaluation:
        if self._backend is None:
            from vime.eval.runner.backend import BackendEvaluation

            if self._config.function_path is None:
                raise ValueError(
                    "no fleet was pinned and --eval-function-path is not set: there is nothing "
                    "to evaluate with"
                )
            self._backend = BackendEvaluation(self._config, self._args, self._run_dir)
        return self._backend

    def _own_function(self) -> FunctionEvaluation:
        if self._function is None:
            from vime.eval.runner.function import FunctionEvaluation

            self._function = FunctionEvaluation(self._config, self._args, self._run_dir)
        return self._function

    async def stopped(self) -> None:
        """Dispose of the user's backend."""
        if self._backend is not None:
            await self._backend.dispose()


def make_runner(config: EvalConfig, args: Namespace, run_dir: Path) -> EvalRunner:
    """The factory that the runner's own process calls."""
    return EvalRunner(config, args, run_dir)


class RunnerEvaluator:
    """An :class:`~vime.eval.contracts.Evaluator` that asks an :class:`EvalRunner`, wherever it is.

    Evaluations take turns, and the time of each begins with its turn.

    Args:
        runner: its ref.
        timeout_s: how long an evaluation may take, in seconds.
    """

    def __init__(self, runner: ActorRef, timeout_s: float) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._turn = anyio.Lock()

    async def prepare(self) -> None:
        """Start the runner and have it load what the first evaluation needs.

        Raises:
            ActorDied: its process died of it.
            TimeoutError: it was not ready within an evaluation's time.
            Exception: what kept it from preparing; each evaluation will be skipped for it.
        """
        async with self._turn:
            await self._runner.ask(Prepare(), timeout_s=self._timeout_s)

    async def evaluate(
        self, point: EvalPoint, snapshot: Snapshot, proof: PinProof | None
    ) -> EvalOutput:
        """Have the runner score ``snapshot``.

        Raises:
            EvalSkip: the runner's refusal; ``crashed`` when its process died, with the exit
                status and the end of its log; ``timeout_eval`` when it does not answer.
        """
        message = Evaluate(point, snapshot, proof)
        limit_s = self._timeout_s + ANSWER_GRACE_S
        try:
            async with self._turn:
                answer = await self._runner.ask(message, timeout_s=limit_s)
        except ActorDied as death:
            raise EvalSkip("crashed", str(death)) from death
        except TimeoutError as error:
            raise EvalSkip(
                "timeout_eval",
                f"the eval runner gave no answer within {limit_s:.4g} s (--eval-timeout "
                f"{self._timeout_s:.4g} and some grace), and was ended: something blocks its event "
                "loop",
            ) from error
        if isinstance(answer, Refusal):
            raise EvalSkip(answer.reason, answer.detail)
        assert isinstance(answer, EvalOutput), "a runner answers with one of two types"
        return answer


def _only_skip(error: BaseException) -> EvalSkip | None:
    """The :class:`EvalSkip` that ``error`` is, or that a group of nothing else holds."""
    if isinstance(error, EvalSkip):
        return error
    if isinstance(error, BaseExceptionGroup):
        skips = [_only_skip(inner) for inner in error.exceptions]
        return skips[0] if all(skips) else None
    return None
