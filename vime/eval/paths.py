"""Paths that people name: where they lead, also where a link leads back to itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path

LOOP = "a link that leads back to itself: remove it, or name the directory or file itself"


def real_path(path: str | os.PathLike[str]) -> Path:
    """The path without links, as far as they lead anywhere.

    ``Path.resolve`` is the same, but that up to Python 3.12 it raises a ``RuntimeError`` where a
    link leads back to itself. Here such a path stays, and whoever opens it has an ``OSError``.
    """
    return Path(os.path.realpath(path))


def is_link_loop(path: str | os.PathLike[str]) -> bool:
    """Whether the path cannot be followed to its end, since a link leads back to itself."""
    try:
        os.stat(path)  # noqa: PTH116 -- a path may be a word
    except OSError as error:
        return error.errno == errno.ELOOP
    except ValueError:  # no file can have such a name
        return False
    return False
