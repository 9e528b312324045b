"""JSON lines, as vime's own files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[Any]:
    """The objects of a file, one a line, in their order.

    Lines end with a newline alone. Text that a model has written may hold any other character at
    which ``str.splitlines`` breaks, such as U+2028.
    """
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
