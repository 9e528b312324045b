"""``DistributedEvalDispatcher``: the dispatcher of a training loop that runs on several ranks.

Every rank makes one and calls it at the same steps. Rank 0's holds the
:class:`~vime.eval.dispatcher.EvalDispatcher`: engines, trace and trackers are its own. The others
capture their part of the weights, and hear what rank 0 has to say.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vime.eval.config import ConfigError
from vime.eval.config.flags import BY_DEST, value_of
from vime.eval.config.sizes import parse_size
from vime.eval.contracts import Outcome
from vime.eval.dispatch.call_checks import checked_point
from vime.eval.dispatch.handle import EvalHandle
from vime.eval.dispatch.leaving import DrainedOnLeaving, SkippedPointsError
from vime.eval.dispatch.point_life import point_id
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.ranks.board import Board, BoardClosed
from vime.eval.ranks.exporter import ShardedExporter
from vime.eval.snapshot.memory import check_captures

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger("vime")

_CLOSED = "closed"
_GRACE_S = 10.0
#: Of ``--eval-export-timeout``: the rest is for writing what surrounds the weights, and sealing.
_SHARE_OF_RANKS = 0.9


class DistributedEvalDispatcher(DrainedOnLeaving):
    """Evaluates beside training on several ranks; made by :meth:`from_args`, on every rank.

    Use it as a context manager, as an ``EvalDispatcher``. No method is a collective: a rank that
    fails or hangs ends the point as ``export_failed`` or ``timeout_export``, and holds nobody.

    Attributes:
        dispatcher: rank 0's ``EvalDispatcher``, for all that only rank 0 can be asked; ``None``
            on the others.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        board: Board,
        exporter: ShardedExporter,
        dispatcher: EvalDispatcher | None,
    ) -> None:
        self._get = value_of(args)
        self._board = board
        self._exporter = exporter
        self.dispatcher = dispatcher
        self._dispatched: set[str] = set()
        self._num_agreed = 0
        self._closed = False

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        *,
        model: Any,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        trackers: Iterable[Any] = (),
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """On every rank, after ``init_process_group``; with the same flags.

        Args:
            args: the flags of :func:`vime.eval.add_eval_arguments`.
            model: this rank's ``transformers`` model: under ``DistributedDataParallel``, or
                sharded by ``fully_shard``.
            tokenizer: its tokenizer or processor; rank 0's is saved along.
            dtype: write floating-point weights in this dtype (``"bfloat16"``), as they are if
                absent.
            trackers: as of ``EvalDispatcher.from_args``; rank 0's are told.
            group: the ranks that hold the model together; all if ``None``.

        Raises:
            ConfigError: on all ranks, when flags are wrong or the machine cannot do what they ask.
            ValueError: this rank's model cannot be captured, or its captures do not fit into
                memory.
            TimeoutError: a rank has not come in time.
        """
        get = value_of(args)
        board = Board(group)
        try:
            _check_deadlines(get)
            exporter = ShardedExporter(board, model, tokenizer, dtype=dtype, **_limits(get))
            check_captures(exporter, num_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        except ValueError as error:  # the others need not wait for this rank
            board.post(_CLOSED if board.leads else f"here_{board.rank}", {"error": str(error)})
            raise
        self = cls(args, board, exporter, None)
        try:
            self._meet()
            self._agree(lambda: self._start(args, trackers), get("eval_start_timeout"))
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, args: argparse.Namespace, trackers: Iterable[Any]) -> None:
        self.dispatcher = EvalDispatcher.from_args(args, exporter=self._exporter, trackers=trackers)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that evaluates."""
        return self._board.leads

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the first point could be evaluated at once; on every rank.

        Args:
            timeout: in seconds; ``--eval-start-timeout`` if absent.

        Raises:
            FleetStartError: on rank 0; ``RuntimeError`` with its words on the others.
            TimeoutError: they were not ready in time.
        """
        limit_s = self._get("eval_start_timeout") if timeout is None else timeout
        self._agree(lambda: self._led().wait_until_ready(timeout), limit_s)

    def at_step(self, step: int) -> None:
        """Say where training stands, so that ``eval/lag_steps`` is right; costs nothing."""
        if self.dispatcher is not None:
            self.dispatcher.at_step(step)

    def dispatch(
        self, rollout_id: int, hf_dir: str | Path | None = None, force: bool = False
    ) -> EvalHandle | None:
        """Hand over one eval point; on every rank, between the same two optimizer steps.

        Args:
            rollout_id: the training step; each is dispatched once.
            hf_dir: an existing checkpoint to evaluate instead of the present weights.
            force: never drop it.

        Returns:
            On rank 0 a handle; ``None`` on the others.

        Raises:
            ValueError: a caller's mistake, as of ``EvalDispatcher.dispatch``.
            RuntimeError: the dispatcher is closed.
        """
        if self.dispatcher is not None:
            try:
                return self.dispatcher.dispatch(rollout_id, hf_dir, force)
            finally:
                if hf_dir is None:
                    self._exporter.drop_uncaptured(rollout_id)
        point = checked_point(rollout_id, hf_dir, force)
        if self._closed:
            raise RuntimeError("this DistributedEvalDispatcher is closed")
        if point_id(point) in self._dispatched:
            raise ValueError(f"rollout_id {rollout_id} was dispatched already: each is once")
        self._dispatched.add(point_id(point))
        if point.hf_dir is None:
            self._exporter.follow(rollout_id)
        return None

    def drain(self, timeout: float | None = None) -> list[Outcome]:
        """Wait until every dispatched point has its outcome; all of them, on every rank.

        Args:
            timeout: in seconds, ``--eval-drain-timeout`` if absent; what is pending then is
                skipped as ``cancelled``.

        Raises:
            SkippedPointsError: under ``--ci-test``, a point was skipped.
        """
        limit_s = self._get("eval_drain_timeout") if timeout is None else timeout
        rows = self._agree(
            lambda: self._drain(timeout), limit_s + self._get("eval_dispose_timeout")
        )
        outcomes = [Outcome(**row) for row in rows]
        if self._get("ci_test"):
            SkippedPointsError.raise_for(outcomes)
        return outcomes

    def _drain(self, timeout: float | None) -> list[dict[str, Any]]:
        leader = self._led()
        with suppress(SkippedPointsError):  # every rank raises it, once it has the outcomes
            leader.drain(timeout)
        return [asdict(outcome) for outcome in leader.outcomes]

    def close(self) -> None:
        """End everything that this rank started; on rank 0, pending points are ``cancelled``."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.dispatcher is not None:
                self.dispatcher.close()
        finally:
            self._part()
            self._exporter.close()

    # -- what the ranks say to each other ------------------------------------------------------

    def _led(self) -> EvalDispatcher:
        assert self.dispatcher is not None, "asked on rank 0 alone"
        return self.dispatcher

    def _meet(self) -> None:
        """See that all ranks are there, before rank 0 starts anything for them."""
        limit_s = self._get("eval_start_timeout")
        if not self.leads:
            self._board.post(f"here_{self._board.rank}", {})
            return
        deadline = time.monotonic() + limit_s
        for rank in range(1, self._board.size):
            notes = self._board.wait_for_any([f"here_{rank}"], deadline)
            if not notes:
                raise TimeoutError(
                    f"rank {rank} has not made its DistributedEvalDispatcher within {limit_s} s "
                    "(--eval-start-timeout); every rank of the group needs one"
                )
            for note in notes.values():
                if "error" in note:
                    raise ConfigError([f"rank {rank}: {note['error']}"])

    def _agree(self, action: Callable[[], Any], limit_s: float) -> Any:
        """Rank 0 acts, and all ranks have what came of it: the value, or the error."""
        key = f"agreed_{self._num_agreed}"
        self._num_agreed += 1
        if self.leads:
            try:
                value = action()
            except Exception as error:
                problems = error.problems if isinstance(error, ConfigError) else None
                self._board.post(key, {"error": f"{error}", "problems": problems})
                raise
            self._board.post(key, {"value": value})
            return value
        deadline = time.monotonic() + limit_s + _GRACE_S
        notes = self._board.wait_for_any([key], deadline, ends_with=_CLOSED)
        if not notes:
            raise TimeoutError(f"rank 0 has not answered within {limit_s + _GRACE_S:.4g} s")
        note = notes[key]
        if note.get("problems") is not None:
            raise ConfigError(note["problems"])
        if "error" in note:
            raise RuntimeError(f"rank 0: {note['error']}")
        return note["value"]

    def _part(self) -> None:
        """Leave; rank 0 last, for a moment: the notes may be in its own process."""
        try:
            if not self.leads:
                self._board.post(f"left_{self._board.rank}", {})
                return
            self._board.post(_CLOSED, {})
            deadline = time.monotonic() + min(_GRACE_S, self._get("eval_dispose_timeout"))
            for rank in range(1, self._board.size):
                self._board.wait_for_any([f"left_{rank}"], deadline)
        except (RuntimeError, BoardClosed) as error:
            log.warning("rank %s leaves unheard: %s", self._board.rank, error)


def _check_deadlines(get: Callable[[str], Any]) -> None:
    """See that the ranks can wait for each other; all other flags are rank 0's to report.

    Raises:
        ConfigError: one of the deadlines that they keep is none.
    """
    flags = [BY_DEST[f"eval_{name}_timeout"] for name in ("start", "drain", "dispose")]
    problems = [
        f"{flag.name} {problem}" for flag in flags if (problem := flag.problem(get(flag.dest)))
    ]
    if problems:
        raise ConfigError(problems)


def _limits(get: Callable[[str], Any]) -> dict[str, Any]:
    """Those of the exporter; wrong flags are rank 0's to report."""
    with suppress(ValueError, TypeError):
        return {
            "timeout_s": _SHARE_OF_RANKS * float(get("eval_export_timeout")),
            "max_captures": int(get("eval_max_captures")),
            "max_shard_bytes": parse_size(get("eval_max_shard_size")),
        }
    return {}
