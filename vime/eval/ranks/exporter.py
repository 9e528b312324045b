"""Exports a model that several ranks train: each captures its part, all write the same files.

    training threads                    later, in the background
    ────────────────                    ────────────────────────
    rank 0   copy its part ── capture ▶ create the files, leave the word "write to …",
                                        write its part, wait for the others, seal
    rank 1   copy its part ──────────▶  wait for the word, write its part, report
    …

Capturing is a memory copy, and no collective: no rank waits for another one on its training
thread. What a rank cannot do it reports; what it does not report in time ends the point on the
others, by their own clocks.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.eval.contracts import Capture, Content
from vime.eval.ranks.board import Board
from vime.eval.ranks.follower import Follower
from vime.eval.ranks.held_part import HeldPart
from vime.eval.ranks.notes import explain, report_of, word_of
from vime.eval.ranks.parts import Parts, create_files, read_back
from vime.eval.snapshot.checkpoint_files import write_index, write_weights
from vime.eval.snapshot.export import DEFAULT_SHARD_BYTES
from vime.eval.snapshot.held import floating_dtype, held_bytes, hold
from vime.eval.snapshot.host_buffers import BufferPool
from vime.eval.snapshot.model_state import as_saved, checkpoint_tensors, unwrap
from vime.eval.snapshot.surroundings import Settings, TokenizerFiles
from vime.rollout.checkpoint_eval import EvalSkip

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_RAW = ".as_in_memory"


class ShardedExporter:
    """This rank's side of an export; every rank has one, and captures at the same steps.

    Rank 0's is an :class:`~vime.eval.contracts.Exporter`. All ranks must see the staging
    directory: with several nodes it lies on a file system that they share.

    Args:
        board: how the ranks hear of each other.
        model: a ``transformers`` model: under ``DistributedDataParallel``, or of ``DTensor``
            (``fully_shard``, tensor parallelism).
        tokenizer: as of :class:`~vime.eval.snapshot.export.TransformersExporter`; rank 0's counts.
        dtype: likewise.
        max_shard_bytes: most bytes of one weight file.
        max_captures: how many copies of its part each rank's memory may hold at once.
        timeout_s: how long the ranks wait for each other's part of one point.
        buffer_timeout_s: how long ``capture`` waits for a copy that is still being written.

    Raises:
        ValueError: the model cannot be captured.
    """

    needs_directory = False

    def __init__(
        self,
        board: Board,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        max_captures: int = 2,
        timeout_s: float = 600.0,
        buffer_timeout_s: float = 60.0,
    ) -> None:
        self._board = board
        self._model = unwrap(model)
        self._dtype = floating_dtype(dtype)
        self._max_shard_bytes = max_shard_bytes
        self._timeout_s = timeout_s
        self.max_captures = max_captures
        self._pool = BufferPool(max_captures, buffer_timeout_s)
        self._follower = None if board.leads else Follower(board, timeout_s)
        self._tokenizer_files = TokenizerFiles(self._model, tokenizer) if board.leads else None
        self._captured: set[int] = set()

    def capture(self, rollout_id: int, directory: Path) -> Capture:  # noqa: ARG002 -- the contract
        """On rank 0: copy this rank's part of the present weights.

        Raises:
            Exception: it cannot be copied; the other ranks let go of theirs.
        """
        self._captured.add(rollout_id)
        try:
            settings = Settings.of(self._model, self._dtype)
            return _WholeCapture(self, rollout_id, self._hold(), settings)
        except BaseException:
            self.drop(rollout_id)
            raise

    def follow(self, rollout_id: int) -> None:
        """On another rank: copy this rank's part; what fails is reported to rank 0, not raised."""
        assert self._follower is not None
        try:
            captured = self._hold()
        except Exception as error:
            log.warning("step %s: this rank's part cannot be captured: %s", rollout_id, error)
            self._follower.report(rollout_id, {"error": explain(error)})
        else:
            self._follower.take(rollout_id, captured)

    def drop_uncaptured(self, rollout_id: int) -> None:
        """On rank 0: a point that ended before its capture needs nobody's part."""
        if rollout_id not in self._captured:
            self.drop(rollout_id)

    def drop(self, rollout_id: int) -> None:
        """On rank 0: tell the others to let go of their part."""
        try:
            self._board.post(word_of(rollout_id), {"dropped": True})
        except RuntimeError as error:  # they have deadlines of their own
            log.warning("step %s: the other ranks cannot be told: %s", rollout_id, error)

    def close(self) -> None:
        """End every wait; what has been captured and is not written is let go of."""
        self._board.close()
        if self._follower is not None:
            self._follower.close()

    def capture_bytes(self) -> int:
        """How much memory this rank's part of the present weights takes."""
        return held_bytes(self._parts()[1], self._dtype)

    def _hold(self) -> HeldPart:
        parts, own = self._parts()
        return HeldPart(parts, hold(self._pool, own, self._dtype), self._max_shard_bytes)

    def _parts(self) -> tuple[Parts, dict[str, torch.Tensor]]:
        state = checkpoint_tensors(self._model, sharded=True)
        parts = Parts.of(state, self._board.rank, self._board.size, self._dtype)
        return parts, {name: part.tensor for name, part in parts.own.items()}


