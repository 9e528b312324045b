"""Writes one snapshot on a worker thread: whole and in place, or not there at all."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.eval.contracts import Capture
from vime.eval.paths import real_path
from vime.eval.snapshot.faults import StagingFault, full
from vime.eval.snapshot.files import flush, flush_directory
from vime.eval.snapshot.handoff import AbandonedError, Handoff
from vime.eval.snapshot.manifest import Manifest, ManifestError
from vime.eval.snapshot.staging import Staging
from vime.eval.snapshot.stamps import FULL
from vime.eval.snapshot.verify import SnapshotInvalid

log = logging.getLogger(__name__)


class OccupiedError(ValueError):
    """The final name of a snapshot belongs to somebody else."""


@dataclass(frozen=True)
class Written:
    """What has been put in place, and when each step ended.

    Attributes:
        path: the snapshot's final directory.
        manifest: what is in it.
        ended_at: monotonic times in seconds: the begin, then the ends of writing, digesting and
            flushing.
    """

    path: Path
    manifest: Manifest
    ended_at: tuple[float, float, float, float]

    def detail(self) -> dict[str, Any]:
        """Facts for the trace; times in seconds."""
        begun, written, digested, flushed = self.ended_at
        return {
            "path": str(self.path),
            "num_bytes": self.manifest.num_bytes,
            "write_s": round(written - begun, 6),
            "digest_s": round(digested - written, 6),
            "flush_s": round(flushed - digested, 6),
        }


class SnapshotWriter:
    """Turns captures into snapshots; used by several worker threads at once.

    Args:
        staging: where to.
        remove: takes away what a failed or abandoned write leaves.
        is_protected: whether a path was given as a checkpoint to evaluate.
        verify: what the digests are made of.
    """

    def __init__(
        self,
        staging: Staging,
        remove: Callable[[Path], None],
        is_protected: Callable[[Path], bool],
        verify: str = FULL,
    ) -> None:
        self._staging = staging
        self._remove = remove
        self._is_protected = is_protected
        self._verify = verify

    def publish(
        self,
        rollout_id: int,
        draft: Path,
        capture: Capture,
        handoff: Handoff,
        expected_bytes: int = 0,
    ) -> Written:
        """Write, describe, flush and rename; ``capture`` is released on the way.

        With less room than ``expected_bytes`` nothing is begun.

        Raises:
            AbandonedError: nobody waits any more.
            Exception: what the capture raises, :class:`OccupiedError`, ``SnapshotInvalid``,
                ``WeightsError`` or ``OSError``. The draft is gone then; what the handoff says is
                in place is the caller's to remove.
        """
        handoff.start()
        final = self._staging.final(rollout_id)
        committed = False
        try:
            written = self._write(rollout_id, draft, final, capture, handoff, expected_bytes)
            self._staging.renew()
            self._retire(final)
            handoff.commit(lambda: self._staging.place(draft, final))
            committed = True
            flush_directory(final.parent)
            return written
        except (AbandonedError, StagingFault):
            raise
        except Exception as error:
            if not (self._staging.has(final) if committed else self._staging.keeps(draft)):
                raise self._staging.lost() from error
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise full(self._staging.directory, expected_bytes) from error
            raise
        finally:
            if not committed:
                self._remove(draft)

    def _write(
        self,
        rollout_id: int,
        draft: Path,
        final: Path,
        capture: Capture,
        handoff: Handoff,
        expected_bytes: int,
    ) -> Written:
        begun = time.monotonic()
        try:
            self._check_replaceable(final)
            self._check_room(draft, expected_bytes)
            contents = capture.write(draft)
        finally:
            capture.release()
        written = time.monotonic()
        handoff.check()
        if draft.is_symlink():
            raise SnapshotInvalid(final, ["the export put a link in the place of its directory"])
        run_id, how = self._staging.run_id, self._verify
        manifest = Manifest.of_directory(draft, run_id, rollout_id, known=contents, verify=how)
        digested = time.monotonic()
        handoff.check()
        manifest.write(draft)
        flush(draft)
        handoff.check()
        return Written(final, manifest, (begun, written, digested, time.monotonic()))

    def _check_replaceable(self, final: Path) -> Manifest | None:
        """What may be at a final name: nothing, or what a dead run of vime has left.

        Raises:
            OccupiedError: something else is.
        """
        if not os.path.lexists(final):
            return None
        if self._is_protected(real_path(final)):
            raise OccupiedError(
                f"{final} was given as a checkpoint to evaluate, and is left alone; name another "
                "--eval-hf-dir"
            )
        try:
            if final.is_symlink():
                raise ManifestError("it is a link")
            manifest = Manifest.read(final)
            if self._staging.inherited.get(final) != manifest:
                raise ManifestError("it was not there when this run began")
        except ManifestError as error:
            raise OccupiedError(
                f"{final} exists and is no older snapshot of vime's ({error}); vime neither "
                "writes into it nor removes it: move it away, or name another --eval-hf-dir"
            ) from None
        return manifest

    def _retire(self, final: Path) -> None:
        """A dead run's snapshot of the same step makes room."""
        manifest = self._check_replaceable(final)
        if manifest is not None:
            log.info("%s of the run %s is replaced", final, manifest.run_id)
            self._staging.remove(final)

    def _check_room(self, draft: Path, expected_bytes: int) -> None:
        """What cannot fit is not begun; what the export has written already lies there."""
        if self._staging.free_bytes() < expected_bytes and not any(draft.iterdir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
