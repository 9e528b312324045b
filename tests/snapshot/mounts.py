"""File systems in memory that are small in one way or another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(place: Path, limits: str) -> Iterator[Path]:
    """Mount a tmpfs at a new directory; whoever may not mount skips the test.

    Args:
        place: the directory.
        limits: mount options, as ``size=500k``.
    """
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", limits, "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs privileges")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
