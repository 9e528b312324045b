"""Why something became of a point: the records that led to it, by ``cause_seq``.

A cause is mostly the record before of the same machine, which says only what was before. What
explains is where the chain crosses over to another machine, so these links are always kept and
long stretches within one machine are shortened.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from vime.fsm.lives import Key, TraceClock, begins_anew, key_of
from vime.fsm.record import Record, cause_of, taken_up_from
from vime.fsm.sentences import sentence
from vime.fsm.text import count

Address = tuple[str, str, int]
"""Run, node and ``seq`` of a record."""

_STRETCH = 3
_MAX_LINKS = 200
_SPARE = 4
"""How many times more machines are kept than asked for, before the earlier ones are dropped."""


@dataclass(frozen=True)
class Link:
    """One record of a chain.

    Attributes:
        record: the record.
        at_ns: when, in nanoseconds since the start of the trace.
        crosses: the record after it in the chain, its effect, is another machine's.
        skipped: how many records of its machine were left out between it and its effect.
    """

    record: Record
    at_ns: int
    crosses: bool
    skipped: int = 0

    def __str__(self) -> str:
        """The link in words."""
        text = sentence(self.record)
        left_out = f" ({count(self.skipped, 'record')} of it in between)"
        return f"{text}{left_out}" if self.skipped else text


@dataclass(frozen=True)
class Recovery:
    """What became of an engine after it had become suspect.

    Attributes:
        suspect: the record of that.
        end: the record by which it was ready again, given up or stopped; the last one that the
            trace has of it when it ends before that.
        was_restarted: a new process was started for it.
    """

    suspect: Record
    end: Record
    was_restarted: bool


@dataclass(frozen=True)
class Story:
    """What became of one machine.

    Attributes:
        key: which one.
        own: its records, first to last; empty when they were not asked for.
        chain: its last record and the causes behind it, latest first.
        recoveries: what became of the engines that are suspect in the chain.
    """

    key: Key
    own: tuple[Link, ...]
    chain: tuple[Link, ...]
    recoveries: tuple[Recovery, ...] = ()


class Causes:
    """The causes of all records of a trace, in 24 bytes a record."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], tuple[array[int], array[int], array[int]]] = {}
        self._runs_of: dict[str, list[str]] = {}
        self._machines: dict[tuple[str, str], int] = {}
        self._elsewhere: dict[Address, str] = {}

    def add(self, record: Record) -> None:
        """Note one record; those of a node come by ``seq``."""
        run = record.run_id, record.node
        columns = self._runs.get(run)
        if columns is None:
            columns = self._runs[run] = array("q"), array("q"), array("q")
            self._runs_of.setdefault(record.node, []).append(record.run_id)
        cause = cause_of(record)
        seqs, causes, machines = columns
        seqs.append(record.seq)
        machine = record.machine, record.id
        machines.append(self._machines.setdefault(machine, len(self._machines)))
        if cause is not None and cause[0] != record.node:
            self._elsewhere[record.run_id, record.node, record.seq] = cause[0]
        elif cause is not None and not 0 <= cause[1] < record.seq:  # only earlier ones can cause
            cause = None
        causes.append(-1 if cause is None or not 0 <= cause[1] < 1 << 62 else cause[1])

    def chain(self, start: Address) -> Iterator[tuple[Address, int]]:
        """``start`` and the causes behind it, latest first, each with its machine's number."""
        seen: set[Address] = set()
        address: Address | None = start
        while address is not None and address not in seen:
            seen.add(address)
            columns = self._runs[address[:2]]
            at = bisect_left(columns[0], address[2])
            yield address, columns[2][at]
            cause = columns[1][at]
            node = self._elsewhere.get(address, address[1])
            address = None if cause < 0 else self._find(address[0], node, cause)

    def _find(self, run_id: str, node: str, seq: int) -> Address | None:
        """The record of that ``seq``: of this run of the node, or of one before it."""
        runs = self._runs_of.get(node, [])
        for candidate in (run_id, *reversed(runs)):
            seqs = self._runs.get((candidate, node), (array("q"),))[0]
            at = bisect_left(seqs, seq)
            if at < len(seqs) and seqs[at] == seq:
                return candidate, node, seq
        return None


@dataclass(frozen=True)
class _Step:
    """A link before its record was fetched."""

    address: Address
    crosses: bool
    skipped: int = 0


def _outline(causes: Causes, start: Address, max_steps: int) -> list[_Step]:
    """The chain behind ``start`` with its long stretches within one machine shortened."""
    steps: list[_Step] = []
    stretch: list[Address] = []
    machine = -1
    for address, of_machine in islice(causes.chain(start), max_steps):
        if of_machine != machine:
            steps += _shortened(stretch)
            steps.append(_Step(address, machine >= 0))
            stretch, machine = [], of_machine
        else:
            stretch.append(address)
    return (steps + _shortened(stretch))[:_MAX_LINKS]


