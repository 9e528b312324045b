"""What a rank beside the first does for the export once its part is captured."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from vime.eval.ranks.board import Board
from vime.eval.ranks.held_part import HeldPart
from vime.eval.ranks.notes import explain, report_of, word_of

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01
_CLOSE_TIMEOUT_S = 10.0


class Follower:
    """Waits, on a daemon thread, for rank 0's word on each captured part, and writes it.

    Consumes: parts from the training thread; rank 0's words. Produces: a report on each part.
    Waits for: the words, until ``timeout_s`` after the capture; then the part is let go of.

    Args:
        board: where words and reports are.
        timeout_s: how long a part waits for its word.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self._pending: dict[int, tuple[HeldPart, float]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vime-follower", daemon=True)
        self._thread.start()

    def take(self, rollout_id: int, part: HeldPart) -> None:
        """Wait for the word on this part from now on."""
        with self._changed:
            self._pending[rollout_id] = part, time.monotonic() + self._timeout_s
            self._changed.notify()

    def report(self, rollout_id: int, report: dict[str, Any]) -> None:
        """Tell rank 0 what became of a part."""
        try:
            self._board.post(report_of(rollout_id, self._board.rank), report)
        except RuntimeError as error:  # rank 0 has a deadline of its own
            log.warning("step %s: rank 0 cannot be told: %s", rollout_id, error)

    def close(self) -> None:
        """End the thread; parts whose word has not come are let go of, and rank 0 hears of it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                pending = dict(self._pending)
            settled = [self._settled(step, *entry) for step, entry in pending.items()]
            if not any(settled):
                with self._changed:
                    self._changed.wait(_LOOK_EVERY_S)
        for rollout_id, (part, _) in self._pending.items():
            part.release()
            self.report(rollout_id, {"error": "this rank has closed its dispatcher"})

    def _settled(self, rollout_id: int, part: HeldPart, deadline: float) -> bool:
        """Whether the word has come, or will not; then the part is written or let go of."""
        try:
            word = self._board.read(word_of(rollout_id))
            if word is None and time.monotonic() < deadline:
                return False
            if word is None:
                log.warning(
                    "step %s: rank 0 has said nothing of it within %.4g s; this rank lets go of "
                    "its part", rollout_id, self._timeout_s,
                )  # fmt: skip
            elif "directory" in word:
                self.report(rollout_id, _write(part, word))
        except RuntimeError as error:
            log.warning("step %s: rank 0 cannot be asked: %s", rollout_id, error)
        with self._changed:
            del self._pending[rollout_id]
        part.release()
        return True


def _write(part: HeldPart, word: dict[str, Any]) -> dict[str, Any]:
    """Write to where the word says; the report on it."""
    if part.parts.digest() != word["tensors"]:
        return {"error": "its model has other tensors, shapes or dtypes than that of rank 0"}
    try:
        return {"num_bytes": part.write(Path(word["directory"]), part.files())}
    except FileNotFoundError:
        return {
            "error": f"{word['directory']} is not there: the point has ended meanwhile, or "
            "--eval-hf-dir is not on a file system that all ranks share"
        }
    except Exception as error:
        return {"error": explain(error)}
