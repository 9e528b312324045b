"""The reward of a chaos run: a number that changes with every character of the answer.

It runs in the EvalRunner's process, and tells the driver of each answer, so that a fault can
strike "at the 9th answer of point 7".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

#: Environment variables: a FIFO that gets one byte an answer; a file, while which exists no
#: answer is scored.
ANSWERS, HOLD = "VIME_CHAOS_ANSWERS", "VIME_CHAOS_HOLD"

_POLL_S = 0.05


def worth_of(answer: str) -> float:
    """From 0 to 1; two answers that differ are worth differently."""
    return int.from_bytes(hashlib.sha256(answer.encode()).digest()[:4]) / 2**32


def worth(answer: str, label: Any) -> float:  # noqa: ARG001 -- the contract of a reward
    """See :func:`worth_of`; ``--custom-rm-path`` names this one."""
    _tell()
    hold = os.environ.get(HOLD)
    while hold is not None and Path(hold).exists():
        time.sleep(_POLL_S)
    return worth_of(answer)


def _tell() -> None:
    path = os.environ.get(ANSWERS)
    if path is None:
        return
    with contextlib.suppress(OSError):  # the driver has died, or does not listen any more
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fifo, b".")
        finally:
            os.close(fifo)
