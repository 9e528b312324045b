"""Records to bytes: JSON that every reader accepts, whatever a caller put into ``detail``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson

MAX_LINE = 1 << 20
"""Longest line that is written, in bytes; readers skip lines that are far longer."""

_MAX_TEXT = 2_000
_MAX_DEPTH = 20
_INT64 = 1 << 63


def encode(fields: dict[str, Any]) -> bytes:
    """One line without its newline.

    Numbers of numpy and torch are written as numbers, paths and whatever else JSON lacks as
    strings. A line above :data:`MAX_LINE` has its strings cut, and loses its ``detail`` if that
    does not help: an eval must not fail because its trace could not be written.
    """
    try:
        line = orjson.dumps(fields, default=_default, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # cycles, lone surrogates, integers beyond 64 bits, objects that fail
        line = orjson.dumps(plain(fields))
    if len(line) <= MAX_LINE:
        return line
    size = len(line)
    line = orjson.dumps(plain(fields, max_text=_MAX_TEXT))
    if len(line) <= MAX_LINE:
        return line
    return orjson.dumps({**plain(fields, max_text=_MAX_TEXT), "detail": {"dropped_bytes": size}})


def plain(value: Any, *, max_text: int | None = None, depth: int = 0) -> Any:
    """``value`` as strings, 64-bit numbers, lists and dictionaries of limited depth."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, str):
        text = value.encode(errors="backslashreplace").decode()
        return text if max_text is None or len(text) <= max_text else text[:max_text] + "…"
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {
            str(plain(key, max_text=max_text, depth=depth + 1)): plain(
                item, max_text=max_text, depth=depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, max_text=max_text, depth=depth + 1) for item in value]
    return plain(_default(value), max_text=max_text, depth=depth + 1)


def _default(value: Any) -> Any:
    """What JSON lacks, in terms of what it has."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    item = getattr(value, "item", None)
    if callable(item):
        with suppress(TypeError, ValueError, RuntimeError):  # an array of several numbers
            return item()
    try:
        return str(value)
    except Exception as error:  # somebody's __str__; the trace goes on, and says so
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"
