"""Where outcomes go: to several trackers at once, none of which holds a run up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vime.eval.contracts import Outcome, Tracker
from vime.eval.outcomes.trackers import (
    CallableTracker,
    JsonLinesTracker,
    MlflowTracker,
    TensorBoardTracker,
    WandbTracker,
)

__all__ = [
    "CallableTracker",
    "JsonLinesTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "Trackers",
    "WandbTracker",
    "as_tracker",
]

log = logging.getLogger("vime")

#: A tracker that works on one outcome for longer than this is reported once, in seconds.
SLOW_TRACKER_S = 30.0
#: How long the end of a run still waits for a tracker that an earlier wait was in vain for.
LATE_TRACKER_S = 2.0


def as_tracker(obj: Any, run_dir: Path | None = None) -> Tracker:
    """What a user passed as a tracker, as a :class:`~vime.eval.contracts.Tracker`.

    Args:
        obj: a tracker (``log``, and ``close`` if it holds something), a callable that takes an
            outcome, or one of the names ``jsonl``, ``tensorboard``, ``wandb`` and ``mlflow``.
        run_dir: where the named ones write; the working directory if absent.

    Raises:
        ValueError: none of these, or the named package is not installed.
    """
    directory = Path() if run_dir is None else run_dir
    named: dict[str, Callable[[], Tracker]] = {
        "jsonl": lambda: JsonLinesTracker(directory / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
        "wandb": lambda: WandbTracker(dir=str(directory)),
        "mlflow": lambda: MlflowTracker(run_name=directory.name or None),
    }
    if isinstance(obj, str):
        if obj not in named:
            raise ValueError(f"tracker {obj!r}: expected one of {', '.join(named)}")
        return named[obj]()
    if isinstance(obj, Tracker) and not isinstance(obj, type):
        return obj
    if callable(log_it := getattr(obj, "log", None)) and not isinstance(obj, type):
        return CallableTracker(log_it)
    if callable(obj) and not isinstance(obj, type):
        return CallableTracker(obj)
    raise ValueError(
        f"tracker {obj!r}: expected an object with log(outcome), a callable that takes an outcome, "
        f"or one of {', '.join(named)}"
    )


class _Lane:
    """One tracker on a daemon thread of its own, with a queue in front of it.

    Args:
        tracker: the tracker.
        name: of it, in messages.
        then: told of each outcome that the tracker has taken, or failed at.
    """

    def __init__(
        self, tracker: Tracker, name: str, then: Callable[[Outcome], None] | None = None
    ) -> None:
        self.tracker = tracker
        self.name = f"{type(tracker).__name__}[{name}]"
        self._then = then
        self.failures = 0
        self._queue: queue.SimpleQueue[Outcome | threading.Event | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._busy_since: float | None = None
        self._slow_reported = False
        self.is_late = False  # somebody has waited for it in vain
        self.thread = threading.Thread(target=self._run, name=f"vime-{self.name}", daemon=True)
        self.thread.start()

    @property
    def pending(self) -> int:
        """Outcomes that the tracker has not taken yet, the one in hand included."""
        return self._pending

    def put(self, outcome: Outcome) -> None:
        self._report_if_slow()
        with self._lock:
            self._pending += 1
        self._queue.put(outcome)

    def mark(self) -> threading.Event:
        """An event that is set once everything put before it has been logged."""
        reached = threading.Event()
        self._queue.put(reached)
        return reached

    def stop(self) -> None:
        self._queue.put(None)

    def patience(self, deadline: float) -> float:
        """How long to wait for it, in seconds; a blocked one holds the end of a run up once."""
        left = max(deadline - time.monotonic(), 0.0)
        return min(left, LATE_TRACKER_S) if self.is_late else left

    def _report_if_slow(self) -> None:
        since = self._busy_since
        if since is None or self._slow_reported or time.monotonic() - since < SLOW_TRACKER_S:
            return
        self._slow_reported = True
        log.warning(
            "tracker %s has worked on one outcome for more than %.0f s; evaluation goes on, and "
            "%d outcomes wait for it",
            self.name,
            SLOW_TRACKER_S,
            self._pending,
        )

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._busy_since = time.monotonic()
            self._call(lambda item=item: self.tracker.log(item), f"step {item.rollout_id}")  # type: ignore[misc]
            self._busy_since = None
            if self._then is not None:
                self._then(item)
            with self._lock:
                self._pending -= 1
        self._call(self.tracker.close, "closing")

    def _call(self, function: Callable[[], None], what: str) -> None:
        try:
            function()
        except BaseException as error:  # on this thread nothing but a tracker can raise
            self.failures += 1
            if self.failures == 1:  # a full disk would say the same at every outcome
                log.warning(
                    "tracker %s failed at %s: %s: %s; evaluation goes on, and its next failures "
                    "are only counted",
                    self.name,
                    what,
                    type(error).__name__,
                    error,
                    exc_info=error,
                )


class Trackers:
    """Sends each outcome to every tracker; one that fails or blocks slows nobody.

    Each tracker has a daemon thread and a queue. Its first failure is logged, the number of them
    at the end; so are the outcomes that a blocked one had not taken when time was up.

    Args:
        trackers: may be empty.
        journal: takes each outcome before any of the others hears of it, so that what it has is
            all that they may have, however suddenly the run ends.
    """

    def __init__(self, trackers: Iterable[Tracker] = (), journal: Tracker | None = None) -> None:
        self._lanes = [_Lane(tracker, str(index)) for index, tracker in enumerate(trackers)]
        self._journal = None if journal is None else _Lane(journal, "journal", self._put)
        self._closed = False

    def log(self, outcome: Outcome) -> None:
        """Hand the outcome to every tracker's thread; never waits, never raises for a tracker.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        if self._closed:
            raise RuntimeError(f"outcome of step {outcome.rollout_id} came after Trackers.close()")
        if self._journal is not None:
            self._journal.put(outcome)
        else:
            self._put(outcome)

    def _put(self, outcome: Outcome) -> None:
        for lane in self._lanes:
            lane.put(outcome)

    def flush(self, timeout: float) -> bool:
        """Wait until every outcome so far has been taken by every tracker.

        Args:
            timeout: in seconds, for all of them together.

        Returns:
            Whether all were in time; those that were not are logged by name.
        """
        deadline = time.monotonic() + timeout
        late = [
            lane
            for lanes in self._in_order()
            for lane, mark in [(lane, lane.mark()) for lane in lanes if lane.thread.is_alive()]
            if not mark.wait(lane.patience(deadline))
        ]
        for lane in late:
            lane.is_late = True
            log.warning(
                "tracker %s is not done after %.4g s: %d outcomes wait for it",
                lane.name,
                timeout,
                lane.pending,
            )
        return not late

    def close(self, timeout: float) -> None:
        """Let every tracker finish and close; a second call does nothing.

        Args:
            timeout: in seconds, for all of them together; what is not done by then ends with the
                process, and is logged.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        for lanes in self._in_order():
            self._end(lanes, deadline, timeout)

    def _in_order(self) -> list[list[_Lane]]:
        """The journal, from which the others have what they hear, and then the others."""
        return [self._lanes] if self._journal is None else [[self._journal], self._lanes]

    def _end(self, lanes: list[_Lane], deadline: float, timeout: float) -> None:
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.thread.join(lane.patience(deadline))
            if lane.thread.is_alive():
                log.warning(
                    "tracker %s did not close within %.4g s: %d outcomes were not recorded by it",
                    lane.name,
                    timeout,
                    lane.pending,
                )
            elif lane.failures:
                log.warning("tracker %s failed %d times", lane.name, lane.failures)
