"""A live view of a run: training, every eval point, every engine; plain lines without a terminal.

    trace file ──▶ LiveState ──▶ draw()        on a terminal, a few times a second
    training() ──▶           ──▶ news_line()   elsewhere, a line a change

The view reads the trace file from a thread of its own, as ``vime trace follow`` does, so that the
dispatcher's thread does nothing for it and nothing is missed that happened before it began.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from vime.fsm.follow import Follower
from vime.fsm.lives import Life, Lives, metrics_of
from vime.fsm.read import TraceUnreadableError
from vime.fsm.record import Record
from vime.fsm.render import LOOKS, score_text, version_text
from vime.fsm.sentences import sentence
from vime.fsm.text import clean, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

MAX_POINTS_SHOWN = 12
_REFRESH_S = 0.25
_JOIN_S = 5.0

_END_LOOKS = {"done": ("✓", "green"), "skipped": ("✗", "red"), "stopped": ("■", "bright_black")}

#: What plain lines tell of engines; pins come and go with each point and would drown the rest.
_NEWS_OF_ENGINES = {"start", "ready", "suspect", "kill", "restart", "abandon"}


@dataclass(frozen=True)
class Training:
    """Where training stands.

    Attributes:
        step: finished steps.
        num_steps: of the whole run.
        elapsed_s: since the first step began.
        facts: further numbers to show (a reward, a loss), by name.
    """

    step: int
    num_steps: int
    elapsed_s: float
    facts: dict[str, float] = field(default_factory=dict)


class LiveState:
    """What is known of a run under way: no drawing, no threads, no clock of its own.

    Attributes:
        lives: the points, engines and snapshots that the trace has told of.
        training: where training stands; ``None`` when nobody says so.
    """

    def __init__(self) -> None:
        self.lives = Lives()
        self.training: Training | None = None
        self._ahead_ns = 0

    def apply(self, record: Record) -> Life:
        """Take in one record; returns the life that it belongs to."""
        life, _ = self.lives.add(record)
        self._ahead_ns = self.lives.clock.at(record) - record.mono_ns
        return life

    def now_ns(self, mono_ns: int) -> int:
        """The trace's own time (see :class:`vime.fsm.lives.TraceClock`) at a monotonic moment."""
        return max(mono_ns + self._ahead_ns, self.lives.now_ns)

    @property
    def points(self) -> list[Life]:
        """The eval points in the order of their dispatch."""
        return self.lives.of("point")

    @property
    def engines(self) -> list[Life]:
        """The engines by name."""
        return sorted(self.lives.of("engine"), key=lambda life: life.id)


def news_line(life: Life, record: Record) -> str | None:
    """What a record tells a reader of plain lines; ``None`` when it is not worth a line."""
    if record.machine == "snapshot":
        return None
    if record.machine == "engine" and not record.rejected:
        return sentence(record) if record.trigger in _NEWS_OF_ENGINES else None
    if record.machine == "point" and record.trigger == "finish" and not record.rejected:
        facts = [f"point {clean(life.id, 80)} done: {score_text(life) or 'no score'}"]
        facts += [f"{value} {name}" for name, value in zip(_COSTS, _costs(life), strict=True)]
        return ", ".join(facts)
    return sentence(record)


_COSTS = ("in flight", "steps behind training", "of training's time")


def _costs(life: Life) -> tuple[str, str, str]:
    """How long a finished point took, how far training went meanwhile, how long it waited."""
    metrics = metrics_of(life)
    return (
        duration(metrics.get("eval/duration_seconds", 0.0) * 1e9),
        f"{metrics.get('eval/lag_steps', 0.0):.0f}",
        duration(metrics.get("eval/stall_seconds", 0.0) * 1e9),
    )


def progress_line(training: Training) -> str:
    """Where training stands, in one line."""
    facts = "".join(f", {clean(name, 40)} {value:.3f}" for name, value in training.facts.items())
    return f"training step {training.step} of {training.num_steps}{facts}"


# -- drawing -----------------------------------------------------------------------------------


