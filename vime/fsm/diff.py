"""Compares two runs: where their behaviour first differs, and how long things took in each.

Machines are matched by kind and id and compared trigger by trigger; what differs in every run
(times, run ids, weight versions, how the machines took turns) is no difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from sys import intern

from vime.fsm.filters import Filter
from vime.fsm.lives import Lives, scores_of
from vime.fsm.record import Record
from vime.fsm.stats import Stats

Step = tuple[str, str, bool, str | None]
"""Trigger, destination, whether it was rejected, reason."""

Name = tuple[str, str]
"""Machine and id."""


class Behaviour:
    """What each machine of a run did, in 24 bytes a record.

    Attributes:
        scores: point → eval set → mean reward.
        stats: the dwell times.
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._filter = filter or Filter()
        self._lives = Lives()
        self._machines: dict[str, dict[str, int]] = {}
        self._steps: dict[Step, int] = {}
        self._columns = (array("i"), array("i"), array("q"), array("q"))
        self.num_machines = 0
        self.scores: dict[str, dict[str, float]] = {}
        self.stats = Stats(filter)

    def add(self, record: Record) -> None:
        """Take in one record."""
        self.stats.add(record)
        life, _ = self._lives.add(record)
        life.spans.clear()
        if life.finished:
            self._lives.forget(life)
        at_ns = self._lives.clock.at(record)
        if not self._filter.wants(record, at_ns, self._lives.clock):
            return
        of_kind = self._machines.setdefault(record.machine, {})
        name = intern(record.id)  # the other run has it, too
        number = of_kind.get(name)
        if number is None:
            number = of_kind[name] = self.num_machines
            self.num_machines += 1
        step = record.trigger, record.dest, record.rejected, record.reason
        row = number, self._steps.setdefault(step, len(self._steps)), record.seq, at_ns
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        if record.machine == "point" and life.finished and (scores := scores_of(life)):
            self.scores[name] = {intern(eval_set): score for eval_set, score in scores.items()}

    def names(self) -> Iterator[Name]:
        """Every machine, kind by kind, in the order of their first records."""
        for machine, of_kind in self._machines.items():
            for name in of_kind:
                yield machine, name

    def has(self, name: Name) -> bool:
        """Whether there is such a machine."""
        return name[1] in self._machines.get(name[0], ())

    def histories(self) -> Callable[[Name], _History]:
        """What says of a machine what it did; of one that is not there, nothing."""
        machines, numbers, seqs, times = self._columns
        ends = array("i", [0]) * (self.num_machines + 1)
        for machine in machines:
            ends[machine + 1] += 1
        for machine in range(self.num_machines):
            ends[machine + 1] += ends[machine]
        rows, free = array("i", [0]) * len(machines), ends[:]
        for row, machine in enumerate(machines):
            rows[free[machine]] = row
            free[machine] += 1
        steps = list(self._steps)

        def side(row: int) -> Side:
            return Side(steps[numbers[row]], seqs[row], times[row])

        def history(name: Name) -> _History:
            machine = self._machines.get(name[0], {}).get(name[1])
            own = array("i") if machine is None else rows[ends[machine] : ends[machine + 1]]
            return _History(own, side)

        return history


class _History:
    """The steps of one machine, each made when it is asked for: an engine has very many."""

    def __init__(self, rows: array[int], side: Callable[[int], Side]) -> None:
        self._rows = rows
        self._side = side

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Side:
        return self._side(self._rows[index])


@dataclass(frozen=True, slots=True)
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
    ours, theirs = a.histories(), b.histories()
    for name in chain(a.names(), (name for name in b.names() if not a.has(name))):
        first, second = ours(name), theirs(name)
        same = min(len(first), len(second))
        index = next((i for i in range(same) if first[i].step != second[i].step), same)
        if index < max(len(first), len(second)):
            sides = (side[index] if index < len(side) else None for side in (first, second))
            found.append(Difference(name, index, *sides))
    return sorted(found, key=_when)


def _when(difference: Difference) -> int:
    side = difference.a or difference.b
    assert side is not None, "one of them did something"
    return side.at_ns
