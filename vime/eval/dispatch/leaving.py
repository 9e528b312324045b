"""How a training loop leaves a dispatcher, and what it is told there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from vime.eval.contracts import Outcome


class SkippedPointsError(RuntimeError):
    """Under ``--ci-test``: points were skipped. ``outcomes`` holds them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        lines = [
            f"step {o.rollout_id}: {o.reason}: {o.detail or ''}".rstrip(": ") for o in outcomes
        ]
        super().__init__(
            f"--ci-test: {len(outcomes)} eval point(s) were skipped:\n  " + "\n  ".join(lines)
        )
        self.outcomes = outcomes

    @classmethod
    def raise_for(cls, outcomes: Iterable[Outcome]) -> None:
        """Raise it when any of these was skipped."""
        skipped = [outcome for outcome in outcomes if outcome.state == "skipped"]
        if skipped:
            raise cls(skipped)


class DrainedOnLeaving(ABC):
    """A context manager: leaving it normally drains, leaving it by an exception does not.

    It is closed in either case.
    """

    @abstractmethod
    def drain(self, timeout: float | None = None) -> list[Outcome]:
        """Wait until every dispatched point has its outcome, and return all of them."""

    @abstractmethod
    def close(self) -> None:
        """End everything that the run started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self.drain()
        finally:
            self.close()
