"""Which checkpoints have been scored already, and with which settings."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import orjson

from vime.eval.appending import append_regular
from vime.eval.config import EvalConfig
from vime.eval.snapshot.files import open_regular

#: Fields of the config that say where, when and how long, and never what the score is.
_NO_MATTER = frozenset({
    "num_gpus", "hf_dir", "max_in_flight", "overflow_policy", "keep_snapshots", "interval",
    "concurrency", "hf_checkpoint", "ci_test", "run_dir", "uses_snapshots", "prompt_data",
})  # fmt: skip
_CHUNK_BYTES = 1 << 20
_MAX_LINE = 16 << 20
_WEIGHTS = ".safetensors"

#: What each line begins with.
_BEGINNING = b'{"checkpoint":'
_EXPECTED = {str: "a text", int: "a whole number", dict: "metric names with numbers"}


@dataclass(frozen=True)
class Scored:
    """One line of the ledger.

    Attributes:
        checkpoint: see :func:`checkpoint_identity`.
        settings: see :func:`settings_identity`.
        path: the directory, as it was then.
        rollout_id: the step that it was reported at.
        metrics: metric name → number.
        run_dir: where its evidence is.
    """

    checkpoint: str
    settings: str
    path: str
    rollout_id: int
    metrics: dict[str, float]
    run_dir: str


class LedgerError(ValueError):
    """A line of the file is not what vime writes; the message says which, and why."""


class Ledger:
    """A file with one JSON object for each checkpoint that has been scored.

    A line is appended in one write, so that several runs may share the file, and a killed one
    tears its last line at most.

    Args:
        path: the file; made with its directory at the first score.

    Raises:
        OSError: it is there and cannot be read.
        LedgerError: it has a line that is none of vime's, nor the torn beginning of one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, str], Scored] = {}
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return  # there is no score yet
        self._read()

    def _read(self) -> None:
        for number, line in enumerate(_lines(self.path), 1):
            if not line.strip():
                continue
            try:
                scored = _parse(line)
            except ValueError as error:
                raise LedgerError(
                    f"{self.path}:{number}: {error}; remove that line, or name another file"
                ) from None
            if scored is not None:
                self._known[scored.checkpoint, scored.settings] = scored

    def find(self, checkpoint: str, settings: str) -> Scored | None:
        """The latest score of a checkpoint with these settings, if there is one."""
        return self._known.get((checkpoint, settings))

    def add(self, scored: Scored) -> None:
        """Append a score.

        Raises:
            OSError: it cannot be written.
        """
        self._known[scored.checkpoint, scored.settings] = scored
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = orjson.dumps(asdict(scored), option=orjson.OPT_APPEND_NEWLINE)
        descriptor = append_regular(self.path, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # after a line that was torn
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written")


def _lines(path: Path) -> Iterator[bytes]:
    with BufferedReader(_regular(path)) as lines:
        yield from iter(lambda: lines.readline(_MAX_LINE), b"")


def _parse(line: bytes) -> Scored | None:
    """A line's content; ``None`` for one that was torn.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if _BEGINNING.startswith(line.strip()) or line.startswith(_BEGINNING):
            return None
        raise ValueError(f"not JSON, and no beginning of a score of vime's: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{_shown(found)}: expected a JSON object, the score of a checkpoint")
    missing = [field.name for field in fields(Scored) if field.name not in found]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: expected the score of a checkpoint")
    # A later vime may say more.
    wanted = {field.name: found[field.name] for field in fields(Scored)}
    for name, value in wanted.items():
        kind = {"rollout_id": int, "metrics": dict}.get(name, str)
        if type(value) is not kind:
            raise ValueError(f"{name} {_shown(value)}: expected {_EXPECTED[kind]}")
    for name, value in wanted["metrics"].items():
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"metrics: {name} {_shown(value)}: expected a number")
    return Scored(**wanted)


def _shown(value: object) -> str:
    return f"{value!r:.100}"


def settings_identity(config: EvalConfig) -> str:
    """One digest of everything in the flags that a score depends on.

    The eval sets count with their content, whatever the files are called. A function that is
    named by its path (a reward, an eval function) counts with that path.

    Raises:
        OSError: a file cannot be read.
    """
    matters: dict[str, Any] = {
        name: value
        for name, value in asdict(config).items()
        if name not in _NO_MATTER and not name.endswith("_timeout_s")
    }
    sets = [[name, _content(path)] for name, path in config.prompt_data]
    return _digest({**matters, "sets": sets})


def checkpoint_identity(directory: Path, weights_digest: str) -> str:
    """One digest of a checkpoint: its weights, its tokenizer, its configuration.

    Args:
        directory: the checkpoint.
        weights_digest: of its manifest.

    Raises:
        OSError: a file cannot be read.
    """
    small = {
        path.name: _content(path)
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix != _WEIGHTS
    }
    return _digest({"weights": weights_digest, "files": small})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    ).hexdigest()


def _content(path: Path) -> str:
    """Of a file's bytes, or of the names and bytes of all files below a directory."""
    digest = hashlib.sha256()
    for name, file in _files(path):
        digest.update(f"{name}\0".encode())
        with _regular(file) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _regular(path: Path) -> FileIO:
    try:
        return open_regular(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield "", path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(path)), file
