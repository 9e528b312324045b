"""A snapshot as the store knows it: while it is being made, and when it is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vime.eval.contracts import Snapshot
from vime.eval.snapshot.handoff import Handoff
from vime.eval.snapshot.manifest import Manifest
from vime.fsm.machine import TracedMachine


@dataclass(eq=False)
class Draft:
    """A snapshot that is being made.

    Attributes:
        rollout_id: the training step.
        directory: the empty directory to write into.
        machine: its life in the trace.
        handoff: settles with the worker thread who removes the remains.
    """

    rollout_id: int
    directory: Path
    machine: TracedMachine
    handoff: Handoff = field(default_factory=Handoff)


def snapshot_of(path: Path, manifest: Manifest, *, owned: bool) -> Snapshot:
    """What its readers are told of a snapshot that has been verified."""
    return Snapshot(
        rollout_id=manifest.rollout_id,
        path=path,
        weight_version=manifest.weight_version,
        digest=manifest.digest,
        owned=owned,
        num_bytes=manifest.num_bytes,
        verify=manifest.verify,
        with_nan=manifest.with_nan,
    )
