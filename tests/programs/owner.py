"""Owns one kept tree, prints all pids as one JSON line, and then blocks, unfit to clean up.

The first argument says how it blocks: ``idle`` awaits the child, ``blocked`` blocks the loop,
``cousin`` has left a forked process behind that holds copies of its file descriptors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio

from vime.eval.processes.process import KeptProcess, spawn


async def keep(mode: str, log_path: Path) -> None:
    tree = [sys.executable, str(Path(__file__).with_name("tree.py"))]
    process = await spawn(tree, name="tree", log_path=log_path, piped=True)
    assert process.stdout is not None
    pids = json.loads(await process.stdout.receive())
    pids |= {"child": process.pid, "keeper": process.keeper_pid}
    if mode == "cousin":
        cousin = os.fork()
        if cousin == 0:
            signal.pause()
        pids["cousin"] = cousin
    print(json.dumps(pids), flush=True)
    await block(mode, process)


async def block(mode: str, process: KeptProcess) -> None:
    if mode == "blocked":
        while True:
            signal.pause()
    await process.wait()


if __name__ == "__main__":
    anyio.run(keep, sys.argv[1], Path(sys.argv[2]))
