"""Settles between an event loop and its worker thread who cleans up, without either waiting."""

from __future__ import annotations

import threading
from enum import Enum


class Phase(Enum):
    """How far the worker is."""

    IDLE = "it has not begun"
    WORKING = "it is busy: what it leaves behind is its own to remove"
    DONE = "it has finished: what it made is the loop's"


class AbandonedError(Exception):
    """Raised in a worker whose caller has gone."""


class Handoff:
    """One piece of work that a loop hands to a worker, and may abandon at any moment.

    Exactly one side removes the remains: the loop when the worker has not begun or has finished,
    the worker when it is busy.
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

    def finish(self) -> None:
        """In the worker: hand over what it made.

        Raises:
            AbandonedError: nobody wants it; the worker removes it.
        """
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            self._phase = Phase.DONE

    def abandon(self) -> Phase:
        """On the loop: give up waiting; returns how far the worker was."""
        with self._lock:
            self._abandoned = True
            return self._phase
