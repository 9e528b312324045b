"""Deadlines that end a wait with a skip reason of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from vime.rollout.checkpoint_eval import EvalSkip


@contextmanager
def skip_after(seconds: float, reason: str, doing: str) -> Iterator[None]:
    """Cancel the body after ``seconds`` and raise ``EvalSkip(reason)`` in its place.

    Args:
        seconds: from now; zero or less cancels at the body's first checkpoint.
        reason: the skip reason.
        doing: what took too long, for the message ("writing the snapshot").

    Raises:
        EvalSkip: the deadline passed before the body had ended. A cancellation from outside
            stays a cancellation, and a ``TimeoutError`` of the body's own passes unchanged.
    """
    with anyio.move_on_after(max(seconds, 0)) as scope:
        yield
    if scope.cancelled_caught:
        raise EvalSkip(reason, f"{doing} took longer than {seconds:.4g} s")
