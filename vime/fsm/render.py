"""Tables and timelines of a trace for the terminal (rich renderables)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from vime.fsm.lives import Life, Lives, scores_of
from vime.fsm.sentences import message_in
from vime.fsm.tables import NEW, POINT
from vime.fsm.text import clean, duration, headline

#: How a state is drawn: a block, a letter where blocks cannot be shown, a colour.
LOOKS: dict[str, tuple[str, str, str]] = {
    "queued": ("·", ".", "bright_black"),
    "exporting": ("░", "e", "cyan"),
    "pinning": ("▒", "p", "yellow"),
    "running": ("█", "#", "green"),
    "starting": ("░", "b", "cyan"),
    "ready": ("·", ".", "bright_black"),
    "serving": ("█", "#", "green"),
    "suspect": ("!", "!", "red"),
    "dead": ("x", "x", "red"),
    "restarting": ("~", "~", "magenta"),
    "lost": ("X", "X", "red"),
    "writing": ("░", "w", "cyan"),
    "whole": ("▒", "o", "yellow"),
    "verified": ("█", "#", "green"),
    "invalid": ("!", "!", "red"),
}
_SHORT = {"queued": "queue", "exporting": "export", "pinning": "pin", "running": "run"}
_UNKNOWN = ("?", "?", "white")
_END_STYLE = {"done": "green", "skipped": "red", "lost": "red", "invalid": "red"}
_LONGEST_LABEL = 24
_PADDING = (0, 2, 0, 0)
_FOLDED = 20
"""Columns that a text keeps before it is folded: a reason, a state, a weight version."""


def run_line(lives: Lives) -> Text:
    """One line on the whole trace: its runs, how many records, how long."""
    runs = ", ".join(clean(run, 60) for run in list(lives.runs)[:3]) or "no run"
    more = f" and {len(lives.runs) - 3} more" if len(lives.runs) > 3 else ""
    return Text(f"{runs}{more}: {lives.num_records} records over {duration(lives.now_ns)}")


def points_table(points: Iterable[Life], now_ns: int) -> Table:
    """One row a point: state, stays, score or reason of the skip, weight version."""
    table = _table("point", "state")
    for state in _living_states():
        table.add_column(_SHORT.get(state, state), justify="right", no_wrap=True)
    for name in ("score", "skipped", "weights"):
        table.add_column(name, overflow="fold")
    for point in points:
        table.add_row(
            _label(point),
            Text(clean(point.state), style=_END_STYLE.get(point.state, "")),
            *(_dwell(point, state, now_ns) for state in _living_states()),
            Text(score_text(point)),
            Text(clean(point.reason or "", 60) if point.state == "skipped" else ""),
            Text(version_text(point)),
        )
    return table


def messages(points: Iterable[Life]) -> Text:
    """One line for each skipped point that left a message."""
    lines = [
        f"{clean(point.id, 80)}: {clean(point.reason or '', 60)}: {clean(headline(message), 500)}"
        for point in points
        if point.state == "skipped" and (message := message_in(point.detail))
    ]
    return Text("\n".join(lines))


def engines_table(engines: Iterable[Life], now_ns: int) -> Table:
    """One row an engine: state, how often it was started and pinned, and its weights."""
    table = _table("engine", "state")
    for name in ("starts", "pins", "serving"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights", overflow="fold")
    table.add_column("last reason", overflow="fold")
    for engine in engines:
        states = [span.state for span in engine.all_spans(now_ns)]
        table.add_row(
            _label(engine),
            Text(clean(engine.state), style=_END_STYLE.get(engine.state, "")),
            str(states.count("starting")),
            str(states.count("pinning")),
            _dwell(engine, "serving", now_ns),
            Text(version_text(engine)),
            Text(clean(engine.reason or "", 200)),
        )
    return table


def timeline(lives: Sequence[Life], start_ns: int, end_ns: int, width: int, *, ascii: bool) -> Text:
    """Bars of the lives between two moments, to a terminal of ``width`` columns.

    Each column stands for an equal part of the time and shows the state that filled most of it.
    """
    labels = [clean(f"{life.machine} {life.id}", _LONGEST_LABEL) for life in lives]
    label_width = max(map(len, labels), default=0)
    bar_width = max(width - label_width - 3, 10)
    text = Text(no_wrap=True, overflow="crop")
    for life, label in zip(lives, labels, strict=True):
        text.append(f"{label:<{label_width}} ")
        _append_bar(text, life, start_ns, end_ns, bar_width, ascii)
        text.append("\n")
    end = duration(end_ns)
    text.append(f"{'':<{label_width}} {duration(start_ns):<{bar_width - len(end)}}{end}\n")
    _append_legend(text, lives, end_ns, width, ascii)
    return text


def _append_bar(
    text: Text, life: Life, start_ns: int, end_ns: int, width: int, ascii: bool
) -> None:
    cells = bar(life, start_ns, end_ns, width)
    mark = {"done": "+" if ascii else "✓", "skipped": "x" if ascii else "✗"}.get(life.state, "")
    last = max((i for i, state in enumerate(cells) if state), default=-1)
    for state in cells[: last + 1]:
        block, letter, style = LOOKS.get(state, _UNKNOWN) if state else (" ", " ", "")
        text.append(letter if ascii else block, style=style)
    text.append(mark, style=_END_STYLE.get(life.state, ""))


def bar(life: Life, start_ns: int, end_ns: int, width: int) -> list[str | None]:
    """The state that filled most of each of ``width`` equal parts of the time, or ``None``."""
    step = max(end_ns - start_ns, 1) / width
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for span in life.all_spans(end_ns):
        first = (max(span.start_ns, start_ns) - start_ns) / step
        last = (min(span.end_ns, end_ns) - start_ns) / step
        if last < first:
            continue
        for column in range(int(first), min(max(int(first) + 1, ceil(last)), width)):
            share = min(last, column + 1) - max(first, column)
            filled[column][span.state] = filled[column].get(span.state, 0.0) + share
    return [max(states, key=states.__getitem__) if states else None for states in filled]


def _append_legend(text: Text, lives: Iterable[Life], now_ns: int, width: int, ascii: bool) -> None:
    seen = dict.fromkeys(span.state for life in lives for span in life.all_spans(now_ns))
    used = 0
    for state in sorted(seen, key=lambda state: list(LOOKS).index(state) if state in LOOKS else 99):
        block, letter, style = LOOKS.get(state, _UNKNOWN)
        name = clean(state)
        if used and used + 2 + len(name) > width:
            text.append("\n")
            used = 0
        text.append(letter if ascii else block, style=style)
        text.append(f" {name}  ")
        used += 4 + len(name)


def score_text(point: Life) -> str:
    """The scores of a finished point: the number alone, or one for each eval set."""
    scores = scores_of(point)
    if len(scores) == 1:
        return f"{next(iter(scores.values())):.4g}"
    return "  ".join(f"{clean(name)} {score:.4g}" for name, score in scores.items())


def version_text(life: Life) -> str:
    """The weight version, without the run's name, which heads the page, and the point's own."""
    version = (life.weight_version or "").removeprefix(f"{life.key[0]}:")
    return clean(version.removeprefix(f"{life.id}:") if life.machine == "point" else version, 80)


def _living_states() -> list[str]:
    return [state for state in POINT.states if state != NEW and state not in POINT.terminal]


def least_width(table: Table) -> int:
    """The columns that ``table`` needs, lest a number or a name in it be cut."""
    needed = 0
    for column in table.columns:
        texts = (column.header, *column.cells)
        longest = max(cell_len(text if isinstance(text, str) else str(text)) for text in texts)
        needed += (longest if column.no_wrap else min(longest, _FOLDED)) + _PADDING[1]
    return needed


def plain_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> Table:
    """A table of texts; the columns of ``right`` are numbers."""
    table = Table(box=None, padding=_PADDING, header_style="bold underline")
    numbers = set(right)
    for i, head in enumerate(heads):
        if i in numbers:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=_PADDING, header_style="bold underline")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _label(life: Life) -> Text:
    return Text(
        clean(life.id, 80)
        + (f" (life {life.attempt})" if life.attempt and life.machine == "point" else "")
    )


def _dwell(life: Life, state: str, now_ns: int) -> Text:
    dwell_ns = life.dwell_ns(state, now_ns)
    return Text("" if dwell_ns is None else duration(dwell_ns))
