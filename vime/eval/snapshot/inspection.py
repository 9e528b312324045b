"""Digests a tensor that comes in pieces, and sees whether its numbers are numbers."""

from __future__ import annotations

from blake3 import blake3

from vime.eval.contracts import Content
from vime.eval.snapshot.float_bits import NanSearch

CACHED_BYTES = 1 << 20
"""What a core's own cache holds: bytes that are looked at twice are still there."""


class Inspection:
    """Looks at the bytes of one tensor; all of the work leaves the interpreter lock.

    Args:
        dtype: as safetensors writes it; ``None`` digests, and looks for no NaN.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self._hasher = blake3()
        self._nans = None if dtype is None else NanSearch(dtype)

    def look(self, piece: memoryview) -> None:
        """Take the next bytes."""
        for start in range(0, len(piece), CACHED_BYTES):
            part = piece[start : start + CACHED_BYTES]
            self._hasher.update(part)
            if self._nans is not None:
                self._nans.look(part)

    @property
    def content(self) -> Content:
        """What has been seen."""
        return Content(self._hasher.hexdigest(), None if self._nans is None else self._nans.found)
