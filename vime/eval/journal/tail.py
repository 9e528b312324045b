"""The end of a file of JSON lines whose writer was killed."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

_CHUNK = 1 << 16


def mend_tail(path: Path) -> int:
    """Make a file end with a whole line: cut off a torn one, end one that is whole otherwise.

    Args:
        path: of JSON lines; it may be missing.

    Returns:
        How many bytes were cut off.

    Raises:
        OSError: it cannot be read or written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(descriptor).st_size
        tail = _after_last_newline(descriptor, size)
        if not tail:
            return 0
        if _is_object(tail):
            os.pwrite(descriptor, b"\n", size)
            return 0
        os.ftruncate(descriptor, size - len(tail))
        return len(tail)
    finally:
        os.close(descriptor)


def _after_last_newline(descriptor: int, size: int) -> bytes:
    tail = b""
    while len(tail) < size:
        begin = max(0, size - len(tail) - _CHUNK)
        chunk = os.pread(descriptor, size - len(tail) - begin, begin)
        _, newline, rest = chunk.rpartition(b"\n")
        tail = rest + tail
        if newline:
            break
        if not chunk:  # cut by somebody else meanwhile
            break
    return tail


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False
