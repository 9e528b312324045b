"""Removes directories on a thread of its own: freeing gigabytes must not hold an event loop."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class Janitor:
    """A thread that removes, one after the other, what it is told to.

    Args:
        remove: removes one path; runs on the thread.
    """

    def __init__(self, remove: Callable[[Path], None]) -> None:
        self._remove = remove
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        self._busy = False
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="vime-janitor", daemon=True)
        self._thread.start()

    def remove(self, path: Path) -> None:
        """Have a path removed soon; after :meth:`stop`, at once and by the caller."""
        with self._changed:
            if not self._stopped:
                self._waiting.append(path)
                self._changed.notify_all()
                return
        self._remove_now(path)

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked for has been removed; whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Remove what is left, then end the thread; whether that was in time."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if not self._waiting:
                    return
                path = self._waiting.popleft()
                self._busy = True
            self._remove_now(path)

    def _remove_now(self, path: Path) -> None:
        try:
            self._remove(path)
        except OSError as error:
            log.warning("%s could not be removed: %s", path, error)