class _WholeCapture:
    """Rank 0's capture: its own part, and what it must hear of the others'."""

    def __init__(
        self, exporter: ShardedExporter, rollout_id: int, held: HeldPart, settings: Settings
    ) -> None:
        self._exporter = exporter
        self._board = exporter._board
        self._rollout_id = rollout_id
        self._held = held
        self._settings = settings
        self._deadline = time.monotonic() + exporter._timeout_s
        self._done = False

    def write(self, directory: Path) -> dict[str, Content]:
        """Have all ranks write; see :meth:`vime.eval.contracts.Capture.write`.

        Raises:
            EvalSkip: ``timeout_export``, when a rank has not written its part in time.
            RuntimeError: a rank could not.
        """
        exporter, parts = self._exporter, self._held.parts
        model = exporter._model
        converted = _is_converted(model, parts)
        place = directory / _RAW if converted else directory
        place.mkdir(mode=0o700, exist_ok=True)
        files = self._held.files()
        create_files(place, files, reserve=bool(parts.interleaved))
        self._board.post(
            word_of(self._rollout_id), {"directory": str(place), "tensors": parts.digest()}
        )
        self._check_whole(self._held.write(place, files), self._reports())
        self._done = True
        contents: dict[str, Content] = {}
        if converted:
            tensors = as_saved(model, dict(read_back(place, files, parts.whole)))
            shutil.rmtree(place)
            contents = write_weights(directory, tensors, exporter._max_shard_bytes)
        else:
            write_index(directory, parts.whole, files)
        self._settings.write(directory)
        assert exporter._tokenizer_files is not None, "this is rank 0"
        exporter._tokenizer_files.write(directory)
        return contents

    def _reports(self) -> list[dict[str, Any]]:
        """What the other ranks say, once all have written, or one has failed."""
        names = {rank: report_of(self._rollout_id, rank) for rank in range(1, self._board.size)}
        missing = set(names)
        reports = []
        while missing:
            found = self._board.wait_for_any([names[rank] for rank in missing], self._deadline)
            if not found:
                raise EvalSkip("timeout_export", self._late(sorted(missing)))
            for rank in sorted(missing):
                report = found.get(names[rank])
                if report is None:
                    continue
                if "error" in report:
                    raise RuntimeError(f"rank {rank}: {report['error']}")
                reports.append(report)
                missing.remove(rank)
        return reports

    def _late(self, ranks: list[int]) -> str:
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
        return (
            f"{who} not written its part of step {self._rollout_id} within "
            f"{self._exporter._timeout_s:.4g} s: hung, dead, or it never dispatched this step"
        )

    def _check_whole(self, own_bytes: int, reports: list[dict[str, Any]]) -> None:
        written = own_bytes + sum(report["num_bytes"] for report in reports)
        expected = sum(spec.num_bytes for spec in self._held.parts.whole.values())
        if written != expected:
            raise RuntimeError(
                f"all ranks together wrote {written} bytes of weights, and the model has "
                f"{expected}: some of its tensors are not on these ranks"
            )

    def release(self) -> None:
        """Let go of this rank's part, and have the others let go of theirs."""
        self._held.release()
        if not self._done:
            self._exporter.drop(self._rollout_id)
            return
        notes = [report_of(self._rollout_id, rank) for rank in range(1, self._board.size)]
        self._board.remove(word_of(self._rollout_id), *notes)


def _is_converted(model: Any, parts: Parts) -> bool:
    """Whether a checkpoint has other tensors than the model in memory (fused experts …)."""
    import torch

    mine: Mapping[str, torch.Tensor] = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in parts.whole.items()
    }
    saved = as_saved(model, mine)
    return saved.keys() != mine.keys() or any(saved[n].shape != mine[n].shape for n in mine)
