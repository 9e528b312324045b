"""The verified snapshots of a run: who reads which, and which of them have to go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime.eval.contracts import Snapshot
from vime.eval.snapshot.manifest import Manifest
from vime.fsm.machine import TracedMachine

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """A verified snapshot and who is with it."""

    snapshot: Snapshot
    machine: TracedMachine
    num_readers: int = 0
    was_read: bool = False

    @property
    def is_finished(self) -> bool:
        return self.was_read and not self.num_readers


class Shelf:
    """Lends snapshots, and removes the oldest finished ones.

    Args:
        keep: how many finished snapshots stay, those of dead runs included.
        remove: has a directory removed.
        is_protected: whether a path must stay: it was given as a checkpoint to evaluate, or a
            snapshot is being written in its place.

    Attributes:
        leftovers: the finished snapshots of dead runs, the oldest step first; they go before
            any of this run.
    """

    def __init__(
        self,
        keep: int,
        remove: Callable[[Path], None],
        is_protected: Callable[[Path], bool],
    ) -> None:
        self._keep = keep
        self._remove = remove
        self._is_protected = is_protected
        self._entries: dict[str, _Entry] = {}
        self.leftovers: dict[Path, Manifest] = {}

    def set_leftovers(self, found: Mapping[Path, Manifest]) -> None:
        """Take over what lay in the staging directory when this run began."""
        self.leftovers = dict(sorted(found.items(), key=lambda item: item[1].rollout_id))

    def claim(self, path: Path) -> None:
        """No longer a leftover: this run is going to use it."""
        self.leftovers.pop(path, None)

    def put(self, snapshot: Snapshot, machine: TracedMachine) -> None:
        """Have one more; it stays until it has been read."""
        self._entries[machine.id] = _Entry(snapshot, machine)

    @contextmanager
    def lease(self, snapshot: Snapshot) -> Iterator[Snapshot]:
        """See :meth:`vime.eval.snapshot.store.SnapshotStore.lease`."""
        entry = next((e for e in self._entries.values() if e.snapshot == snapshot), None)
        if entry is None:
            raise ValueError(
                f"{snapshot.path} ({snapshot.weight_version}) is no snapshot that this store has; "
                "take the lease right after seal() or adopt()"
            )
        entry.num_readers += 1
        entry.was_read = True
        _note(entry, "lease")
        try:
            yield snapshot
        finally:
            entry.num_readers -= 1
            _note(entry, "leave")
            if entry.is_finished:
                self._finish(entry)

    def replace(self, machine_id: str) -> bool:
        """Remove an earlier snapshot of the same name; ``False`` while it is being read."""
        entry = self._entries.get(machine_id)
        if entry is None:
            return True
        if entry.num_readers:
            return False
        self._delete(entry, reason="replaced")
        return True

    def close(self) -> None:
        """No more readers come: all that is not being read is finished."""
        for entry in list(self._entries.values()):
            if entry.num_readers:
                log.warning("%s is still being read, and stays", entry.snapshot.path)
            else:
                entry.was_read = True
                self._finish(entry)
        self._collect()

    def _finish(self, entry: _Entry) -> None:
        if entry.snapshot.owned:
            self._collect()
        else:  # what is not vime's is forgotten
            del self._entries[entry.machine.id]
            entry.machine.fire("release", weight_version=entry.snapshot.weight_version)

    def _collect(self) -> None:
        """Remove the oldest finished snapshots beyond ``keep``."""
        finished = [e for e in self._entries.values() if e.snapshot.owned and e.is_finished]
        finished.sort(key=lambda entry: entry.snapshot.rollout_id, reverse=True)
        self._collect_leftovers(max(0, self._keep - len(finished)))
        for entry in finished[self._keep :]:
            if not self._is_protected(entry.snapshot.path):
                self._delete(entry, reason="collected")

    def _collect_leftovers(self, num_kept: int) -> None:
        mine = {entry.snapshot.path for entry in self._entries.values()}
        for path in list(self.leftovers)[: max(0, len(self.leftovers) - num_kept)]:
            manifest = self.leftovers.pop(path)
            if path not in mine and not self._is_protected(path):
                log.info("%s of the dead run %s is removed", path, manifest.run_id)
                self._remove(path)

    def _delete(self, entry: _Entry, reason: str) -> None:
        del self._entries[entry.machine.id]
        entry.machine.fire("delete", reason=reason, weight_version=entry.snapshot.weight_version)
        self._remove(entry.snapshot.path)


def _note(entry: _Entry, trigger: str) -> None:
    entry.machine.fire(
        trigger,
        weight_version=entry.snapshot.weight_version,
        detail={"num_readers": entry.num_readers},
    )
