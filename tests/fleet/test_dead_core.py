"""A server ends with the process that it cannot do without, and only with that."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A server that waits for ever. Its children end one after the other, each with the status that
#: is asked for, as soon as they are watched.
PROGRAM = """
import multiprocessing, os, sys, threading
from vime.eval.fleet import dead_core

def core(watched, status):
    watched.wait()
    os._exit(status)

def watch(sentinels, timeout, wait=dead_core.wait):
    if sentinels:
        watched.set()
    return wait(sentinels, timeout)

dead_core.wait = watch
dead_core.end_with_children(grace_s=0.0)
context = multiprocessing.get_context("fork")
for status in map(int, sys.argv[1:]):
    watched = context.Event()
    child = context.Process(target=core, args=(watched, status), name=f"core {status}")
    child.start()
    child.join()
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("statuses", [(7,), (0, 0, 9)])
def test_a_server_ends_with_the_first_of_its_children_that_fails(statuses: tuple[int, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, statuses)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    failed = statuses[-1]
    said = f"The engine cannot go on: core {failed} with the status {failed} has ended.\n"
    assert (done.returncode, done.stderr) == (1, said)
