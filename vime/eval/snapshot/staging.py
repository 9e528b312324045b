"""The staging directory: held by one live run, with one hidden room for what is unfinished.

    staging/
      .vime.lock            flock of the live run; says who holds it
      .vime-RUN/            the room of a run: its owner's marker, drafts, what is being removed
      step_40/              finished snapshots

Everything unfinished is in the room, so that whatever a dead run has left can be recognised and
removed as a whole, and nothing else ever is.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import stat
from pathlib import Path

import orjson

from vime.eval import locks
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
        inherited: the finished snapshots that dead runs have left, with their manifests.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self.directory = directory
        self.run_id = check_run_id(run_id)
        self.room = room_of(directory, run_id)
        self._numbers = itertools.count()
        self._lock: locks.FileLock | None = None
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
                f"{error.strerror}; expected a directory that this user may write to"
            ) from None
        try:
            self._sweep()
            self.room.mkdir(mode=0o700)
            write_new(self.room / _OWNER, [orjson.dumps(locks.identity(self.run_id))])
            self.inherited = self.snapshots()
        except OSError as error:
            self.close()
            raise StagingError(f"--eval-hf-dir {self.directory}: {error.strerror}") from None

    def close(self) -> None:
        """Remove the room, and let the next run have the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            remove_tree(self.room)
            lock.release()

    def new_draft(self, rollout_id: int) -> Path:
        """Make an empty directory in the room.

        Raises:
            OSError: it cannot be made.
        """
        draft = self.room / f"step_{rollout_id}.{next(self._numbers)}"
        draft.mkdir(mode=0o700)
        return draft

    def final(self, rollout_id: int) -> Path:
        """Where the finished snapshot of a step belongs."""
        return self.directory / f"step_{rollout_id}"

    def remove(self, path: Path) -> None:
        """Remove something of this run: it vanishes from its place at once, then from the disk."""
        trash = self.room / f"removed.{next(self._numbers)}"
        try:
            path.rename(trash)
        except FileNotFoundError:
            if os.path.lexists(path):  # the room is gone: the run is closed
                remove_tree(path)
            return
        remove_tree(trash)

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

    def _sweep(self) -> None:
        """Remove the rooms of dead runs; the lock says that no other run is alive here."""
        for path in list(self.directory.glob(f"{_ROOM}*")):
            if not path.is_dir() or path.is_symlink():
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
