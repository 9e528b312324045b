"""The snapshot store: the only owner of the staging directory.

A snapshot is immutable and whole, or absent: it is written into a hidden room of the run,
described by its manifest, flushed, and only then renamed into place. Readers hold leases; the
last one to leave lets go.

The store is used on one event loop. Whatever touches the disk for longer than a moment happens
on worker threads, or on the janitor's, so that a slow or hanging disk holds neither the loop nor
training. A worker that is abandoned (its deadline has passed) cleans up after itself, whenever it
comes back; what it wrote is not made visible any more.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from anyio import to_thread

from vime.eval.contracts import Capture, Snapshot
from vime.eval.paths import real_path
from vime.eval.snapshot import refusals
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.draft import Draft, snapshot_of
from vime.eval.snapshot.handoff import Phase
from vime.eval.snapshot.janitor import Janitor
from vime.eval.snapshot.manifest import Manifest
from vime.eval.snapshot.shelf import Shelf
from vime.eval.snapshot.staging import Staging
from vime.eval.snapshot.stamps import FULL
from vime.eval.snapshot.verify import SnapshotInvalid, Verified, verify
from vime.eval.snapshot.weights import WeightsError
from vime.eval.snapshot.writer import SnapshotWriter, Written
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import SNAPSHOT
from vime.fsm.trace import Trace
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class SnapshotStore:
    """Makes, verifies, lends and removes snapshots.

    Args:
        staging: ``--eval-hf-dir``.
        run_id: the run; part of every weight version.
        trace: where the life of every snapshot is written.
        base: the checkpoint that every snapshot must look like; ``None`` checks less.
        keep: ``--eval-keep-snapshots``: how many finished snapshots stay on disk, those of dead
            runs included.
        allow_cast: accept weights of another dtype than the base's; engines cast them.
        verify: ``--eval-verify``: ``headers`` leaves the weights' bytes undigested.

    Attributes:
        base: what the base looks like, once opened.
    """

    def __init__(
        self,
        staging: Path,
        *,
        run_id: str,
        trace: Trace,
        base: Path | None,
        keep: int,
        allow_cast: bool = False,
        verify: str = FULL,
    ) -> None:
        self._verify = verify
        self._staging = Staging(real_path(staging), run_id)
        self._run_id = run_id
        self._trace = trace
        self._base_dir = base
        self._allow_cast = allow_cast
        self.base: BaseSpec | None = None
        self._janitor: Janitor | None = None
        self._writer = SnapshotWriter(
            self._staging, self._remove_soon, lambda path: path in self._adopted, verify
        )
        self._shelf = Shelf(keep, self._remove_soon, self._must_stay)
        self._drafts: set[Draft] = set()
        self._lives: Counter[str] = Counter()
        self._adopted: set[Path] = set()
        self._claimed: dict[int, Manifest] = {}

    def open(self) -> None:
        """Read the base, take the staging directory, clear away what dead runs left unfinished.

        Blocks for a moment; call it before the loop runs.

        Raises:
            ValueError: another live run has the directory, it cannot be written to, or the base
                is no whole checkpoint.
        """
        if self._base_dir is not None:
            self.base = BaseSpec.read(self._base_dir)
        self._staging.open()
        self._janitor = Janitor(self._staging.remove)
        self._shelf.set_leftovers(self._staging.inherited)

    def close(self) -> None:
        """Remove what is unfinished and what is beyond ``keep``; give the directory back.

        Blocks for as long as removing takes; call it after the loop has ended. Calling it again
        does nothing.
        """
        if self._janitor is None:
            return
        for draft in list(self._drafts):
            self.discard(draft, "cancelled: the run ended")
        self._shelf.close()
        if not self._janitor.stop(CLOSE_TIMEOUT_S):
            log.warning("snapshots are still being removed after %g s", CLOSE_TIMEOUT_S)
        self._janitor = None
        self._staging.close()

    def check_space(self, needed_bytes: int) -> None:
        """See that so much fits beside what is not vime's.

        Args:
            needed_bytes: the size of a snapshot times those kept, in flight, and one more.

        Raises:
            ValueError: it does not fit.
        """
        self._staging.check_space(needed_bytes)

    # -- making ----------------------------------------------------------------------------

    def begin(self, rollout_id: int, cause_seq: int | None = None) -> Draft:
        """Make the empty directory that a capture or an export may write into.

        A staging directory that was removed meanwhile is made again, unless another run has it.

        Raises:
            OSError: it cannot be made, or a snapshot of this step is in use.
        """
        machine_id = f"step_{rollout_id}"
        if any(draft.rollout_id == rollout_id for draft in self._drafts):
            raise FileExistsError(errno.EEXIST, f"{machine_id} is being written already")
        if not self._shelf.replace(machine_id):
            raise FileExistsError(errno.EEXIST, f"{machine_id} is being evaluated")
        machine = self._machine(machine_id)
        machine.fire("write", cause_seq=cause_seq)
        try:
            directory = self._staging.new_draft(rollout_id)
        except OSError as error:
            machine.fire("abandon", reason="export_failed", detail={"message": str(error)})
            raise
        if self._staging.was_renewed:
            self._staging.was_renewed = False
            found = self._staging.inherited.items()
            self._shelf.set_leftovers({p: m for p, m in found if m.rollout_id not in self._claimed})
        draft = Draft(rollout_id, directory, machine)
        self._drafts.add(draft)
        return draft

    async def seal(self, draft: Draft, capture: Capture) -> Snapshot:
        """Write a capture, describe it, rename it into place, and verify it.

        Cancelling it abandons the worker thread: ``capture`` is released as soon as that thread
        has let go of it, and nothing becomes visible.

        Args:
            draft: from :meth:`begin`.
            capture: released exactly once, whatever happens.

        Returns:
            The verified snapshot; take a lease before the next ``await``.

        Raises:
            EvalSkip: ``export_failed`` or ``snapshot_invalid``.
        """
        try:
            written = await to_thread.run_sync(
                self._publish, draft, capture, abandon_on_cancel=True
            )
        except (SnapshotInvalid, WeightsError) as error:
            raise self._abandon(draft, "snapshot_invalid", str(error)) from error
        except EvalSkip as skip:  # the capture knows better why
            raise self._abandon(draft, skip.reason, skip.detail or "") from skip
        except Exception as error:
            raise self._abandon(draft, "export_failed", refusals.explain(error)) from error
        except BaseException:
            self._withdraw(draft, capture)
            raise
        self._drafts.remove(draft)
        try:
            version = written.manifest.weight_version
            draft.machine.fire("seal", weight_version=version, detail=written.detail())
            verified = await self._verify_own(draft.machine, written.path, written.manifest)
            return self._enter(draft.machine, written.path, written.manifest, verified, owned=True)
        except BaseException:
            self._remove_soon(written.path)
            raise

    def _publish(self, draft: Draft, capture: Capture) -> Written:
        """On a worker thread."""
        if self._janitor is not None:  # what is being removed still takes room
            self._janitor.settle(CLOSE_TIMEOUT_S)
        expected = 0 if self.base is None else self.base.num_bytes
        return self._writer.publish(
            draft.rollout_id, draft.directory, capture, draft.handoff, expected
        )

    async def _verify_own(
        self, machine: TracedMachine, path: Path, manifest: Manifest, *, digests: bool = False
    ) -> Verified:
        version = manifest.weight_version
        try:
            return await to_thread.run_sync(
                lambda: verify(path, self.base, digests=digests, allow_cast=self._allow_cast),
                abandon_on_cancel=True,
            )
        except (SnapshotInvalid, OSError) as error:
            skip = refusals.reject(machine, error, version)
            machine.fire("delete", reason="snapshot_invalid", weight_version=version)
            raise skip from error
        except BaseException:
            machine.fire("delete", reason="cancelled", weight_version=version)
            raise

    def discard(self, draft: Draft, reason: str) -> None:
        """Let go of a draft whose capture failed; does nothing when it has ended already.

        Args:
            draft: from :meth:`begin`.
            reason: a short name, or one with a sentence (``export_failed: no memory``).
        """
        if draft not in self._drafts:
            return
        name, _, message = reason.partition(": ")
        if draft.handoff.abandon() is not Phase.WORKING:
            self._remove_soon(draft.directory)
        self._end(draft, name, message)

    def _withdraw(self, draft: Draft, capture: Capture) -> None:
        """Cancelled: take away what is there, or leave that to the worker that is still busy."""
        match draft.handoff.abandon():
            case Phase.IDLE:  # no worker has begun, and none will
                self._remove_soon(draft.directory)
                refusals.release(capture)
            case Phase.DONE:
                self._remove_soon(self._staging.final(draft.rollout_id))
        self._end(draft, "cancelled", "")

    def _abandon(self, draft: Draft, reason: str, message: str) -> EvalSkip:
        """The worker has failed, and has removed its draft."""
        if draft.handoff.abandon() is Phase.DONE:
            self._remove_soon(self._staging.final(draft.rollout_id))
        self._end(draft, reason, message)
        return refusals.skip(draft.machine, reason, message)

    def _end(self, draft: Draft, reason: str, message: str) -> None:
        self._drafts.discard(draft)
        detail = {"message": message} if message else None
        draft.machine.fire("abandon", reason=reason, detail=detail)

    # -- somebody else's checkpoints ---------------------------------------------------------

    async def adopt(self, rollout_id: int, hf_dir: Path) -> Snapshot:
        """Verify an existing checkpoint; it is never written to and never deleted.

        All its weights are read, to digest them.

        Returns:
            The verified snapshot; take a lease before the next ``await``.

        Raises:
            EvalSkip: ``snapshot_invalid``.
        """
        machine = self._machine(f"hf:{rollout_id}")
        machine.fire("adopt", detail={"path": str(hf_dir)})
        try:
            path, manifest, verified = await to_thread.run_sync(
                self._inspect, rollout_id, hf_dir, abandon_on_cancel=True
            )
        except (ValueError, OSError) as error:
            skip = refusals.reject(machine, error, None)
            machine.fire("release", reason="snapshot_invalid")
            raise skip from error
        except BaseException:
            machine.fire("release", reason="cancelled")
            raise
        return self._enter(machine, path, manifest, verified, owned=False)

    def _inspect(self, rollout_id: int, hf_dir: Path) -> tuple[Path, Manifest, Verified]:
        """On a worker thread."""
        path = real_path(hf_dir)  # a link that is moved meanwhile must not change what is read
        self._adopted.add(path)
        verify(path, self.base, owned=False, allow_cast=self._allow_cast)  # before the long read
        manifest = Manifest.of_directory(
            path, self._run_id, rollout_id, owned=False, verify=self._verify
        )
        verified = verify(
            path, self.base, manifest=manifest, owned=False, allow_cast=self._allow_cast
        )
        return path, manifest, verified

    # -- what a run that died has left ---------------------------------------------------------

    def claim(self, rollout_id: int, run_ids: Collection[str]) -> bool:
        """Keep the whole snapshot that a dead run has left of a step, for :meth:`inherit`.

        Args:
            rollout_id: the training step.
            run_ids: the runs that are continued; those of others are not theirs to use.

        Returns:
            Whether there is one.
        """
        path = self._staging.final(rollout_id)
        manifest = self._staging.inherited.get(path)
        if manifest is None or manifest.run_id not in run_ids:
            return False
        self._shelf.claim(path)
        self._claimed[rollout_id] = manifest
        return True

    async def inherit(self, rollout_id: int) -> Snapshot:
        """Verify a snapshot that was claimed, every byte of it; from now on it is this run's.

        Returns:
            The verified snapshot, under the weight version that its writer gave it; take a lease
            before the next ``await``.

        Raises:
            EvalSkip: ``snapshot_invalid``; then it is removed.
        """
        manifest = self._claimed.pop(rollout_id)
        path = self._staging.final(rollout_id)
        machine = self._machine(f"step_{rollout_id}")
        detail = {"path": str(path), "run_id": manifest.run_id}
        machine.fire("inherit", weight_version=manifest.weight_version, detail=detail)
        try:
            verified = await self._verify_own(machine, path, manifest, digests=True)
        except BaseException:
            self._remove_soon(path)
            raise
        return self._enter(machine, path, manifest, verified, owned=True)

    # -- readers -----------------------------------------------------------------------------

    def lease(self, snapshot: Snapshot) -> AbstractContextManager[Snapshot]:
        """Keep a snapshot on disk for as long as the context is open.

        The last reader to leave lets go: then the oldest finished snapshots beyond ``keep`` are
        removed, and what is not vime's is forgotten.

        Raises:
            ValueError: on entering: the store does not have it (any more).
        """
        return self._shelf.lease(snapshot)

    def _machine(self, machine_id: str) -> TracedMachine:
        """A new life in the trace."""
        machine = TracedMachine(SNAPSHOT, machine_id, self._trace)
        machine.attempt = self._lives[machine_id]
        self._lives[machine_id] += 1
        return machine

    def _enter(
        self,
        machine: TracedMachine,
        path: Path,
        manifest: Manifest,
        verified: Verified,
        *,
        owned: bool,
    ) -> Snapshot:
        for note in verified.notes:
            log.warning("%s: %s", path.name, note)
        machine.fire(
            "verify",
            weight_version=manifest.weight_version,
            detail=verified.detail(path, manifest, self.base),
        )
        snapshot = snapshot_of(path, manifest, owned=owned)
        self._shelf.put(snapshot, machine)
        return snapshot

    def _must_stay(self, path: Path) -> bool:
        """Not vime's to remove, or about to be replaced by its writer."""
        drafts = {self._staging.final(draft.rollout_id) for draft in self._drafts}
        return path in self._adopted or path in drafts

    def _remove_soon(self, path: Path) -> None:
        if self._janitor is None:  # a worker that was abandoned, after the run was closed
            self._staging.remove(path)
        else:
            self._janitor.remove(path)
