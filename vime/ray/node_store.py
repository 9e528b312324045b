"""The snapshots that have travelled to a node: received in pieces, proven whole, lent, removed.

A :class:`~vime.eval.snapshot.store.SnapshotStore` like that of the driver does all of it, in a
staging directory of the node's own: what arrives is a draft until its content has the digest that
was announced, and only then becomes visible under its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import anyio.to_thread

from vime.eval.contracts import Snapshot
from vime.eval.paths import real_path
from vime.eval.snapshot.draft import Draft
from vime.eval.snapshot.files import free_bytes
from vime.eval.snapshot.staging import Staging, remove_tree
from vime.eval.snapshot.stamps import FULL
from vime.eval.snapshot.store import SnapshotStore
from vime.fsm.encode import encode
from vime.fsm.record import FIELDS, Record
from vime.fsm.trace import Trace
from vime.ray.arriving import ArrivingFile
from vime.rollout.checkpoint_eval import EvalSkip

#: Room that must be left beside what is to arrive, in bytes: manifests, other people's files.
_MARGIN_BYTES = 16 << 20


class NotReceived(Exception):
    """A snapshot is not here: no room, an error of the disk, or other content than announced."""


@dataclass(frozen=True)
class FileFacts:
    """One file that travels: its size in bytes, and its time of change in nanoseconds."""

    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Of a file that is there."""
        info = path.stat()
        return cls(info.st_size, info.st_mtime_ns)


@dataclass(eq=False)
class _Arrival:
    """A snapshot that is being received: the capture of what has come; ``open``: name → file."""

    snapshot: Snapshot
    draft: Draft
    files: dict[str, FileFacts]
    open: dict[str, ArrivingFile] = field(default_factory=dict)

    def close(self) -> None:
        """Close every file, which has then the times of the original."""
        for name, file in self.open.items():
            file.close(self.files[name].changed_ns)
        self.open.clear()

    def write(self, directory: Path) -> Mapping[str, str]:  # noqa: ARG002 -- it lies there
        """The digests of the tensors that were digested on their way."""
        digests: dict[str, str] = {}
        for file in self.open.values():
            digests |= file.digests()
        self.close()
        return digests

    def release(self) -> None:
        """Hold nothing."""
        self.close()


