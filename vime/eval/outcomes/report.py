"""The report on a finished run: summary, picture, final table, and the link ``runs/latest``."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from vime.eval.contracts import Outcome
from vime.fsm.lives import scores_in
from vime.fsm.text import clean, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

log = logging.getLogger("vime")

SUMMARY = "summary.json"
CURVE = "curve.png"
_RUNS, _LATEST = "runs", "latest"


def summarize(
    run_id: str, outcomes: Sequence[Outcome], train_steps: int, wall_s: float
) -> dict[str, Any]:
    """The contents of ``summary.json``.

    Args:
        run_id: the run.
        outcomes: of all its points.
        train_steps: how many steps were trained.
        wall_s: seconds from the first training step's beginning to the last one's end, waits
            for evaluation included.

    Returns:
        ``run_id``; ``points``, one dictionary an outcome in the order of their steps;
        ``train_steps``; ``wall_s``; ``stall_share``, the part of ``wall_s`` for which training
        waited in ``dispatch``, from 0 to 1.

    Raises:
        ValueError: ``wall_s`` is not positive.
    """
    if not wall_s > 0:
        raise ValueError(f"wall_s={wall_s!r}: expected the seconds of training, above 0")
    stall_s = sum(outcome.stall_s for outcome in outcomes)
    return {
        "run_id": run_id,
        "points": [_point(o) for o in sorted(outcomes, key=lambda o: o.rollout_id)],
        "train_steps": train_steps,
        "wall_s": wall_s,
        "stall_share": min(stall_s / wall_s, 1.0),
    }


def _point(outcome: Outcome) -> dict[str, Any]:
    return {
        "rollout_id": outcome.rollout_id,
        "state": outcome.state,
        "reason": outcome.reason,
        "weight_version": outcome.weight_version,
        "metrics": dict(outcome.metrics),
        "lag_steps": outcome.lag_steps,
        "duration_s": outcome.duration_s,
        "stall_s": outcome.stall_s,
        "hf_dir": outcome.hf_dir,
        "canary": outcome.canary,
    }


def write_report(
    run_dir: Path | str,
    run_id: str,
    outcomes: Sequence[Outcome],
    train_steps: int,
    wall_s: float,
) -> dict[str, Any]:
    """Write ``summary.json`` and ``curve.png`` into the run's directory, and link it as latest.

    Args:
        run_dir: the run's directory; the curve is drawn with the help of its trace.
        run_id, outcomes, train_steps, wall_s: see :func:`summarize`.

    Returns:
        The contents of ``summary.json``.

    Raises:
        OSError: a file cannot be written.
        ValueError: ``wall_s`` is not positive.
    """
    from vime.eval.outcomes.curve import draw_curve

    run_dir = Path(run_dir)
    summary = summarize(run_id, outcomes, train_steps, wall_s)
    text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    _replace(run_dir / SUMMARY, lambda path: path.write_bytes(text))
    _replace(run_dir / CURVE, lambda path: draw_curve(path, run_dir, summary))
    link_latest(run_dir)
    return summary


def _replace(path: Path, write: Any) -> None:
    """Write beside ``path`` and rename, so that a reader sees a whole file or the one before."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def link_latest(run_dir: Path | str) -> None:
    """Point the link ``latest`` beside a run's directory at it, in one atomic step.

    Only below a directory that is called ``runs``: elsewhere the place is the user's own. What
    is called ``latest`` and is no link stays as it is.
    """
    run_dir = Path(run_dir).absolute()
    link = run_dir.parent / _LATEST
    if run_dir.parent.name != _RUNS or (link.exists() and not link.is_symlink()):
        return
    draft = link.with_name(f".{_LATEST}.{secrets.token_hex(4)}")
    try:
        draft.symlink_to(run_dir.name, target_is_directory=True)
        draft.replace(link)
    except OSError as error:  # some file systems have no links: the run is whole without it
        log.warning("%s: cannot be linked to %s: %s", link, run_dir.name, error.strerror)
        draft.unlink(missing_ok=True)


def print_summary(
    summary: Mapping[str, Any], run_dir: Path | str, console: Console | None = None
) -> None:
    """Print the final table, what evaluation cost training, and where the files are.

    Args:
        summary: as :func:`write_report` returned it.
        run_dir: the run's directory.
        console: where to; the standard output if absent.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("step", "score", "lag in steps", "duration", "stall"):
        table.add_column(name, justify="right", no_wrap=name != "score")
    for point in summary["points"]:
        table.add_row(
            f"{point['rollout_id']}{' (base)' if point['hf_dir'] else ''}",
            _score_text(point),
            str(point["lag_steps"]) if point["state"] == "done" else "",
            duration(point["duration_s"] * 1e9),
            duration(point["stall_s"] * 1e9),
        )
    stall_s = sum(point["stall_s"] for point in summary["points"])
    console.print(table)
    console.print(
        Text.assemble(
            "\nTraining was held up by evaluation for ",
            (f"{summary['stall_share']:.2%}", "bold"),
            f" of its wall time: {duration(stall_s * 1e9)} of {duration(summary['wall_s'] * 1e9)}"
            f" ({summary['train_steps']} steps).",
        ),
        soft_wrap=True,
    )
    console.print(Text(f"summary  {Path(run_dir) / SUMMARY}"), soft_wrap=True)
    console.print(Text(f"curve    {Path(run_dir) / CURVE}"), soft_wrap=True)


def _score_text(point: Mapping[str, Any]) -> Text:
    from rich.text import Text

    if point["state"] != "done":
        return Text(f"skipped: {clean(point['reason'] or '', 60)}", style="red")
    found = scores_in(point["metrics"])
    if len(found) == 1:
        return Text(f"{next(iter(found.values())):.3f}")
    return Text("  ".join(f"{clean(name, 40)} {value:.3f}" for name, value in found.items()))
