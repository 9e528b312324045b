"""What the dispatcher asks of the snapshot store, real or recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from vime.eval.contracts import Capture, Snapshot


class Draft(Protocol):
    """A snapshot that is being written."""

    @property
    def directory(self) -> Path:
        """Where the exporter writes it."""


class Store(Protocol):
    """What the dispatcher asks of :class:`vime.eval.snapshot.store.SnapshotStore`."""

    def begin(self, rollout_id: int, cause_seq: int | None = None) -> Any:
        """Make an empty draft directory."""

    async def seal(self, draft: Any, capture: Capture) -> Snapshot:
        """Write, digest, verify and rename it into place."""

    def discard(self, draft: Any, reason: str) -> None:
        """Remove the draft of a capture that failed."""

    async def adopt(self, rollout_id: int, hf_dir: Path) -> Snapshot:
        """Verify a directory that is not vime's."""

    async def inherit(self, rollout_id: int) -> Snapshot:
        """Verify the snapshot that an earlier run has left of a point."""

    def lease(self, snapshot: Snapshot) -> AbstractContextManager[Any]:
        """Keep the snapshot on disk for as long as the context is open."""
