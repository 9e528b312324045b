"""What the notes between ranks are called, and how a failure is put into one."""

from __future__ import annotations

import os
import socket
import traceback


def word_of(rollout_id: int) -> str:
    """The key under which rank 0 says what becomes of a point."""
    return f"{rollout_id}/word"


def report_of(rollout_id: int, rank: int) -> str:
    """The key under which another rank says what became of its part."""
    return f"{rollout_id}/rank_{rank}"


def explain(error: Exception) -> str:
    """A failure for people on another machine."""
    where = f"{socket.gethostname()}, process {os.getpid()}"
    return f"({where}) {''.join(traceback.format_exception(error)).rstrip()}"
