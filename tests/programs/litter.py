"""Makes what a killed process leaves behind: shared memory, a semaphore, a temporary file.

Prints their paths as JSON; a child of its own makes some as well. Then it waits to be killed.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any


def litter() -> list[str]:
    memory = shared_memory.SharedMemory(create=True, size=1 << 16)
    KEPT.append(memory)
    file = Path(tempfile.mkdtemp(), "file")
    file.write_text(str(os.getpid()))
    return [f"/dev/shm/{memory.name}", str(file)]


def child(pipe: Any) -> None:
    pipe.send(litter())
    time.sleep(1000)


KEPT: list[Any] = []

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    context.Process(target=child, args=(its,)).start()
    KEPT.append(context.Semaphore())
    sys.stdout.write(json.dumps([tempfile.gettempdir(), *litter(), *mine.recv()]) + "\n")
    sys.stdout.flush()
    time.sleep(1000)
