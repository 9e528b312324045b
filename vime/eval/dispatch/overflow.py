"""Which pending point has to make room under the overflow policy ``latest``."""

from __future__ import annotations

from collections.abc import Iterable

from vime.eval.dispatch.point_life import PointLife


def oldest_waiting(pending: Iterable[PointLife]) -> PointLife | None:
    """The oldest pending point that has not begun to run; ``None`` if there is none.

    One whose weights are being loaded has begun: to stop it there would cost a restart of its
    engines. A forced one stays, whatever comes.

    Args:
        pending: in the order of their dispatch.
    """
    lives = list(pending)
    begun = _at_fleet(lives)
    for life in lives:
        if not (life.point.force or life.state == "running" or life is begun):
            return life
    return None


def _at_fleet(lives: list[PointLife]) -> PointLife | None:
    """The point whose weights are being loaded: turns are given in the order of the calls."""
    if any(life.state == "running" for life in lives):
        return None
    pinning = [life for life in lives if life.state == "pinning"]
    return min(pinning, key=lambda life: life.machine.last_seq or 0, default=None)
