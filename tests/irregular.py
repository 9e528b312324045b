"""What may lie in the place of a file and is none: each would hold its reader up, or never end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def put_fifo(path: Path) -> None:
    """A pipe that nobody writes into."""
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    """A socket that nobody listens at; its name may be longer than an address."""
    place = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


def put_directory(path: Path) -> None:
    """A directory."""
    path.mkdir()


def put_device(path: Path) -> None:
    """A link to a device."""
    path.symlink_to(os.devnull)


#: name → puts it there.
IRREGULAR: dict[str, Callable[[Path], None]] = {
    "fifo": put_fifo,
    "socket": put_socket,
    "directory": put_directory,
    "device": put_device,
}


def replace(path: Path, kind: str) -> None:
    """Put such a thing in the place of a file."""
    path.unlink(missing_ok=True)
    IRREGULAR[kind](path)
