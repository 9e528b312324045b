"""Settles between an event loop and its worker thread who cleans up, without either waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class Phase(Enum):
    """How far the worker is."""

    IDLE = "it has not begun"
    WORKING = "it is busy: what it leaves behind is its own to remove"
    DONE = "what it made is in place, and the loop's"


class AbandonedError(Exception):
    """Raised in a worker whose caller has gone."""


class Handoff:
    """One piece of work that a loop hands to a worker, and may abandon at any moment.

    Exactly one side removes the remains: the loop when the worker has not begun or has committed,
    the worker in between. What was abandoned before it was committed never becomes visible.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = Phase.IDLE
        self._abandoned = False

    def start(self) -> None:
        """In the worker: begin.

        Raises:
            AbandonedError: too late; nothing is left to do, cleaning up neither.
        """
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            self._phase = Phase.WORKING

    def check(self) -> None:
        """In the worker, between steps: stop early when nobody waits any more.

        Raises:
            AbandonedError: nobody does; the worker removes what it made.
        """
        if self._abandoned:
            raise AbandonedError

    def commit(self, action: Callable[[], object]) -> None:
        """In the worker: do the one thing that others can see, unless nobody waits any more.

        Args:
            action: a single quick system call: a loop that abandons meanwhile waits for it.

        Raises:
            AbandonedError: nobody wants it; the worker removes what it made.
            Exception: what ``action`` raises; then it counts as not done.
        """
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            action()
            self._phase = Phase.DONE

    def abandon(self) -> Phase:
        """On the loop: give up waiting; returns how far the worker was."""
        with self._lock:
            self._abandoned = True
            return self._phase