class NodeStore:
    """Everything of one run that has travelled to one node; used on one event loop.

    Args:
        root: the node's staging directory; no other live run has it.
        run_id: the run.
        node: the node's name in the trace.
        keep: how many finished snapshots stay.
        verify: what their digests are made of; see :class:`SnapshotStore`.
    """

    def __init__(self, root: Path, run_id: str, node: str, keep: int, verify: str = FULL) -> None:
        self._root = root
        self._run_id = run_id
        self._verify = verify
        self._trace = Trace(None, run_id, node)
        self._trace.subscribe(self._note)
        self._records: list[bytes] = []
        self._num_forgotten = 0
        self._store = SnapshotStore(
            root, run_id=run_id, trace=self._trace, base=None, keep=keep, verify=verify
        )
        self._arrival: _Arrival | None = None
        self._here: dict[str, Snapshot] = {}
        self._leases: dict[str, list[AbstractContextManager[Snapshot]]] = {}

    def open(self) -> None:
        """Take the directory; blocks for a moment.

        Raises:
            NotReceived: another live run has it, or it cannot be written to.
        """
        try:
            self._store.open()
        except (ValueError, OSError) as error:
            raise NotReceived(str(error)) from error

    def close(self) -> None:
        """Remove everything of this run, and give the directory back; blocks."""
        self._drop_arrival("cancelled: the run ended")
        self._store.close()
        staging = Staging(real_path(self._root), self._run_id)
        for path, manifest in staging.snapshots().items():
            if manifest.run_id == self._run_id:  # the original is on the driver's node
                remove_tree(path)

    def records(self, num_known: int) -> list[bytes]:
        """The lines of the trace but the first ``num_known``, which nobody needs any more."""
        del self._records[: num_known - self._num_forgotten]
        self._num_forgotten = num_known
        return list(self._records)

    # -- arriving ----------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot, files: dict[str, FileFacts]) -> None:
        """Make room for a snapshot; one that was arriving before is given up.

        Args:
            snapshot: as the driver has it.
            files: path within it → what the file is.

        Raises:
            NotReceived: it does not fit, or one of its step is being read.
        """
        self._drop_arrival("cancelled: another one came")
        self._check_space(sum(file.size for file in files.values()))
        try:
            draft = self._store.begin(snapshot.rollout_id)
        except OSError as error:
            raise NotReceived(f"{self._root}: {error.strerror}") from error
        self._arrival = _Arrival(snapshot, draft, files)
        try:
            for name, file in files.items():
                self._arrival.open[name] = self._new_file(draft.directory, name, file.size)
        except OSError as error:
            self._drop_arrival(f"export_failed: {error.strerror}")
            raise NotReceived(f"{self._root}: {error.strerror}") from error

    async def write(self, name: str, offset: int, data: Any) -> None:
        """Put a piece where it belongs; pieces may come in any order.

        Raises:
            NotReceived: the disk says no, or nothing is arriving.
        """
        if self._arrival is None:
            raise NotReceived("it was given up meanwhile")
        file = self._arrival.open[name]
        try:
            await anyio.to_thread.run_sync(file.write, data, offset)
        except OSError as error:
            raise NotReceived(f"{self._root}: {error.strerror}") from error

    async def seal(self) -> None:
        """Let the snapshot be seen if it is what was announced.

        What could not be digested on its way is read once more.

        Raises:
            NotReceived: it is not.
        """
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            raise NotReceived("it was given up meanwhile")
        try:
            found = await self._store.seal(arrival.draft, arrival)
        except EvalSkip as skip:
            raise NotReceived(f"{skip.reason}: {skip.detail}") from skip
        wanted = arrival.snapshot
        if (found.digest, found.weight_version) != (wanted.digest, wanted.weight_version):
            raise NotReceived(
                f"what arrived has the digest {found.digest}, expected {wanted.digest} of "
                f"{wanted.weight_version}"
            )
        self._here[found.weight_version] = found

    # -- readers -----------------------------------------------------------------------------

    def lease(self, weight_version: str) -> Path | None:
        """Keep a snapshot here until :meth:`leave`; ``None`` when it is not here."""
        snapshot = self._here.get(weight_version)
        if snapshot is None:
            return None
        lease = self._store.lease(snapshot)
        try:
            lease.__enter__()
        except ValueError:  # it was removed since
            del self._here[weight_version]
            return None
        self._leases.setdefault(weight_version, []).append(lease)
        return snapshot.path

    def leave(self, weight_version: str) -> None:
        """Let go of one lease."""
        self._leases[weight_version].pop().__exit__(None, None, None)

    def _new_file(self, directory: Path, name: str, size: int) -> ArrivingFile:
        parts = PurePosixPath(name)
        assert not parts.is_absolute(), name
        assert ".." not in parts.parts, name
        return ArrivingFile(directory / parts, size, digests=self._verify == FULL)

    def _check_space(self, num_bytes: int) -> None:
        if not self._root.exists():
            return  # it was removed meanwhile, and is made again
        free = free_bytes(self._root)
        if free < num_bytes + _MARGIN_BYTES:
            raise NotReceived(
                f"{self._root}: {free} bytes are free there, and the snapshot has {num_bytes}: "
                "name a larger file system for this node (VIME_EVAL_HF_DIR), or lower "
                "--eval-keep-snapshots"
            )

    def _drop_arrival(self, reason: str) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.close()
            self._store.discard(arrival.draft, reason)

    def _note(self, record: Record) -> None:
        self._records.append(encode({name: getattr(record, name) for name in FIELDS}))
