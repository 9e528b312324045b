"""Names weights by their files alone, unread: for ``--eval-verify headers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from blake3 import blake3

from vime.eval.snapshot.weights import TensorInfo

FULL, HEADERS = "full", "headers"

MODES = (FULL, HEADERS)
"""What the digest of a tensor is made of: its bytes, or its place in its file."""


def stamps(directory: Path, infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """What stands for each tensor's digest when nobody reads its bytes.

    Whoever finds the same file, by name, size and time of change, has the same stamps; what is in
    it is believed.

    Args:
        directory: the checkpoint.
        infos: name → what its header says.

    Returns:
        name → hexadecimal BLAKE3 over its file's name, size in bytes and time of change in
        nanoseconds, and its place in it.

    Raises:
        OSError: a file is not there.
    """
    facts = {name: (directory / name).stat() for name in {info.file for info in infos.values()}}
    return {
        name: blake3(
            orjson.dumps(
                [
                    HEADERS,
                    info.file,
                    facts[info.file].st_size,
                    facts[info.file].st_mtime_ns,
                    info.start,
                    info.end,
                ]
            )
        ).hexdigest()
        for name, info in infos.items()
    }
