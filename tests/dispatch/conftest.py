"""The checkpoints of :mod:`tests.snapshots` for whole runs."""

from tests.snapshots import checkpoints

__all__ = ["checkpoints"]
