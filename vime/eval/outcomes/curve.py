"""Draws a run's picture: the scores by step, and below them when each point was in flight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.fsm.lives import Life, lives_of, scores_in
from vime.fsm.read import TraceUnreadableError, read_trace

#: Okabe and Ito's colours, which people with any colour vision can tell apart.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PHASES = {
    "queued": ("#C9CDD3", "queued"),
    "exporting": ("#56B4E9", "export"),
    "pinning": ("#E69F00", "pin"),
    "running": ("#009E73", "evaluation"),
}
_HELD_UP = ("#D55E00", "training waits")
_INK, _FAINT, _GRID = "#22272E", "#6B7280", "#E5E7EB"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "svg.hashsalt": "vime",
}
_MAX_LANES = 40


def draw_curve(path: Path, run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write the picture as a PNG file.

    Args:
        path: the file, whatever its suffix.
        run_dir: the run's directory; the times in flight come from its trace, and are left out
            when there is none.
        summary: the contents of ``summary.json``.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = _lanes(run_dir)[-_MAX_LANES:]
    with mpl.rc_context(_STYLE):
        height = 3.4 + (0.9 + 0.22 * len(lanes) if lanes else 0.0)
        figure = Figure(figsize=(9.0, height), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        if lanes:
            ratios = [2.7, 0.5 + 0.22 * len(lanes)]
            top, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": ratios})
            _draw_lanes(below, lanes, summary)
        else:
            top = figure.subplots()
        _draw_scores(top, summary)
        figure.savefig(path, format="png", facecolor="white")


def _draw_scores(axes: Any, summary: Mapping[str, Any]) -> None:
    """Mean reward of each set by step, with its standard error; a cross for a skipped point."""
    points = summary["points"]
    done = [point for point in points if point["state"] == "done"]
    names = dict.fromkeys(name for point in done for name in scores_in(point["metrics"]))
    for name, colour in zip(names, _LINES * len(names), strict=False):
        mine = [point for point in done if name in scores_in(point["metrics"])]
        _draw_given(axes, name, [point for point in mine if point.get("hf_dir")], colour)
        mine = [point for point in mine if not point.get("hf_dir")]
        steps = [point["rollout_id"] for point in mine]
        values = [point["metrics"][f"eval/{name}"] for point in mine]
        errors = [point["metrics"].get(f"eval/{name}/stderr") or 0.0 for point in mine]
        low = [value - error for value, error in zip(values, errors, strict=True)]
        high = [value + error for value, error in zip(values, errors, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=5, label=name)
    skipped = [point["rollout_id"] for point in points if point["state"] == "skipped"]
    if skipped:
        at_bottom = axes.get_xaxis_transform()
        style = {"color": _HELD_UP[0], "linestyle": "none", "markersize": 7, "clip_on": False}
        axes.plot(skipped, [0.0] * len(skipped), marker="x", transform=at_bottom, **style)
    lowest, highest = axes.get_ylim()
    axes.set_ylim(min(lowest, -0.02), max(highest, 1.02) if highest <= 1.1 else highest)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    _head(axes, "Held-out score of the weights of each step")
    if len(names) > 1 or (names and skipped):
        axes.legend(frameon=False, loc="lower right")
    elif names:
        axes.set_ylabel(f"mean reward, {next(iter(names))}")


def _draw_given(axes: Any, name: str, points: list[dict[str, Any]], colour: str) -> None:
    """A hollow mark for each checkpoint that the caller gave: it is no point of training's line."""
    steps = [point["rollout_id"] for point in points]
    values = [point["metrics"][f"eval/{name}"] for point in points]
    style = {"markerfacecolor": "white", "markersize": 7, "zorder": 3}
    axes.plot(steps, values, linestyle="none", marker="D", color=colour, **style)


def _lanes(run_dir: Path) -> list[Life]:
    """The lives of the points, those of the runs that were continued too, by their dispatch."""
    try:
        return lives_of(read_trace(run_dir), machines=("point",)).of("point")
    except TraceUnreadableError:
        return []


def _draw_lanes(axes: Any, lanes: list[Life], summary: Mapping[str, Any]) -> None:
    """One bar a point from its dispatch to its outcome, and on it how long training waited."""
    start_ns = min(lane.start_ns for lane in lanes)
    seen: dict[str, tuple[str, str]] = {}
    for row, lane in enumerate(lanes):
        for span in lane.spans:
            colour, _ = seen[span.state] = _PHASES.get(span.state, (_FAINT, span.state))
            left_s = (span.start_ns - start_ns) / 1e9
            axes.barh(row, span.dwell_ns / 1e9, left=left_s, height=0.62, color=colour)
        begin_s = (lane.start_ns - start_ns) / 1e9
        axes.barh(row, _stall_s(lane), left=begin_s, height=0.2, color=_HELD_UP[0], align="center")
        if lane.state == "skipped":
            end_s = (lane.entered_ns - start_ns) / 1e9
            axes.annotate(
                f"× {lane.reason or 'skipped'}",
                (end_s, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=_HELD_UP[0],
                fontsize=8,
            )
    axes.set_yticks(range(len(lanes)), [_lane_name(lane) for lane in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds since the first dispatch")
    share = f"evaluation held training up for {summary['stall_share']:.2%} of its wall time"
    _head(axes, "Evaluations in flight, while training went on", share)
    _legend(axes, seen)


def _stall_s(lane: Life) -> float:
    stall_s = lane.detail.get("stall_s")
    return float(stall_s) if isinstance(stall_s, (int, float)) else 0.0


def _lane_name(lane: Life) -> str:
    return f"{'base' if lane.id.startswith('hf:') else 'step'} {_step(lane)}"


def _step(lane: Life) -> int | None:
    """The step of a point; a given checkpoint's id has a prefix (``hf:0``)."""
    digits = lane.id.rpartition(":")[2]
    return int(digits) if digits.lstrip("-").isdigit() else None


def _legend(axes: Any, seen: Mapping[str, tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    entries = [seen[state] for state in _PHASES if state in seen] + [_HELD_UP]
    axes.legend(
        handles=[Patch(color=colour, label=name) for colour, name in entries],
        frameon=False,
        fontsize=8,
        ncols=len(entries),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        handlelength=1.2,
    )


def _head(axes: Any, title: str, subtitle: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=22 if subtitle else 10)
    if subtitle:
        axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=9, color=_FAINT)
