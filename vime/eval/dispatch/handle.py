"""``EvalHandle``: one dispatched point, as its caller sees it."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future

from vime.eval.contracts import EvalPoint, Outcome
from vime.eval.dispatch.messages import Admitted
from vime.limits import LONGEST_S


class EvalHandle:
    """One dispatched point.

    Args:
        point: what was dispatched.
        admission: the dispatcher's reply, which may still be on its way.
    """

    def __init__(self, point: EvalPoint, admission: Future[Admitted]) -> None:
        self._point = point
        self._admission = admission

    @property
    def rollout_id(self) -> int:
        """The training step that names the point."""
        return self._point.rollout_id

    @property
    def state(self) -> str:
        """``queued``, ``exporting``, ``pinning``, ``running``, ``done`` or ``skipped``."""
        admission = self._admission
        if admission.done() and not admission.cancelled() and admission.exception() is None:
            return admission.result().life.state
        return "queued"

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: in seconds; ``None`` waits until the point settles, which its own
                deadlines bound.

        Raises:
            TimeoutError: it has not settled in time.
            RuntimeError: the dispatcher was closed before the point had been admitted.
        """
        if timeout is not None:  # threads wait for no number of centuries
            timeout = min(timeout, LONGEST_S)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            life = self._admission.result(timeout).life
        except CancelledError:
            raise RuntimeError("the EvalDispatcher was closed before it admitted this") from None
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return life.outcome.result(left)

    def __repr__(self) -> str:
        return f"<EvalHandle step={self.rollout_id} {self.state}>"
