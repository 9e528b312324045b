"""Ends an engine's API server when a process that it has spawned dies before it.

Without its core a server answers nothing, and vLLM's own leaves in its own time: it looks every
few seconds whether the core lives, and then waits for the requests under way. One that the core
has died under, ``/pause`` for one, is never answered, so that such a server lives on for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

#: How long the server may take to say what has happened, and to leave by itself.
GRACE_S = 1.0

_LOOK_S = 0.5


def end_with_children(grace_s: float = GRACE_S) -> None:
    """From now on, end this process when a child of ``multiprocessing`` has failed.

    A child fails when it ends with a status other than 0. The process ends with the status 1, at
    once and without any clean-up: its keeper ends what else it has started.

    Args:
        grace_s: seconds from the child's end to that of this process.
    """
    watch = threading.Thread(target=_watch, args=(grace_s,), name="dead-core", daemon=True)
    watch.start()


def _watch(grace_s: float) -> None:
    children: set[BaseProcess] = set()
    while not (failed := [child for child in children if child.exitcode]):
        children = {child for child in children if child.exitcode != 0}
        children.update(multiprocessing.active_children())
        wait([child.sentinel for child in children], _LOOK_S)  # for news, or new children
    time.sleep(grace_s)
    what = ", ".join(f"{child.name} with the status {child.exitcode}" for child in failed)
    sys.stderr.write(f"The engine cannot go on: {what} has ended.\n")
    sys.stderr.flush()
    os._exit(1)
