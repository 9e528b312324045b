"""Text for terminals: durations that people read, and nothing that could steer a terminal."""

from __future__ import annotations

import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, direction marks, line separators


def clean(text: str, max_length: int | None = None) -> str:
    """``text`` on one line, with every control character written as an escape.

    Traces carry what models and users wrote: an escape sequence in it must not reach the
    terminal, nor a line break a table.
    """
    if max_length is not None and len(text) > max_length:
        text = text[: max_length - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in _UNSAFE else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def duration(ns: int | float) -> str:
    """Nanoseconds as people say them: ``350 µs``, ``12 ms``, ``3.4 s``, ``2m05s``, ``1h03m``."""
    if ns < 0:
        return "-" + duration(-ns)
    if ns < 999_500:
        return f"{ns / 1e3:.0f} µs" if ns else "0"
    if ns < 999_500_000:
        return f"{ns / 1e6:.0f} ms"
    seconds = ns / 1e9
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 line``, ``2 lines``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def headline(message: str) -> str:
    """The one line that says most: a traceback's last one, otherwise the first."""
    lines = [line for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
