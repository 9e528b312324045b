"""Shared engines: the caller's own blocking eval, reported like any other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from vime.eval.contracts import EvalOutput
from vime.eval.metric_names import metric_name
from vime.rollout.base_types import RolloutFnEvalOutput


def shared_output(returned: Any) -> EvalOutput:
    """What ``shared_eval`` returned, as an :class:`EvalOutput`.

    Args:
        returned: ``None``, a mapping of metric names to numbers, an ``EvalOutput``, or a
            ``RolloutFnEvalOutput``, whose metrics are those that a backend's would have
            (:func:`~vime.eval.runner.backend.backend_metrics`). A name without a ``/`` is put
            under ``eval/``.

    Raises:
        TypeError: it is none of these, or a metric is no finite number.
        ValueError: a name is none that may be reported, or an output has no score in it.
    """
    if returned is None:
        return EvalOutput({})
    if isinstance(returned, EvalOutput):
        return returned
    if isinstance(returned, RolloutFnEvalOutput):
        from vime.eval.runner.backend import backend_metrics

        return EvalOutput(backend_metrics("shared_eval", returned))
    if isinstance(returned, Mapping):
        return EvalOutput(_named(returned))
    raise TypeError(
        f"shared_eval returned {type(returned).__name__}: expected a dictionary of metrics, a "
        "RolloutFnEvalOutput or None"
    )


def _named(metrics: Mapping[str, Any]) -> dict[str, float]:
    for name, value in metrics.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise TypeError(f"shared_eval: metric {name!r} is {value!r}: expected a finite number")
    return {metric_name(name): float(value) for name, value in metrics.items()}