def _shortened(stretch: list[Address]) -> list[_Step]:
    """The latest records of a stretch, and its first one: there the cause came in."""
    steps = [_Step(address, False) for address in stretch[:_STRETCH]]
    left = len(stretch) - _STRETCH
    return [*steps, _Step(stretch[-1], False, left - 1)] if left > 0 else steps


class _Finder:
    """The first pass: the causes of all records, and which records the machines have."""

    def __init__(
        self, machines: Collection[str], ids: frozenset[str] | None, last: int | None
    ) -> None:
        self._machines = machines
        self._ids = ids
        self._last = last
        self._attempts: dict[Key, int] = {}
        self.causes = Causes()
        self.own: dict[Key, array[int]] = {}

    def add(self, record: Record) -> None:
        self.causes.add(record)
        if record.machine not in self._machines or (self._ids and record.id not in self._ids):
            return
        key = key_of(record)
        if begins_anew(record, self._attempts.get(key, record.attempt)):
            del self.own[key]
        left_by = taken_up_from(record)
        if left_by is not None:  # the causes lead back there
            self.own.pop((left_by, *key[1:]), None)
        self._attempts[key] = record.attempt
        self.own.setdefault(key, array("q")).append(record.seq)
        if self._last and len(self.own) > _SPARE * len(self._machines) * self._last:
            self.own = _latest(self.own, self._last)
            self._attempts = {key: self._attempts[key] for key in self.own}


def stories(
    trace: Iterable[Record],
    machines: Collection[str],
    ids: Iterable[str] = (),
    *,
    with_own: bool = True,
    max_steps: int = 1_000_000,
    last: int | None = None,
) -> list[Story]:
    """What became of some machines, in the order of their first records.

    Args:
        trace: the records; iterated over twice.
        machines: their kinds.
        ids: which; all of these kinds if empty.
        with_own: whether their own records are wanted, beside the causes of the last one.
        max_steps: how far to go back.
        last: only so many of the latest machines of a kind.
    """
    finder = _Finder(machines, frozenset(ids) or None, last)
    for record in trace:
        finder.add(record)
    own = _latest(finder.own, last) if last else finder.own
    chains = {
        key: _outline(finder.causes, (key[0], key[1], seqs[-1]), max_steps)
        for key, seqs in own.items()
    }
    wanted = {step.address for chain in chains.values() for step in chain}
    if with_own:
        wanted |= {(key[0], key[1], seq) for key, seqs in own.items() for seq in seqs}
    fetched, recoveries = _fetch(trace, wanted)

    def links(steps: Iterable[_Step]) -> tuple[Link, ...]:
        return tuple(
            Link(*fetched[step.address], step.crosses, step.skipped)
            for step in steps
            if step.address in fetched
        )

    return [
        Story(
            key,
            links(_Step((key[0], key[1], seq), False) for seq in seqs) if with_own else (),
            links(chains[key]),
            tuple(recoveries[s.address] for s in chains[key] if s.address in recoveries),
        )
        for key, seqs in own.items()
    ]


def _latest(own: dict[Key, array[int]], last: int) -> dict[Key, array[int]]:
    kinds = dict.fromkeys(key[2] for key in own)
    keys = [key for kind in kinds for key in [key for key in own if key[2] == kind][-last:]]
    return {key: own[key] for key in keys}


_SETTLED = ("ready", "lost", "stopped")


def _fetch(
    trace: Iterable[Record], wanted: set[Address]
) -> tuple[dict[Address, tuple[Record, int]], dict[Address, Recovery]]:
    """The second pass: the wanted records and when they were written, and how engines fared."""
    clock = TraceClock()
    fetched: dict[Address, tuple[Record, int]] = {}
    recoveries: dict[Address, Recovery] = {}
    watched: dict[Key, Address] = {}
    for record in trace:
        at_ns = clock.at(record)
        address = record.run_id, record.node, record.seq
        if address in wanted:
            fetched[address] = record, at_ns
        if record.machine != "engine" or record.rejected:
            continue
        key = key_of(record)
        since = watched.get(key)
        if since is not None:
            before = recoveries[since]
            restarted = before.was_restarted or record.trigger == "start"
            recoveries[since] = Recovery(before.suspect, record, restarted)
            if record.dest in _SETTLED:
                del watched[key]
        if record.trigger == "suspect" and address in wanted:
            watched[key] = address
            recoveries[address] = Recovery(record, record, was_restarted=False)
    return fetched, recoveries
