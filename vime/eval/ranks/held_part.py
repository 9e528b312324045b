"""One rank's part of the weights, from its capture until it is written."""

from __future__ import annotations

from pathlib import Path

from vime.eval.ranks.parts import Parts, write_parts
from vime.eval.snapshot.checkpoint_files import WeightFile, plan_files
from vime.eval.snapshot.held import Held


class HeldPart:
    """One rank's part of the weights, held still."""

    def __init__(self, parts: Parts, held: Held, max_shard_bytes: int) -> None:
        self.parts = parts
        self._held = held
        self._max_shard_bytes = max_shard_bytes

    def files(self) -> list[WeightFile]:
        """The files that all ranks write together."""
        return plan_files(self.parts.whole, self._max_shard_bytes)

    def write(self, directory: Path, files: list[WeightFile]) -> int:
        """Write this rank's part into files that are there; returns how many bytes it has."""
        views = self._held.views()
        own = {name: (views[name], part.offset) for name, part in self.parts.own.items()}
        return write_parts(directory, files, self.parts.whole, own)

    def release(self) -> None:
        """Leave the memory to the next capture."""
        self._held.release()
