"""Looks at files that others wrote, without trusting them: sizes, types and links are checked."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BATCH_PARTS = 512
_BATCH_BYTES = 16 << 20


def open_regular(path: Path, *, follow_link: bool = True) -> FileIO:
    """Open a regular file for reading; a pipe or a device in its place is refused, not waited for.

    Raises:
        ValueError: it is missing, unreadable, a link (unless ``follow_link``) or no regular file;
            the message names the file alone, not its directory.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"{path.name}: {_why_unopened(path, error)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path.name}: no regular file")
    return FileIO(fd)


def _why_unopened(path: Path, error: OSError) -> str:
    if error.errno == errno.ENXIO:  # a socket, or a device that nothing drives
        return "no regular file"
    if path.is_symlink():
        return f"a link that leads nowhere or is not allowed here (to {path.readlink()})"
    if isinstance(error, FileNotFoundError):
        return "missing"
    return f"cannot be opened: {error.strerror}"


def read_small_file(path: Path, max_bytes: int, *, follow_link: bool) -> bytes:
    """The content of a regular file of at most ``max_bytes`` bytes.

    Raises:
        ValueError: as :func:`open_regular`, or it is larger, or cannot be read.
    """
    with open_regular(path, follow_link=follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path.name}: {size} bytes; at most {max_bytes} were expected")
        try:
            return file.read(size)
        except OSError as error:
            raise ValueError(f"{path.name}: cannot be read: {error.strerror}") from None


def read_json_object(
    path: Path, max_bytes: int, *, follow_link: bool, unique: bool = False
) -> dict[str, Any]:
    """A JSON object that a small file holds.

    Raises:
        ValueError: as :func:`read_small_file` and :func:`json_object`.
    """
    content = read_small_file(path, max_bytes, follow_link=follow_link)
    return json_object(content, path.name, unique=unique)


def json_object(content: bytes, name: str, *, unique: bool = False) -> dict[str, Any]:
    """Decode a JSON object; ``name`` says whose it is.

    Args:
        content: the text.
        name: for the message.
        unique: refuse a key that an object has twice: of two readers, one believes the first and
            the other the last.

    Raises:
        ValueError: it is not JSON, or another kind of value, or has a key twice.
    """
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{name}: not JSON: {error}") from None
    if type(value) is not dict:
        raise ValueError(f"{name}: a JSON object was expected, not a {type(value).__name__}")
    if unique:
        _refuse_repeated_keys(content, value, name)
    return value


def _refuse_repeated_keys(content: bytes, value: dict[str, Any], name: str) -> None:
    try:
        usual = [orjson.dumps(value), orjson.dumps(value, option=orjson.OPT_INDENT_2)]
    except orjson.JSONEncodeError:  # it writes less deeply nested texts than it reads
        usual = []
    if content.strip() in usual:
        return  # nothing was lost, and that was found out far quicker than it is below

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{name}: the key {key!r} is there twice")
            seen.add(key)

    try:
        json.loads(content.decode(), object_pairs_hook=look, parse_int=len, parse_float=len)
    except RecursionError:
        raise ValueError(f"{name}: it is nested without end") from None


def list_files(directory: Path) -> tuple[dict[str, int], list[str]]:
    """Every file below ``directory``: its path within, with ``/``, and its size in bytes.

    Returns:
        The files, and what should not be there: links that lead out or nowhere, and whatever is
        neither a file nor a directory.
    """
    files: dict[str, int] = {}
    problems: list[str] = []
    root = os.path.realpath(directory)
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                problem = _name_problem(name) or _link_problem(entry, name, root)
                if problem is not None:
                    problems.append(problem)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                elif entry.is_file():
                    files[name] = entry.stat().st_size
                else:
                    problems.append(f"{name}: neither a file nor a directory")
    return files, sorted(problems)


def _name_problem(name: str) -> str | None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"{name!a}: a name that is not UTF-8"
    return None


def _link_problem(entry: os.DirEntry[str], name: str, root: str) -> str | None:
    if not entry.is_symlink():
        return None
    target = os.path.realpath(entry.path)
    if not target.startswith(root + os.sep):
        return f"{name}: a link that leads out of the snapshot, to {target}"
    if not Path(target).exists():
        return f"{name}: a link that leads nowhere, to {target}"
    return None


def write_new(path: Path, parts: Iterable[ReadableBuffer]) -> None:
    """Write a new file, readable by its owner alone, from buffers that lie in memory.

    Each buffer goes to the kernel as it is, and the interpreter lock is free meanwhile. A full
    disk is an error here; through a memory map it would be a signal that kills the process.

    Raises:
        OSError: the file exists, or the disk is full.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with FileIO(fd, "w"):
        batch: list[memoryview] = []
        num_bytes = 0
        for part in parts:
            view = memoryview(part)
            if not view.nbytes:
                continue
            batch.append(view.cast("B"))
            num_bytes += view.nbytes
            if len(batch) == _BATCH_PARTS or num_bytes >= _BATCH_BYTES:
                _write_batch(fd, batch)
                batch, num_bytes = [], 0
        _write_batch(fd, batch)


def _write_batch(fd: int, views: list[memoryview]) -> None:
    """Many small tensors in one call: each call waits for the interpreter lock when it is done."""
    first = 0
    while first < len(views):
        count = os.writev(fd, views[first:])
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        if count:
            views[first] = views[first][count:]


def write_at(fd: int, content: ReadableBuffer, position: int) -> None:
    """Write all of a buffer into an open file, where it belongs there.

    Raises:
        OSError: the disk is full.
    """
    view = memoryview(content)
    if view.nbytes:  # without a byte it has no such view
        view = view.cast("B")
    while view.nbytes:
        count = os.pwrite(fd, view, position)
        view, position = view[count:], position + count


def free_bytes(directory: Path) -> int:
    """What this user may still write to the file system."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def free_inodes(directory: Path) -> int | None:
    """How many more files this user may make there; ``None`` where nothing limits them."""
    info = os.statvfs(directory)
    return info.f_favail if info.f_files else None


def flush(directory: Path) -> None:
    """Put every file below ``directory``, and the directories themselves, on the disk.

    Raises:
        OSError: the disk refused.
    """
    files = [directory / name for name in list_files(directory)[0]]
    for file in files:
        _fsync(file, os.O_RDONLY | os.O_NONBLOCK)
    for parent in {directory, *(parent for f in files for parent in f.parents)}:
        if parent.is_relative_to(directory):
            flush_directory(parent)


def flush_directory(directory: Path) -> None:
    """Put the entries of one directory on the disk.

    Raises:
        OSError: the disk refused.
    """
    _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
