"""Starts two ranks of tests/programs/rank.py, and reads what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vime.eval.fleet.ports import PortReservation

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2


@contextmanager
def ranks(scenario: str, root: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both ranks, running; they are ended on leaving."""
    logs = [root / f"rank_{rank}.log" for rank in range(NUM_RANKS)]
    with PortReservation("127.0.0.1") as port, ExitStack() as stack:
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.number),
            "WORLD_SIZE": str(NUM_RANKS),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "tests/programs/rank.py"), scenario, str(root)],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                cwd=root,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def results(processes: list[subprocess.Popen[bytes]], root: Path) -> list[Any]:
    """What each rank returned, once all have ended."""
    codes = [process.wait(100) for process in processes]
    logs = [(root / f"rank_{rank}.log").read_text() for rank in range(NUM_RANKS)]
    assert codes == [0] * NUM_RANKS, "\n".join(logs)
    return [json.loads((root / f"result_{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def run(scenario: str, root: Path) -> list[Any]:
    """Run a scenario to its end."""
    with ranks(scenario, root) as processes:
        return results(processes, root)
