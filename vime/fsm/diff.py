"""Compares two runs: where their behaviour first differs, and how long things took in each.

Machines are matched by kind and id and compared trigger by trigger; what differs in every run
(times, run ids, weight versions, how the machines took turns) is no difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from vime.fsm.filters import Filter
from vime.fsm.lives import Lives, scores_of
from vime.fsm.record import Record
from vime.fsm.stats import Stats

Step = tuple[str, str, bool, str | None]
"""Trigger, destination, whether it was rejected, reason."""

Name = tuple[str, str]
"""Machine and id."""


@dataclass(slots=True)
class _History:
    steps: list[Step] = field(default_factory=list)
    seqs: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))


class Behaviour:
    """What each machine of a run did.

    Attributes:
        histories: machine and id → its steps.
        scores: point → eval set → mean reward.
        stats: the dwell times.
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._filter = filter or Filter()
        self._steps: dict[Step, Step] = {}
        self._lives = Lives()
        self.histories: dict[Name, _History] = {}
        self.scores: dict[str, dict[str, float]] = {}
        self.stats = Stats(filter)

    def add(self, record: Record) -> None:
        """Take in one record."""
        self.stats.add(record)
        life, _ = self._lives.add(record)
        life.spans.clear()
        at_ns = self._lives.clock.at(record)
        if not self._filter.wants(record, at_ns, self._lives.clock):
            return
        history = self.histories.setdefault((record.machine, record.id), _History())
        step = record.trigger, record.dest, record.rejected, record.reason
        history.steps.append(self._steps.setdefault(step, step))
        history.seqs.append(record.seq)
        history.times.append(at_ns)
        if record.machine == "point" and life.finished and (scores := scores_of(life)):
            self.scores[record.id] = scores


@dataclass(frozen=True)
class Side:
    """What one run did at the place of a difference; ``None`` for nothing more.

    Attributes:
        step: the step.
        seq: its record.
        at_ns: when, since the start of its trace.
    """

    step: Step
    seq: int
    at_ns: int


@dataclass(frozen=True)
class Difference:
    """The first step at which a machine behaves differently.

    Attributes:
        name: machine and id.
        index: how many of its steps are the same before.
        a, b: what it did in each run.
    """

    name: Name
    index: int
    a: Side | None
    b: Side | None


def behaviour(records: Iterable[Record], filter: Filter | None = None) -> Behaviour:
    """What each machine of a trace did."""
    gathered = Behaviour(filter)
    for record in records:
        gathered.add(record)
    return gathered


def differences(a: Behaviour, b: Behaviour) -> list[Difference]:
    """One for each machine that behaves differently, the earliest first.

    The time of a difference is that in ``a``, or in ``b`` where ``a`` has nothing.
    """
    found = []
    for name in dict.fromkeys([*a.histories, *b.histories]):
        first, second = (run.histories.get(name, _History()) for run in (a, b))
        same = min(len(first.steps), len(second.steps))
        index = next((i for i in range(same) if first.steps[i] != second.steps[i]), same)
        if index < max(len(first.steps), len(second.steps)):
            found.append(Difference(name, index, _side(first, index), _side(second, index)))
    return sorted(found, key=_when)


def _side(history: _History, index: int) -> Side | None:
    if index >= len(history.steps):
        return None
    return Side(history.steps[index], history.seqs[index], history.times[index])


def _when(difference: Difference) -> int:
    side = difference.a or difference.b
    assert side is not None, "one of them did something"
    return side.at_ns
