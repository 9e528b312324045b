"""Deadlines that end a wait with a skip reason of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from vime.eval.config import EvalConfig
from vime.rollout.checkpoint_eval import EvalSkip

#: Fleet and evaluator keep their own deadlines. The dispatcher's come so many seconds later,
#: for one that does not: its process may have to be ended without a last word.
GRACE_S = 30.0


def recorded_limits(
    config: EvalConfig, *, force: bool, shared: bool, with_fleet: bool
) -> dict[str, Any]:
    """What the ``dispatch`` record says of the limits of a point's life.

    Args:
        config: the limits.
        force: the point waits for a slot until a pending one has ended.
        shared: the rollout engines evaluate, and the caller waits for them without a limit.
        with_fleet: points wait for their turn at the fleet, in the state ``pinning``.

    Returns:
        ``keep_snapshots``; ``timeouts_s``, each as it was set; and ``deadlines_s``, the longest
        stay in a state that they add up to, and that of the caller in ``dispatch`` (``stall``).
    """
    if shared:
        return {}
    each_s = config.pin_timeout_s + config.eval_timeout_s + 2 * GRACE_S
    turn_s = (config.max_in_flight - 1) * each_s + GRACE_S
    stays_s = {
        "exporting": config.export_timeout_s + (0.0 if with_fleet else turn_s),
        "pinning": turn_s + config.pin_timeout_s,
        "running": config.eval_timeout_s + GRACE_S,
    }
    slot_s = sum(stays_s.values()) if force else config.backpressure_timeout_s
    return {
        "keep_snapshots": config.keep_snapshots,
        "timeouts_s": {
            "export": config.export_timeout_s,
            "pin": config.pin_timeout_s,
            "eval": config.eval_timeout_s,
            "backpressure": config.backpressure_timeout_s,
        },
        "deadlines_s": {"stall": slot_s + config.export_timeout_s, **stays_s},
    }


@contextmanager
def skip_after(seconds: float, reason: str, doing: str, limit: str) -> Iterator[None]:
    """Cancel the body after ``seconds`` and raise ``EvalSkip(reason)`` in its place.

    Args:
        seconds: from now; zero or less cancels at the body's first checkpoint.
        reason: the skip reason.
        doing: what took too long, for the message ("writing the snapshot").
        limit: the whole deadline as it was set, and the flag that set it; ``seconds`` may be what
            is left of it.

    Raises:
        EvalSkip: the deadline passed before the body had ended. A cancellation from outside
            stays a cancellation, and a ``TimeoutError`` of the body's own passes unchanged.
    """
    with anyio.move_on_after(max(seconds, 0)) as scope:
        yield
    if scope.cancelled_caught:
        raise EvalSkip(reason, f"{doing} took longer than {limit}")
