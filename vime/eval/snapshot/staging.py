"""The staging directory: held by one live run, with one hidden room for what is unfinished.

    staging/
      .vime.lock            flock of the live run; says who holds it
      .vime-RUN/            the room of a run: its owner's marker, drafts, what is being removed
      step_40/              finished snapshots

Everything unfinished is in the room, so that whatever a dead run has left can be recognised and
removed as a whole, and nothing else ever is.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import stat
import threading
from pathlib import Path

import orjson

from vime.eval import locks
from vime.eval.snapshot.faults import StagingFault, full, gib, lost
from vime.eval.snapshot.files import free_bytes, read_json_object, write_new
from vime.eval.snapshot.manifest import Manifest, ManifestError, check_run_id

log = logging.getLogger(__name__)

LOCK = ".vime.lock"
_ROOM = ".vime-"
_OWNER = "owner.json"
_REMOVALS = 3
_STEP = re.compile(r"step_(-?[0-9]+)")


class StagingError(ValueError):
    """The staging directory cannot be used; says why and what to do."""


class Staging:
    """One run's hold on a staging directory.

    Args:
        directory: ``--eval-hf-dir``; made when it is missing, readable by its owner alone.
        run_id: the run.

    Attributes:
        inherited: the finished snapshots that other runs have left, with their manifests.
        was_renewed: set by :meth:`renew` when there was something to make again.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self.directory = directory
        self.run_id = check_run_id(run_id)
        self.room = room_of(directory, run_id)
        self._numbers = itertools.count()
        self._lock: locks.FileLock | None = None
        self._changing = threading.Lock()  # of what is in place: by the loop, a worker, a janitor
        self._mine: set[Path] = set()
        self._drafts: set[Path] = set()
        self.was_renewed = False
        self.inherited: dict[Path, Manifest] = {}

    def open(self) -> None:
        """Take the directory, and clear away the rooms of dead runs.

        Raises:
            StagingError: another live run has it, or it cannot be written to.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = locks.FileLock(self.directory / LOCK, self.run_id)
        except locks.LockedError as holder:
            raise StagingError(
                f"--eval-hf-dir {self.directory}: {holder} uses it; wait for that run to end, or "
                "name another directory: each run needs its own"
            ) from None
        except OSError as error:
            raise StagingError(
                f"--eval-hf-dir {self.directory}: cannot be used as a staging directory: "
                f"{self._why(error)}; expected a directory that this user may write to"
            ) from None
        try:
            self._sweep()
            self.room.mkdir(mode=0o700)
            self._mark_room()
            self.inherited = self.snapshots()
            self._mine = set(self.inherited)
        except OSError as error:
            self.close()
            raise StagingError(f"--eval-hf-dir {self.directory}: {self._why(error)}") from None

    def close(self) -> None:
        """Remove the room, and let the next run have the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            remove_tree(self.room)
            lock.release()

    def keeps(self, draft: Path) -> bool:
        """Whether a draft lies where it was made, in a directory that this run holds."""
        return draft in self._drafts and self._is_whole()

    def renew(self) -> None:
        """Make again what somebody has removed while the run was under way; mostly, do nothing.

        Nothing is touched that another run has taken meanwhile. Afterwards :attr:`inherited` is
        what lies there now, and :attr:`was_renewed` is set.

        Raises:
            StagingFault: it cannot be made again, or another run has it; says what to do.
        """
        with self._changing:
            if self._lock is None or self._is_whole():
                return
            try:
                self._take_again(self._lock)
            except locks.LockedError as holder:
                raise lost(
                    self.directory,
                    f"and {holder} has it now; end that run, or wait for its end: then this one "
                    "takes the directory again at its next point",
                ) from None
            except OSError as error:
                raise lost(
                    self.directory,
                    f"and cannot be made again: {self._why(error)}; make it a directory that this "
                    "user may write to: the next point takes it",
                ) from None
            self.was_renewed = True
        log.warning("--eval-hf-dir %s was removed, or something in it, while this run was under "
                    "way; it is made again and held", self.directory)  # fmt: skip

    def lost(self) -> StagingFault:
        """What to tell a point whose draft was taken away."""
        return lost(
            self.directory, "and this point's snapshot with it; the next one makes it again"
        )

    def new_draft(self, rollout_id: int) -> Path:
        """Make an empty directory in the room; a room that was removed meanwhile is made again.

        Raises:
            OSError: it cannot be made.
        """
        draft = self.room / f"step_{rollout_id}.{next(self._numbers)}"
        try:
            self._make_draft(draft)
        except (FileNotFoundError, NotADirectoryError):
            self.renew()
            self._make_draft(draft)
        self._drafts.add(draft)
        return draft

    def _make_draft(self, draft: Path) -> None:
        try:
            draft.mkdir(mode=0o700)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise full(self.directory) from None
            raise

    def place(self, draft: Path, final: Path) -> None:
        """Let a finished draft be seen under its name.

        Raises:
            OSError: it cannot be renamed, or is no longer in a directory of this run.
        """
        with self._changing:
            if not self.keeps(draft):
                raise self.lost()
            draft.rename(final)
            self._drafts.discard(draft)
            self._mine.add(final)

    def final(self, rollout_id: int) -> Path:
        """Where the finished snapshot of a step belongs."""
        return self.directory / f"step_{rollout_id}"

    def remove(self, path: Path) -> None:
        """Remove something of this run: it vanishes from its place at once, then from the disk.

        What was put there by another run, which has taken the directory since, is left alone.
        """
        trash = self.room / f"removed.{next(self._numbers)}"
        with self._changing:
            if not (path.is_relative_to(self.room) or self.has(path)):
                return
            self._mine.discard(path)
            self._drafts.discard(path)
            try:
                path.rename(trash)
            except (FileNotFoundError, NotADirectoryError):
                trash = path  # it is gone; or the room is, for the run is closed
        remove_tree(trash)

    def has(self, path: Path) -> bool:
        """Whether a finished snapshot is this run's to remove, and in a directory that it holds."""
        return path in self._mine and self._is_held()

    def _is_held(self) -> bool:
        return self._lock is not None and self._lock.is_in_place

    def _is_whole(self) -> bool:
        return self._is_held() and os.path.lexists(self.room / _OWNER)

    def snapshots(self) -> dict[Path, Manifest]:
        """The finished snapshots that lie here, of whatever run, with their manifests."""
        found = {}
        for path in self.directory.iterdir():
            match = _STEP.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            try:
                manifest = Manifest.read(path)
            except ManifestError:
                continue
            if manifest.rollout_id == int(match[1]):
                found[path] = manifest
        return found

    def free_bytes(self) -> int:
        """What this user may still write to the file system."""
        return free_bytes(self.directory)

    def check_space(self, needed_bytes: int) -> None:
        """See :meth:`vime.eval.snapshot.store.SnapshotStore.check_space`."""
        mine = sum(manifest.num_bytes for manifest in self.snapshots().values())
        free = self.free_bytes() + mine
        if free < needed_bytes:
            raise ValueError(
                f"--eval-hf-dir {self.directory}: {free} bytes are free "
                f"({gib(free)}) and {needed_bytes} ({gib(needed_bytes)}) are "
                "needed, the size of a snapshot times those kept, those in flight, and one more: "
                "name a larger file system, or lower --eval-keep-snapshots or --eval-max-in-flight"
            )

    def _take_again(self, old: locks.FileLock) -> None:
        if not os.path.lexists(self.room / _OWNER):  # what is in a room without it is not whole
            self._drafts.clear()
        if self.directory.is_symlink():
            raise OSError(errno.ELOOP, f"a link is in its place, to {self.directory.readlink()}")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not old.is_in_place:
            self._lock = locks.FileLock(self.directory / LOCK, self.run_id)
            old.release()
        if {path.name for path in self.directory.iterdir()} == {LOCK, self.room.name}:
            self.directory.chmod(0o700)  # an export has made it, on the way to its draft
        self._sweep(spared=self.room)  # exports may still be writing there
        if self.room.is_symlink():
            self.room.unlink()
        self.room.mkdir(mode=0o700, exist_ok=True)
        self.room.chmod(0o700)
        self._mark_room()
        found = self.snapshots()
        self.inherited = {p: m for p, m in found.items() if m.run_id != self.run_id}
        self._mine = set(found)

    def _mark_room(self) -> None:
        marker = self.room / _OWNER
        if _owner_of(self.room) != self.run_id:
            remove_tree(marker)
            write_new(marker, [orjson.dumps(locks.identity(self.run_id))])

    def _why(self, error: OSError) -> str:
        if error.errno == errno.ENOSPC:
            return str(full(self.directory))
        return str(error.strerror)

    def _sweep(self, spared: Path | None = None) -> None:
        """Remove the rooms of dead runs; the lock says that no other run is alive here."""
        for path in list(self.directory.glob(f"{_ROOM}*")):
            if path == spared or not path.is_dir() or path.is_symlink():
                continue
            if _is_room(path):
                log.info("removing what the dead run %s left in %s", _owner_of(path), path)
                remove_tree(path)
            elif _died_at_birth(path):
                remove_tree(path)


def room_of(directory: Path, run_id: str) -> Path:
    """The room of a run in a staging directory."""
    return directory / f"{_ROOM}{run_id}"


def remove_tree(path: Path) -> None:
    """Remove a directory, or whatever is in its place; what cannot be removed is logged."""
    for attempt in range(1, _REMOVALS + 1):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            return
        except OSError as error:  # an interrupted export may still be writing there
            if not os.path.lexists(path):
                return
            if attempt == _REMOVALS:
                log.warning("%s could not be removed: %s", path, error)


def _died_at_birth(room: Path) -> bool:
    """Whether its run died before it could write its marker, and so before anything else."""
    inside = list(room.iterdir())
    marker = room / _OWNER
    if inside != [marker]:
        return not inside
    status = marker.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _owner_of(room: Path) -> str | None:
    try:
        owner = read_json_object(room / _OWNER, locks.MAX_BYTES, follow_link=False)
    except ValueError:
        return None
    return locks.run_of(owner)


def _is_room(path: Path) -> bool:
    """Whether vime made it: its marker names the run that its own name has."""
    owner = _owner_of(path)
    return owner is not None and path.name == f"{_ROOM}{owner}"
