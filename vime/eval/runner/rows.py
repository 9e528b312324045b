"""Reads the rows of an eval set: JSON lines, JSON, Parquet, saved datasets, directories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

Row = tuple[str, dict[str, Any]]
"""Where it stands, for messages (``FILE:LINE``), and what it says."""

_UTF8_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def read_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    """Each row that is an object; what is wrong with the others is added to ``problems``.

    Args:
        path: JSON lines or a JSON list of objects, Parquet (by its suffix), a directory of such
            files, read in the order of their names, or what ``datasets.save_to_disk`` wrote.
        problems: one sentence for each thing that is wrong.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # It would be empty when the runner reads it again, or hold the reader up for good.
            problems.append(f"{path}: expected a file or a directory, not a pipe or a device")
        elif path.is_dir():
            yield from _directory_rows(path, problems)
        elif path.suffix == ".parquet":
            yield from _parquet_rows(path, problems)
        elif path.suffix != ".jsonl" and _begins_with_bracket(path):
            yield from _array_rows(path, problems)
        else:
            yield from _line_rows(path, problems)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")


def _directory_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    if (path / "dataset_dict.json").is_file():
        yield from _split_rows(path, problems)
        return
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield from _saved_rows(path, problems)
        return
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in _SUFFIXES and file.is_file() and not _is_hidden(file.relative_to(path))
    )
    if not files:
        problems.append(f"{path}: none of its files ends with {', '.join(_SUFFIXES)}")
    for file in files:
        yield from read_rows(file, problems)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _split_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    """The one split of a saved ``DatasetDict``."""
    splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
    if len(splits) != 1:
        problems.append(
            f"{path}: has the splits {', '.join(splits) or '(none)'}; name one of them as "
            f"{path}/SPLIT"
        )
        return
    yield from _saved_rows(path / splits[0], problems)


def _saved_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    try:
        from datasets import load_from_disk
    except ImportError:
        problems.append(
            f"{path}: a saved dataset needs the package datasets: pip install 'vime[datasets]'"
        )
        return
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # whatever a damaged one makes it raise
        problems.append(f"{path}: cannot be read as a dataset: {type(error).__name__}: {error}")
        return
    for index, row in enumerate(saved):
        yield f"{path} row {index}", row


def _parquet_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        problems.append(f"{path}: Parquet needs the package pyarrow: pip install 'vime[parquet]'")
        return
    index = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path} row {index}", row
                    index += 1
    except ArrowException as error:
        problems.append(f"{path}: cannot be read as Parquet: {error}")


def _begins_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_UTF8_BOM).lstrip().startswith(b"[")


def _array_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    try:
        rows = _parsed(path.read_bytes().removeprefix(_UTF8_BOM))
    except json.JSONDecodeError as error:
        problems.append(
            f"{path}:{error.lineno}: not JSON at column {error.colno}: {error.msg}; expected a "
            "list of objects"
        )
        return
    for index, row in enumerate(rows):
        yield from _object(f"{path}[{index}]", row, problems)


def _line_rows(path: Path, problems: list[str]) -> Iterator[Row]:
    """Blank lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_UTF8_BOM).strip()
            if not text:
                continue
            where = f"{path}:{number}"
            try:
                row = _parsed(text)
            except json.JSONDecodeError as error:
                problems.append(
                    f"{where}: not JSON at column {error.colno}: {error.msg}; expected one JSON "
                    "object a line, in UTF-8"
                )
                continue
            yield from _object(where, row, problems)


def _parsed(text: bytes) -> Any:
    """The value of a JSON text, whose integers are exact: a label may be a number of 30 digits.

    Raises:
        json.JSONDecodeError: it is no JSON, or holds an integer of more digits than Python reads.
    """
    value = orjson.loads(text)  # quick and strict; beyond 64 bits it makes a float of an integer
    if not _LONG_NUMBER.search(text):
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(str(error), text.decode(), 0) from error


def _object(where: str, row: Any, problems: list[str]) -> Iterator[Row]:
    if isinstance(row, dict):
        yield where, row
    else:
        problems.append(f"{where}: a JSON {kind(row)}; expected an object")


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {bool: "boolean", int: "number", float: "number", str: "text", list: "list"}
    return "null" if value is None else names.get(type(value), "object")
