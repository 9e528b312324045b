"""The trackers that vime brings: JSON lines, a callable, TensorBoard, wandb and MLflow.

Each puts an outcome at its own step, whenever it arrives; :mod:`vime.eval.outcomes.tracking`
calls them on a thread of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from vime.eval.appending import append_regular
from vime.eval.contracts import Outcome

#: What MLflow does not take in a metric's name.
_NO_MLFLOW_NAME = re.compile(r"[^\w./ :-]", re.ASCII)


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
            self._descriptor = append_regular(self.path, 0o644)
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


def curve_metrics(outcome: Outcome) -> dict[str, float]:
    """The outcome's metrics under the names of their curves.

    Those of a checkpoint that the caller gave have curves of their own: its ``eval/math`` is
    ``eval_base/math``, so that a baseline and step 0, which may have the same step, are never
    taken for each other.
    """
    if outcome.hf_dir is None:
        return dict(outcome.metrics)
    named = {}
    for name, value in outcome.metrics.items():
        head, slash, rest = name.partition("/")
        named[f"{head}_base{slash}{rest}"] = value
    return named


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
        for name, value in curve_metrics(outcome).items():
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
        step, metrics = outcome.rollout_id, curve_metrics(outcome)
        self._run.log({**metrics, "eval/step": step})
        news = {n: v for n, v in metrics.items() if step >= self._newest.get(n, step)}
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
        for names in ("eval/*", "eval_base/*"):
            self._run.define_metric(names, step_metric="eval/step", summary="none")

    def close(self) -> None:
        """Finish the run, if it is this tracker's own."""
        run, self._run = self._run, None
        if self._owned and run is not None:
            run.finish()


class MlflowTracker:
    """Logs to an MLflow run, each metric at the outcome's own step.

    MLflow keeps the value of the newest step as a metric's latest, in whatever order they come.
    Names have ``_`` where MLflow allows no such character.

    Args:
        run_id: an existing run to log to; it is left open by :meth:`close`. Without it a run is
            begun at the first outcome, and finished by :meth:`close`.
        tracking_uri: of the server or store; MLflow's own setting if absent.
        experiment: where a run is begun; made if need be.
        run_name: of a run that is begun.

    Raises:
        ValueError: the package ``mlflow`` is not installed.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "vime",
        run_name: str | None = None,
    ) -> None:
        _require("mlflow")
        self._run_id = run_id
        self._owned = run_id is None
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._client: Any = None

    def log(self, outcome: Outcome) -> None:
        """Log the outcome's metrics in one batch."""
        from mlflow.entities import Metric

        if self._client is None:
            self._begin()
        now_ms = int(time.time() * 1000)
        metrics = {"eval/step": float(outcome.rollout_id), **curve_metrics(outcome)}
        batch = [
            Metric(_NO_MLFLOW_NAME.sub("_", name), value, now_ms, outcome.rollout_id)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=batch)

    def _begin(self) -> None:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._tracking_uri)
        if self._run_id is None:
            found = client.get_experiment_by_name(self._experiment)
            experiment_id = (
                client.create_experiment(self._experiment) if found is None else found.experiment_id
            )
            run = client.create_run(experiment_id, run_name=self._run_name)
            self._run_id = run.info.run_id
        self._client = client

    def close(self) -> None:
        """Finish the run, if it is this tracker's own."""
        client, self._client = self._client, None
        if self._owned and client is not None:
            client.set_terminated(self._run_id)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"tracker {package!r}: the package is not installed; pip install 'vime[{package}]'"
        )
