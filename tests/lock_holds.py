"""Measures how long one thread keeps the interpreter lock from another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LockHolds:
    """A victim thread that always wants the lock, as training does, and notes when it lacks it.

    The victim spins. While it sleeps it waits for the lock: it waits for nothing else, and the time
    in which it could run and was given no processor is no sleep (the kernel counts that apart). The
    suspect had the lock at most for as long, and at most for the processor time that it used
    meanwhile: when it was interrupted, the machine was to blame. The lesser of the two is its hold.

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
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as statistics:  # noqa: PTH123

            def now() -> tuple[int, int]:
                """This thread's time, but for its waits for a processor; and the suspect's."""
                waited_ns = int(os.pread(statistics.fileno(), 64, 0).split()[1])
                return time.perf_counter_ns() - waited_ns, time.clock_gettime_ns(self._clock)

            last, last_cpu = now()
            while not self._stop:
                this, this_cpu = now()
                held_ms = min(this - last, this_cpu - last_cpu) / 1e6
                if held_ms > 0.02:
                    self.holds_ms.append(held_ms)
                last, last_cpu = this, this_cpu
