"""Ends the trace of a lost node, which cannot tell any more how its snapshots ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vime.fsm.machine import TracedMachine
from vime.fsm.read import read_trace
from vime.fsm.record import Record
from vime.fsm.tables import SNAPSHOT
from vime.fsm.trace import Trace

NODE_LOST: Final = "node_lost"


@dataclass
class _Left:
    """A snapshot as the node has left it; ``num_readers``: leases that nobody has ended."""

    last: Record
    num_readers: int = 0

    def feed(self, record: Record) -> None:
        self.last = record
        self.num_readers += (record.trigger == "lease") - (record.trigger == "leave")


def end_trace(path: Path, how: str) -> None:
    """Append what the loss of a node has done: nobody reads there, and nothing arrives any more.

    Args:
        path: the node's trace; there may be none.
        how: what is known of the loss.

    Raises:
        OSError, vime.fsm.read.TraceUnreadableError: it cannot be read or written.
    """
    if not path.exists():
        return
    left: dict[str, _Left] = {}
    last: Record | None = None
    for last in read_trace(path):
        if not last.rejected:
            left.setdefault(last.id, _Left(last)).feed(last)
    if last is None:
        return
    with _continued(path, last) as trace:
        for snapshot in left.values():
            _end(snapshot, trace, how)


def _continued(path: Path, last: Record) -> Trace:
    """The node's trace; its monotonic clock, which is not this node's, is carried on."""
    ahead_ns = last.mono_ns - time.monotonic_ns()
    return Trace(
        path,
        last.run_id,
        last.node,
        first_seq=last.seq + 1,
        mono_ns=lambda: time.monotonic_ns() + ahead_ns,
    )


def _end(left: _Left, trace: Trace, how: str) -> None:
    machine = TracedMachine(SNAPSHOT, left.last.id, trace)
    machine.restore(left.last.dest)
    machine.last_seq = left.last.seq
    version, detail = left.last.weight_version, {"message": how}
    for _ in range(left.num_readers):
        machine.fire("leave", reason=NODE_LOST, detail=detail, weight_version=version)
    if machine.can("abandon"):
        machine.fire("abandon", reason=NODE_LOST, detail=detail)
