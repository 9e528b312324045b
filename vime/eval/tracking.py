"""Where outcomes go: JSON lines, TensorBoard, wandb or a callable, none of which holds a run up."""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from vime.eval.contracts import Outcome, Tracker

log = logging.getLogger("vime")

#: A tracker that works on one outcome for longer than this is reported once, in seconds.
SLOW_TRACKER_S = 30.0


class JsonLinesTracker:
    """Appends one JSON object an outcome, with every field of :class:`Outcome`.

    One ``write`` an outcome, so that a killed run tears the last line at most; the next run
    starts a line of its own. Numbers that JSON lacks (NaN) become ``null``.

    Args:
        path: the file; made with its directory at the first outcome.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def log(self, outcome: Outcome) -> None:
        """Append the outcome.

        Raises:
            OSError: it cannot be written.
        """
        line = orjson.dumps(asdict(outcome), option=orjson.OPT_APPEND_NEWLINE)
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            if _ends_torn(self._descriptor):
                line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _ends_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


class CallableTracker:
    """Calls ``function(outcome)`` for each outcome.

    Args:
        function: called on a worker thread, one call at a time.
    """

    def __init__(self, function: Callable[[Outcome], Any]) -> None:
        self._function = function

    def log(self, outcome: Outcome) -> None:
        """Call the function; what it raises is the caller's."""
        self._function(outcome)

    def close(self) -> None:
        """Nothing is held."""


class TensorBoardTracker:
    """Writes each metric as a TensorBoard scalar at the outcome's own step.

    Args:
        directory: of the event files.

    Raises:
        ValueError: the package ``tensorboard`` is not installed.
    """

    def __init__(self, directory: Path) -> None:
        _require("tensorboard")
        self._directory = Path(directory)
        self._writer: Any = None

    def log(self, outcome: Outcome) -> None:
        """Write and flush the outcome's metrics."""
        if self._writer is None:
            from tensorboard.summary import Writer

            self._writer = Writer(str(self._directory))
        for name, value in outcome.metrics.items():
            self._writer.add_scalar(name, value, outcome.rollout_id)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbTracker:
    """Logs to a wandb run against ``eval/step``, never against wandb's own global step.

    A result that arrives late still lands at its own step, and the run's summary holds, for
    each metric, the value of the newest step.

    Args:
        run: an existing wandb run to log to; it is left open by :meth:`close`. Each outcome
            advances its global step, and wandb drops what training then logs with a smaller
            ``step=``: share a run only when training logs without ``step=``.
        init: arguments of ``wandb.init`` (``project``, ``group``, ``dir``, ``mode`` …) for a
            run of its own, begun at the first outcome and finished by :meth:`close`.

    Raises:
        ValueError: the package ``wandb`` is not installed, or both arguments are given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        _require("wandb")
        if run is not None and init:
            raise ValueError(
                f"WandbTracker got both run={run!r} and {', '.join(init)}: wandb.init arguments "
                "only serve to begin a run; drop one of the two"
            )
        self._init = init
        self._run = run
        self._owned = run is None
        self._newest: dict[str, int] = {}

    def log(self, outcome: Outcome) -> None:
        """Log the outcome's metrics at its own step."""
        if not self._newest:
            self._begin()
        self._run.log({**outcome.metrics, "eval/step": outcome.rollout_id})
        step = outcome.rollout_id
        news = {n: v for n, v in outcome.metrics.items() if step >= self._newest.get(n, step)}
        if step >= self._newest.get("eval/step", step):
            news["eval/step"] = step
        self._newest |= dict.fromkeys(news, step)
        self._run.summary.update(news)

    def _begin(self) -> None:
        if self._run is None:
            import wandb

            # By default wandb.init would hand back the run that training began.
            self._run = wandb.init(**{"reinit": "create_new", **self._init})
        # wandb's own summary is the value that came last, not that of the newest step.
        self._run.define_metric("eval/step", summary="none")
        self._run.define_metric("eval/*", step_metric="eval/step", summary="none")

    def close(self) -> None:
        """Finish the run, if it is this tracker's own."""
        run, self._run = self._run, None
        if self._owned and run is not None:
            run.finish()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"tracker {package!r}: the package is not installed; pip install 'vime[{package}]'"
        )


def as_tracker(obj: Any, run_dir: Path | None = None) -> Tracker:
    """What a user passed as a tracker, as a :class:`~vime.eval.contracts.Tracker`.

    Args:
        obj: a tracker (``log`` and ``close``), a callable that takes an outcome, or one of the
            names ``jsonl``, ``tensorboard`` and ``wandb``.
        run_dir: where the named ones write; the working directory if absent.

    Raises:
        ValueError: none of these, or the named package is not installed.
    """
    directory = Path() if run_dir is None else run_dir
    named: dict[str, Callable[[], Tracker]] = {
        "jsonl": lambda: JsonLinesTracker(directory / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
        "wandb": lambda: WandbTracker(dir=str(directory)),
    }
    if isinstance(obj, str):
        if obj not in named:
            raise ValueError(f"tracker {obj!r}: expected one of {', '.join(named)}")
        return named[obj]()
    if isinstance(obj, Tracker) and not isinstance(obj, type):
        return obj
    if callable(obj) and not isinstance(obj, type):
        return CallableTracker(obj)
    raise ValueError(
        f"tracker {obj!r}: expected an object with log(outcome) and close(), a callable that takes "
        f"an outcome, or one of {', '.join(named)}"
    )


class _Lane:
    """One tracker on a daemon thread of its own, with a queue in front of it."""

    def __init__(self, tracker: Tracker, index: int) -> None:
        self.tracker = tracker
        self.name = f"{type(tracker).__name__}[{index}]"
        self.failures = 0
        self._queue: queue.SimpleQueue[Outcome | threading.Event | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._busy_since: float | None = None
        self._slow_reported = False
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
    """

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._lanes = [_Lane(tracker, index) for index, tracker in enumerate(trackers)]
        self._closed = False

    def log(self, outcome: Outcome) -> None:
        """Hand the outcome to every tracker's thread; never waits, never raises for a tracker.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        if self._closed:
            raise RuntimeError(f"outcome of step {outcome.rollout_id} came after Trackers.close()")
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
        marks = [(lane, lane.mark()) for lane in self._lanes if lane.thread.is_alive()]
        late = [
            lane for lane, mark in marks if not mark.wait(max(deadline - time.monotonic(), 0.0))
        ]
        for lane in late:
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
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.thread.join(max(deadline - time.monotonic(), 0.0))
            if lane.thread.is_alive():
                log.warning(
                    "tracker %s did not close within %.4g s: %d outcomes were not recorded by it",
                    lane.name,
                    timeout,
                    lane.pending,
                )
            elif lane.failures:
                log.warning("tracker %s failed %d times", lane.name, lane.failures)
