"""What the dispatcher's actor is told and asked, and what it replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime.eval.contracts import Capture, EvalOutput, EvalPoint, Outcome
from vime.eval.dispatch.point_life import PointLife
from vime.eval.journal.past import LeftPoint
from vime.rollout.checkpoint_eval import EvalSkip


@dataclass(frozen=True)
class Admit:
    """Ask to admit a point; the reply is its :class:`PointLife` and its draft, if it exports."""

    point: EvalPoint


@dataclass(frozen=True)
class Admitted:
    """The reply: the point's life, settled already when it was dropped, and its draft.

    ``is_earlier``: an earlier run was asked for it; nothing is left for the caller to do.
    """

    life: PointLife
    draft: Any | None = None
    is_earlier: bool = False


@dataclass(frozen=True)
class Launch:
    """The capture is done (or there is none): lead the point to its end.

    Attributes:
        admitted: the reply to :class:`Admit`.
        capture: the weights held still; ``None`` for a given checkpoint.
        stall_s: seconds that the training thread has waited.
    """

    admitted: Admitted
    capture: Capture | None
    stall_s: float


@dataclass(frozen=True)
class Captured:
    """Follows an :class:`Admit` whose reply nobody has waited for, because a slot was free.

    Attributes:
        point: the one to be admitted.
        result: the weights held still, or why there are none.
        stall_s: seconds that the training thread has waited.
    """

    point: EvalPoint
    result: Capture | EvalSkip
    stall_s: float


@dataclass(frozen=True)
class Settle:
    """The caller did the rest itself (a shared-engine eval, a failed capture): end the point.

    Attributes:
        admitted: the reply to :class:`Admit`.
        result: the output, or why there is none.
        stall_s: seconds that the training thread has waited.
    """

    admitted: Admitted
    result: EvalOutput | EvalSkip
    stall_s: float


@dataclass(frozen=True)
class TakeUp:
    """Go on with what earlier runs left: before the first :class:`Admit`.

    Attributes:
        outcomes: of the points that have ended; nothing is done about them any more.
        left: the points that have no end; each is led to one.
    """

    outcomes: Sequence[Outcome]
    left: Sequence[LeftPoint]


@dataclass(frozen=True)
class Drain:
    """Ask to wait until no point is pending; those left after ``timeout_s`` are cancelled."""

    timeout_s: float
