"""Runs examples/train.py, and is killed right after a record was written: dies_at.py MOMENT ARG…

A moment is ``machine:id:trigger``; the id may be ``*``.
"""

from __future__ import annotations

import os
import signal
import sys

import train

from vime.fsm.record import Record
from vime.fsm.trace import Trace


def main() -> int:
    machine, _, rest = sys.argv[1].partition(":")
    name, _, trigger = rest.rpartition(":")

    def hear(record: Record) -> None:
        if (record.machine, record.trigger) == (machine, trigger) and name in ("*", record.id):
            os.kill(os.getpid(), signal.SIGKILL)

    begin = Trace.__init__

    def begun(trace: Trace, *args: object, **more: object) -> None:
        begin(trace, *args, **more)  # type: ignore[arg-type]
        trace.subscribe(hear)

    Trace.__init__ = begun  # type: ignore[assignment,method-assign]
    return train.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
