"""Names of metrics: what vime says of every point, which no eval set and no backend may say."""

from __future__ import annotations

from typing import Any

#: Metrics of the point itself. ``eval/step`` places all the others in wandb.
POINT_METRICS = frozenset(
    f"eval/{name}"
    for name in (
        "step", "lag_steps", "duration_seconds", "stall_seconds", "export_time_seconds",
        "pin_seconds", "pin_canary", "pin_unchanged", "transfer_seconds", "transfer_bytes",
    )
)  # fmt: skip
_SKIPPED = "eval/skipped_"


def metric_name(name: Any) -> str:
    """``name`` as it is reported: under ``eval/``, unless it says itself where it belongs.

    Raises:
        ValueError: it is no text that trackers could take, or belongs to vime.
    """
    if not isinstance(name, str):
        raise ValueError(f"the metric's name {name!r:.100} is no text")
    metric = name if "/" in name else f"eval/{name}"
    problem = name_problem(metric)
    if problem:
        raise ValueError(f"the metric's name {name!r:.100} {problem}")
    return metric


def set_name_problem(name: str) -> str | None:
    """Why an eval set cannot have this name, as the end of a sentence; ``None`` if it can."""
    return name_problem(f"eval/{name}") if name.strip() else "is empty; expected a name"


def name_problem(metric: str) -> str | None:
    """Why nobody but vime may report ``metric``; ``None`` if anybody may."""
    if metric in POINT_METRICS or metric.startswith(_SKIPPED):
        return f"is vime's own ({metric} is reported for each point); choose another"
    if not metric.isprintable():  # line breaks, and surrogates that UTF-8 has no bytes for
        return "has characters that cannot be printed"
    return None
