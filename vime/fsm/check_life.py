"""Invariants 4 and 9 within one life: what must stay the same, and who caused what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vime.fsm.check_rule import Context, Rule, Violation
from vime.fsm.lives import Key, key_of
from vime.fsm.record import Record
from vime.fsm.tables import NEW, POINT, SNAPSHOT
from vime.fsm.text import clean

_ENDS = POINT.terminal | SNAPSHOT.terminal

_BEFORE_WEIGHTS = ("dispatch", "export")

#: With these an engine begins its next life; other machines have theirs from ``new``.
_NEXT_LIFE = ("restart", "start")


class LifeRule(Rule):
    """9: a life keeps its number, and each record of it but the first has a cause."""

    invariant = 9
    reads_rejected = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._attempts: dict[Key, int] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        key = key_of(record)
        before = self._attempts.get(key)
        self._attempts[key] = record.attempt
        if before is None:
            return ()
        is_next = record.source == NEW or (
            record.machine == "engine" and record.trigger in _NEXT_LIFE
        )
        if record.attempt == before or (is_next and record.attempt > before):
            if record.cause_seq is not None or record.source == NEW:
                return ()
            return [self.broken(f"{_name(record)} goes on without a cause", record)]
        text = f"{_name(record)} is in its life number {record.attempt}, and was in {before}"
        return [self.broken(text, record)]


class VersionRule(Rule):
    """4: a snapshot and a point keep the weights that they were given."""

    invariant = 4
    machines = ("point", "snapshot")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._given: dict[Key, Record] = {}

    def feed(self, record: Record) -> Iterator[Violation]:
        """Watch one record; see :class:`Rule`."""
        key = key_of(record)
        if record.source == NEW:
            self._given.pop(key, None)
        given = self._given.get(key)
        # Of a score the rule of proofs speaks; a skip may name no weights.
        is_silent = record.trigger == "finish" or (
            record.trigger == "skip" and record.weight_version is None
        )
        if given is not None and record.weight_version != given.weight_version and not is_silent:
            text = f"{_name(record)} had the weights {_version(given)} and has {_version(record)}"
            yield self.broken(text, given, record)
        elif given is None and record.weight_version is not None:
            self._given[key] = record
            if record.machine == "point" and record.trigger in _BEFORE_WEIGHTS:
                yield self.broken(f"{_name(record)} has weights before there are any", record)
        if record.dest in _ENDS:
            self._given.pop(key, None)


def _name(record: Record) -> str:
    return f"{clean(record.machine, 20)} {clean(record.id, 80)}"


def _version(record: Record) -> str:
    return "none" if record.weight_version is None else clean(record.weight_version, 80)
