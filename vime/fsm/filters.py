"""Which records and lives of a trace a command is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from vime.fsm.lives import Life, TraceClock
from vime.fsm.record import Record

_UNITS_NS = {"ms": 10**6, "s": 10**9, "": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", re.ASCII)


@dataclass(frozen=True)
class Moment:
    """A moment of a run: nanoseconds since the trace's start, or since the epoch (``wall``)."""

    ns: int
    wall: bool = False

    @classmethod
    def parse(cls, text: str) -> Moment:
        """Read ``12.5`` (seconds since the start), ``1h30m``, ``250ms`` or an ISO date and time.

        Raises:
            ValueError: it is none of these.
        """
        parts = _PART.findall(text)
        try:
            if parts and "".join(number + unit for number, unit in parts) == text:
                return cls(sum(int(float(number) * _UNITS_NS[unit]) for number, unit in parts))
            return cls(int(datetime.fromisoformat(text).timestamp() * 1e9), wall=True)
        except (ValueError, OverflowError, OSError):
            raise ValueError(
                f"{text!r} is no moment: expected seconds since the start (12.5), 1h30m, 250ms, "
                "or a date and time (2026-11-29T12:00:00)"
            ) from None

    def on(self, clock: TraceClock) -> int:
        """The moment on the time line of a trace, in nanoseconds."""
        return self.ns - (clock.origin_wall_ns or 0) if self.wall else self.ns


@dataclass(frozen=True)
class Filter:
    """What a user asked to see; an empty tuple or ``None`` leaves nothing out.

    Attributes:
        points, engines: ids; when any is given, only these machines are shown.
        states: records that enter or leave one of them; lives that were in one of them.
        reasons: records and lives with one of them.
        since, until: the first and last moment.
    """

    points: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    since: Moment | None = None
    until: Moment | None = None

    @property
    def empty(self) -> bool:
        """Whether everything is wanted."""
        return self == Filter()

    def wants(self, record: Record, at_ns: int, clock: TraceClock) -> bool:
        """Whether ``record``, written at ``at_ns`` on ``clock``, is to be shown."""
        return (
            self.wants_machine(record.machine, record.id)
            and (not self.states or record.source in self.states or record.dest in self.states)
            and (not self.reasons or record.reason in self.reasons)
            and self.in_time(at_ns, at_ns, clock)
        )

    def wants_life(self, life: Life, now_ns: int, clock: TraceClock) -> bool:
        """Whether ``life`` is to be shown, in a trace that ends at ``now_ns``."""
        end_ns = life.entered_ns if life.finished else now_ns
        return (
            self.wants_machine(life.machine, life.id)
            and (
                not self.states
                or life.state in self.states
                or any(span.state in self.states for span in life.spans)
            )
            and (not self.reasons or life.reason in self.reasons)
            and self.in_time(life.start_ns, end_ns, clock)
        )

    def wants_machine(self, machine: str, id: str) -> bool:
        """Whether this machine is among those asked for."""
        if not self.points and not self.engines:
            return True
        return (machine == "point" and id in self.points) or (
            machine == "engine" and id in self.engines
        )

    def in_time(self, start_ns: int, end_ns: int, clock: TraceClock) -> bool:
        """Whether any of the time between the two moments is asked for."""
        return (self.since is None or end_ns >= self.since.on(clock)) and (
            self.until is None or start_ns <= self.until.on(clock)
        )