def draw(state: LiveState, now_ns: int, title: str = "vime") -> RenderableType:
    """The whole view, for a terminal; ``now_ns`` as :meth:`LiveState.now_ns` gives it."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(clean(title, 200), style="bold")]
    if state.training is not None:
        parts += [Text(), _draw_training(state.training)]
    if state.engines:
        parts += [Text(), _draw_engines(state.engines, now_ns)]
    if state.points:
        parts += [Text(), _draw_points(state.points, now_ns)]
    return Group(*parts)


def _draw_training(training: Training) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    speed = training.step / training.elapsed_s if training.elapsed_s else 0.0
    facts = [f"step {training.step}/{training.num_steps}", f"{speed:.1f} steps/s"]
    facts += [f"{clean(name, 40)} {value:.3f}" for name, value in training.facts.items()]
    bar = ProgressBar(total=max(training.num_steps, 1), completed=training.step, width=30)
    line.add_row(Text("training", style="bold"), bar, *(Text(fact) for fact in facts))
    return line


def _draw_engines(engines: Sequence[Life], now_ns: int) -> Table:
    from rich.text import Text

    table = _table("engine", "state", "for", "weights", "last reason")
    for engine in engines:
        told = engine.reason if engine.state in ("suspect", "dead", "lost") else None
        table.add_row(
            Text(clean(engine.id, 80)),
            _state(engine),
            duration(now_ns - engine.entered_ns),
            Text(version_text(engine)),
            Text(clean(told or "", 60)),
        )
    return table


def _draw_points(points: Sequence[Life], now_ns: int) -> Table:
    from rich.text import Text

    table = _table("point", "state", "for", "score", "lag", "stall", numbers=(2, 3, 4, 5))
    hidden = len(points) - MAX_POINTS_SHOWN
    if hidden > 0:
        table.add_row("…", f"{hidden} earlier")
    for point in points[-MAX_POINTS_SHOWN:]:
        end_ns = point.entered_ns if point.finished else now_ns
        scored = point.state == "done"
        _, lag, stall = _costs(point) if scored else ("", "", "")
        table.add_row(
            Text(clean(point.id, 80)),
            _state(point),
            duration(end_ns - point.start_ns),
            Text(score_text(point) if scored else clean(point.reason or "", 60)),
            lag,
            stall,
        )
    return table


def _state(life: Life) -> Text:
    from rich.text import Text

    if life.state in _END_LOOKS:
        mark, style = _END_LOOKS[life.state]
    else:
        mark, _, style = LOOKS.get(life.state, ("?", "?", ""))
    return Text(f"{mark} {clean(life.state, 40)}", style=style)


def _table(*heads: str, numbers: Sequence[int] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i in numbers else "left", no_wrap=True)
    return table


# -- the view ----------------------------------------------------------------------------------


def make_console(**settings: Any) -> Console:
    """A console of rich's that says when its reader has left, instead of ending the process.

    Args:
        settings: arguments of ``rich.console.Console``.
    """
    from rich.console import Console

    class Frank(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader of the output has left")

    return Frank(**settings)


class _Screen(Protocol):
    """Where the view appears."""

    def news(self, state: LiveState, life: Life, record: Record) -> None:
        """One record was taken in."""

    def refresh(self, state: LiveState, *, final: bool) -> None:
        """All records of this round were taken in."""


class _Drawn:
    """A terminal: the whole view is drawn anew."""

    def __init__(self, console: Console, title: str, mono_ns: Callable[[], int]) -> None:
        from rich.live import Live

        self._title = title
        self._mono_ns = mono_ns
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def news(self, state: LiveState, life: Life, record: Record) -> None:
        """Nothing: the next refresh shows it."""

    def refresh(self, state: LiveState, *, final: bool) -> None:
        """Draw."""
        self._live.update(draw(state, state.now_ns(self._mono_ns()), self._title), refresh=True)
        if final:
            self._live.stop()


class _Printed:
    """No terminal: a line a change, and training's progress at intervals."""

    def __init__(
        self, console: Console, title: str, mono_ns: Callable[[], int], progress_s: float
    ) -> None:
        self._console = console
        self._mono_ns = mono_ns
        self._progress_ns = int(progress_s * 1e9)
        self._told: Training | None = None
        self._told_ns = mono_ns()
        self._print(title)

    def news(self, state: LiveState, life: Life, record: Record) -> None:
        """Print what is worth a line."""
        text = news_line(life, record)
        if text is not None:
            self._print(f"{duration(state.lives.clock.at(record)):>7}  {text}")

    def refresh(self, state: LiveState, *, final: bool) -> None:
        """Print the progress when it is due, and where training ended."""
        now_ns = self._mono_ns()
        training = state.training
        due = final or now_ns - self._told_ns >= self._progress_ns
        if training is None or training == self._told or not due:
            return
        self._told, self._told_ns = training, now_ns
        self._print(f"{duration(state.now_ns(now_ns)):>7}  {progress_line(training)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveView:
    """Shows a run while it goes on; a context manager around the training loop.

    A console that cannot be written to (its reader has left, say) ends the view, not the run.

    Args:
        trace: the run's trace file or directory.
        title: the first line.
        console: where to, made by :func:`make_console`; the standard output if absent.
        progress_s: without a terminal, seconds between two lines on training's progress.
        mono_ns: the monotonic clock in nanoseconds.

    Raises:
        TraceUnreadableError: there is no trace to read.
    """

    def __init__(
        self,
        trace: Path | str,
        title: str = "vime",
        *,
        console: Console | None = None,
        progress_s: float = 10.0,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        console = console or make_console()
        self._state = LiveState()
        self._follower = Follower(trace)
        self._mono_ns = mono_ns
        self._began_ns: int | None = None
        self._training: Training | None = None  # written by training, read by the view's thread
        self._closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vime-live", daemon=True)
        self._screen: _Screen | None = (
            _Drawn(console, title, mono_ns)
            if console.is_terminal
            else _Printed(console, title, mono_ns, progress_s)
        )

    def training(self, step: int, num_steps: int, **facts: float) -> None:
        """Say where training stands; costs a microsecond.

        Args:
            step: finished steps; 0 starts the clock of the speed.
            num_steps: of the whole run.
            facts: numbers to show beside it.
        """
        now_ns = self._mono_ns()
        if self._began_ns is None:
            self._began_ns = now_ns
        elapsed_s = (now_ns - self._began_ns) / 1e9
        self._training = Training(step, num_steps, elapsed_s, facts)

    def pump(self, *, final: bool = False) -> None:
        """Take in what is new and show it; the view's own thread does it all the time."""
        if self._screen is None:
            return
        self._state.training = self._training
        try:
            for record in self._follower.poll():
                self._screen.news(self._state, self._state.apply(record), record)
            self._screen.refresh(self._state, final=final)
        except (OSError, TraceUnreadableError):
            self._screen = None

    def close(self) -> None:
        """End the view's thread, show what came last, and let go of the trace."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive() and not self._closed:
            self._closed = True
            self.pump(final=True)
            self._follower.close()

    def _run(self) -> None:
        while not self._stop.wait(_REFRESH_S):
            self.pump()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
