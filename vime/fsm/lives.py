"""Folds records into lives: what each point, engine and snapshot went through, and how long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any, NamedTuple

from vime.fsm.record import CONTINUES, Record
from vime.fsm.tables import NEW, TABLES

Key = tuple[str, str, str, str]
"""Run, node, machine and id: what tells one machine of a trace from another."""


def key_of(record: Record) -> Key:
    """Which machine ``record`` is about."""
    return record.run_id, record.node, record.machine, record.id


def begins_anew(record: Record, attempt: int) -> bool:
    """Whether ``record`` opens a further life of a machine whose last one had ``attempt``.

    A point that a later run took up again is such: a higher attempt that leaves ``new``.
    """
    return record.source == NEW and record.attempt > attempt


def continued_by(record: Record) -> str | None:
    """The run that the run of ``record`` continues, if this is the record that says so."""
    run_id = record.detail.get(CONTINUES) if record.detail else None
    return run_id if isinstance(run_id, str) and run_id != record.run_id else None


class TraceClock:
    """One time line for all records: nanoseconds since the first record of the trace.

    Within a run of a node it is the monotonic clock; several are laid side by side by what the
    wall clock said at the first record of each.

    Attributes:
        origin_wall_ns: the wall clock at the first record, in nanoseconds since the epoch.
    """

    def __init__(self) -> None:
        self.origin_wall_ns: int | None = None
        self._offsets: dict[tuple[str, str], int] = {}

    def at(self, record: Record) -> int:
        """When ``record`` was written."""
        if self.origin_wall_ns is None:
            self.origin_wall_ns = record.wall_ns
        offset = self._offsets.get((record.node, record.run_id))
        if offset is None:
            offset = record.wall_ns - self.origin_wall_ns - record.mono_ns
            self._offsets[record.node, record.run_id] = offset
        return record.mono_ns + offset


class Span(NamedTuple):
    """A stay in one state; times as of :class:`TraceClock`."""

    state: str
    start_ns: int
    end_ns: int

    @property
    def dwell_ns(self) -> int:
        """How long it lasted."""
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Life:
    """What one machine went through.

    Attributes:
        key: see :data:`Key`.
        attempt: the last one.
        state: the present one.
        entered_ns: since when.
        first_seq, last_seq: its first and last record.
        spans: the states that it has left, in order; ``new`` is not among them.
        cut: its run was cut off, and a later one has gone on without it.
        earlier: which machine of the run before it was.
        num_rejected: how many illegal triggers it refused.
        reason: the last one given.
        detail: that of the last transition.
        weight_version: the last one given.
    """

    key: Key
    attempt: int
    state: str
    entered_ns: int
    first_seq: int
    last_seq: int
    spans: list[Span] = field(default_factory=list)
    cut: bool = False
    earlier: Key | None = None
    num_rejected: int = 0
    reason: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    weight_version: str | None = None

    @property
    def machine(self) -> str:
        """``point``, ``engine`` or ``snapshot``."""
        return self.key[2]

    @property
    def id(self) -> str:
        """Its name among the machines of its kind."""
        return self.key[3]

    @property
    def finished(self) -> bool:
        """Whether its state is terminal."""
        table = TABLES.get(self.machine)
        return table is not None and self.state in table.terminal

    @property
    def start_ns(self) -> int:
        """When it left ``new``."""
        return self.spans[0].start_ns if self.spans else self.entered_ns

    def all_spans(self, now_ns: int) -> Iterator[Span]:
        """The spans, and the present state up to ``now_ns`` unless it is terminal or cut off."""
        yield from self.spans
        if not self.finished and not self.cut and self.state != NEW:
            yield Span(self.state, self.entered_ns, max(now_ns, self.entered_ns))

    def dwell_ns(self, state: str, now_ns: int) -> int | None:
        """How long it was in ``state`` altogether; ``None`` when it never was."""
        stays = [span.dwell_ns for span in self.all_spans(now_ns) if span.state == state]
        return sum(stays) if stays else None

    def take(self, record: Record, now_ns: int) -> Span | None:
        """Go one record further; the span that it ended, if it did."""
        self.last_seq = record.seq
        self.attempt = record.attempt
        if record.rejected:
            self.num_rejected += 1
            return None
        self.weight_version = record.weight_version or self.weight_version
        self.reason = record.reason or self.reason
        self.detail = record.detail or {}
        if record.dest == self.state:  # an event of its life
            return None
        now_ns = max(now_ns, self.entered_ns)
        ended = None
        if self.state != NEW:
            ended = Span(self.state, self.entered_ns, now_ns)
            self.spans.append(ended)
        self.state, self.entered_ns = intern(record.dest), now_ns
        return ended

    def cut_off(self, end_ns: int) -> None:
        """Its run is no more: it stays where it was, and its present stay ended then."""
        self.cut = True
        if self.state != NEW:
            self.spans.append(Span(self.state, self.entered_ns, max(end_ns, self.entered_ns)))

    def follow(self, earlier: Life) -> None:
        """Be the same thing's next life, in the run that continues the one of ``earlier``."""
        self.spans[:0] = earlier.spans
        self.earlier = earlier.key
        self.first_seq = earlier.first_seq
        self.num_rejected += earlier.num_rejected
        self.weight_version = earlier.weight_version


