"""Shows a report: a table for the terminal, JSON for machines, a picture for documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bench.figures import Figure, Report
from bench.machine import summary

_BAR, _RANGE, _LATE = "#3465a4", "#9fb8d9", "#cc4125"
_FILE_WIDTH = 120
_LOG_FROM = 30.0
"""Figures whose medians are further apart than this share a logarithmic axis."""


def print_report(report: Report, machine: dict[str, Any]) -> None:
    """Print medians, spread and ratios, and what machine it was."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:  # a file has no edge to cut a table at
        console = Console(soft_wrap=True, highlight=False, width=_FILE_WIDTH)
    console.print(f"[bold]{report.bench}[/bold]  {summary(machine)}", markup=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for heading in ("p50", "spread", "p90", "p99", "max", "unit", "n"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for name, figure in report.figures.items():
        table.add_row(name, *_cells(figure))
    console.print(table)
    for name, ratio in report.ratios.items():
        console.print(f"{name} = [bold]{number(ratio)}[/bold]")
    for note in report.notes:
        console.print(f"[dim]{note}[/dim]")


def _cells(figure: Figure) -> list[str]:
    values = [figure.at(share) for share in (0.5, 0.9, 0.99, 1.0)]
    p50, *rest = map(number, values)
    return [p50, f"± {figure.spread / 2:.0%}", *rest, figure.unit, str(len(figure.samples))]


def number(value: float) -> str:
    """Three significant digits, and no exponent for what people read."""
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def write_json(path: Path, report: Report, machine: dict[str, Any]) -> None:
    """Write the report, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = orjson.dumps(
        report.as_json(machine), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_picture(path: Path, report: Report, machine: dict[str, Any]) -> None:
    """Draw every figure: one panel a unit, with median, middle half, range and 99th percentile.

    Raises:
        OSError: it cannot be written.
        ValueError: the file's suffix names no kind of picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    units = list(dict.fromkeys(figure.unit for figure in report.figures.values()))
    rows = {unit: [n for n, f in report.figures.items() if f.unit == unit] for unit in units}
    heights = [len(names) + 1 for names in rows.values()]
    canvas = Canvas(figsize=(9, 1.2 + 0.42 * sum(heights)), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(len(units), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, unit in zip(panels, units, strict=True):
        _draw_panel(panel, unit, [(name, report.figures[name]) for name in rows[unit]])
    ratios = ", ".join(f"{name} = {number(ratio)}" for name, ratio in report.ratios.items())
    canvas.suptitle(f"{report.bench}   {ratios}\n{summary(machine)}", fontsize=8, wrap=True)
    canvas.savefig(path, dpi=150)


def _draw_panel(panel: Any, unit: str, figures: list[tuple[str, Figure]]) -> None:
    for row, (_, figure) in enumerate(figures):
        panel.plot([min(figure.samples), max(figure.samples)], [row, row], color=_RANGE, lw=2)
        panel.plot([figure.at(0.25), figure.at(0.75)], [row, row], color=_BAR, lw=8)
        panel.plot(figure.p50, row, marker="|", color="black", markersize=14)
        panel.plot(figure.at(0.99), row, marker="d", color=_LATE, markersize=5)
        panel.annotate(
            f" {number(figure.p50)}", (figure.p50, row), (0, 9), textcoords="offset points",
            fontsize=7, ha="center",
        )  # fmt: skip
    medians = [figure.p50 for _, figure in figures]
    if min(medians) > 0 and max(medians) / min(medians) > _LOG_FROM:
        panel.set_xscale("log")
    else:
        panel.set_xlim(left=min(0.0, *(min(figure.samples) for _, figure in figures)))
    panel.set_yticks(range(len(figures)), [name for name, _ in figures])
    panel.set_ylim(len(figures) - 0.3, -0.8)
    panel.set_xlabel(unit)
    panel.grid(axis="x", alpha=0.3)
