"""Measures how long one thread keeps the interpreter lock from another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LockHolds:
    """A victim thread that always wants the lock, as training does, and notes when it lacks it.

    The victim spins. When it could not run for a while, somebody else had the lock: at most for
    as long as the gap, and at most for the processor time that the suspect used meanwhile. The
    lesser of the two is the suspect's hold: a gap in which another thread, or the scheduler, was
    to blame does not count.

    Args:
        suspect: the thread under suspicion.

    Attributes:
        holds_ms: every hold that could be seen, in ms.
    """

    def __init__(self, suspect: threading.Thread) -> None:
        assert suspect.ident is not None, "it runs"
        self.holds_ms: list[float] = []
        self._clock = time.pthread_getcpuclockid(suspect.ident)
        self._stop = False

    @property
    def longest_ms(self) -> float:
        return max(self.holds_ms, default=0.0)

    @contextmanager
    def watching(self) -> Iterator[LockHolds]:
        victim = threading.Thread(target=self._spin, name="victim")
        victim.start()
        try:
            yield self
        finally:
            self._stop = True
            victim.join()

    def _spin(self) -> None:
        now, cpu = time.perf_counter_ns, self._suspect_cpu_ns
        last, last_cpu = now(), cpu()
        while not self._stop:
            this, this_cpu = now(), cpu()
            held_ms = min(this - last, this_cpu - last_cpu) / 1e6
            if held_ms > 0.02:
                self.holds_ms.append(held_ms)
            last, last_cpu = this, this_cpu

    def _suspect_cpu_ns(self) -> int:
        return time.clock_gettime_ns(self._clock)