class Lives:
    """The lives of a trace, by machine.

    What a run had under way is cut off where another one says that it continues it; what is
    taken up again there is one life with what it was before.

    Args:
        last: keep only so many of the finished lives of each kind, the latest.

    Attributes:
        num_dropped: how many finished lives were not kept, by kind.
        clock: the time line.
        now_ns: the latest moment seen on it.
        num_records: how many records were taken in.
        runs: the runs, in the order of their first records.
    """

    def __init__(self, last: int | None = None) -> None:
        self.clock = TraceClock()
        self.num_dropped: dict[str, int] = {}
        self.now_ns = 0
        self.num_records = 0
        self.runs: dict[str, None] = {}
        self._lives: dict[Key, Life] = {}
        self._earlier: list[Life] = []
        self._finished: dict[str, dict[Key, Life]] = {}
        self._last = last
        self._last_ns: dict[tuple[str, str], int] = {}
        self._cut: dict[tuple[str, str, str], Life] = {}

    def pass_by(self, record: Record) -> int:
        """Note only when a record was written; returns it."""
        now_ns = self.clock.at(record)
        self.now_ns = max(self.now_ns, now_ns)
        self.num_records += 1
        self.runs.setdefault(record.run_id)
        continued = continued_by(record)
        if continued is not None:
            self._cut_off(record.node, continued)
        self._last_ns[record.node, record.run_id] = now_ns
        return now_ns

    def _cut_off(self, node: str, run_id: str) -> None:
        """Another run goes on instead: no more is heard of what this one had."""
        for key, life in list(self._lives.items()):
            if key[:2] == (run_id, node) and not life.finished:
                life.cut_off(self._last_ns[node, run_id])
                self._cut[key[1:]] = life
                del self._lives[key]

    def add(self, record: Record) -> tuple[Life, Span | None]:
        """Take in one record; whose life it is, and the span that it ended."""
        now_ns = self.pass_by(record)
        key = key_of(record)
        life = self._lives.get(key) or self._revived(key)
        if life is None or begins_anew(record, life.attempt):
            if life is not None:
                self._earlier.append(life)
            life = Life(key, record.attempt, intern(record.source), now_ns, record.seq, record.seq)
            self._lives[key] = life
            earlier = self._cut.pop(key[1:], None)
            if earlier is not None:
                life.follow(earlier)
        return life, life.take(record, now_ns)

    def forget(self, life: Life) -> None:
        """Drop a life that will not be asked for again."""
        self._lives.pop(life.key, None)

    def retire(self, life: Life) -> None:
        """Keep a finished life among the latest ones; the oldest of them may have to go."""
        if self._last is None:
            return
        self.forget(life)
        finished = self._finished.setdefault(life.machine, {})
        finished[life.key] = life
        if len(finished) > self._last:
            del finished[next(iter(finished))]
            self.num_dropped[life.machine] = self.num_dropped.get(life.machine, 0) + 1

    def _revived(self, key: Key) -> Life | None:
        """A finished life that is heard of once more (an illegal trigger, say)."""
        life = self._finished.get(key[2], {}).pop(key, None)
        if life is not None:
            self._lives[key] = life
        return life

    def of(self, machine: str) -> list[Life]:
        """The lives of one kind of machine, in the order of their beginnings."""
        finished = self._finished.get(machine, {})
        lives = [*self._earlier, *self._cut.values(), *finished.values(), *self._lives.values()]
        return sorted(
            (life for life in lives if life.machine == machine),
            key=lambda life: (life.start_ns, life.first_seq),
        )


def lives_of(
    records: Iterable[Record],
    *,
    machines: Collection[str] = TABLES,
    keep: Callable[[Life, int, TraceClock], bool] | None = None,
    last: int | None = None,
) -> Lives:
    """The lives that ``records`` tell of.

    Args:
        records: the trace.
        machines: the kinds that are wanted.
        keep: whether a finished life is wanted, given the present moment and the clock.
        last: keep only so many finished lives of a kind, the latest; all of them if ``None``.
    """
    lives = Lives(last)
    for record in records:
        if record.machine not in machines:
            lives.pass_by(record)
            continue
        life, _ = lives.add(record)
        if life.finished:
            if keep is None or keep(life, lives.now_ns, lives.clock):
                lives.retire(life)
            else:
                lives.forget(life)
    return lives


#: Metrics of a point that are facts about its evaluation, not scores.
_FACTS = frozenset(
    f"eval/{name}"
    for name in (
        "step",
        "lag_steps",
        "duration_seconds",
        "export_time_seconds",
        "stall_seconds",
        "pin_seconds",
        "transfer_seconds",
        "transfer_bytes",
        "pin_canary",
        "pin_unchanged",
    )
)


def metrics_of(life: Life) -> dict[str, float]:
    """The numbers among the metrics of a finished point."""
    metrics = life.detail.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def scores_of(life: Life) -> dict[str, float]:
    """Eval set → mean reward of a finished point (its metrics ``eval/<set>``)."""
    return scores_in(metrics_of(life))


def scores_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Eval set → mean reward, of the metrics of a finished point."""
    return {
        name.removeprefix("eval/"): value
        for name, value in metrics.items()
        if name.startswith("eval/")
        and name.count("/") == 1
        and name not in _FACTS
        and not name.startswith("eval/skipped_")
    }
