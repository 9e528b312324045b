"""Invariants 4 and 9 within one life: what must stay the same, and who caused what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vime.fsm.check_rule import Context, Rule, Run, Violation, run_of
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
        before = self._attempts.get(key, self.context.ended)
        if record.dest in _ENDS:  # of those the context knows it
            self._attempts.pop(key, None)
        else:
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
    """4: a snapshot and a point keep their weights, and an engine loads what a point asked for."""

    invariant = 4

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._given: dict[Key, Record] = {}
        self._asked: dict[Run, dict[int, Record]] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        return self._engine(record) if record.machine == "engine" else self._keeper(record)

    def _engine(self, record: Record) -> Iterable[Violation]:
        if record.trigger != "pin" or record.cause_seq is None:
            return ()
        asked = self._asked.get(run_of(record), {}).get(record.cause_seq)
        if asked is None or asked.weight_version == record.weight_version:
            return ()
        text = f"{_name(asked)} asked for {_version(asked)}, and {_name(record)} is given "
        return [self.broken(text + _version(record), asked, record)]

    def _keeper(self, record: Record) -> Iterator[Violation]:
        key = key_of(record)
        self._note(record)
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

    def _note(self, record: Record) -> None:
        """What a point asks its engines for, until it has ended."""
        if record.machine != "point":
            return
        asked = self._asked.setdefault(run_of(record), {})
        if record.trigger == "pin":
            asked[record.seq] = record
        elif record.dest in POINT.terminal:
            for seq in [seq for seq, pin in asked.items() if pin.id == record.id]:
                del asked[seq]


def _name(record: Record) -> str:
    return f"{clean(record.machine, 20)} {clean(record.id, 80)}"


def _version(record: Record) -> str:
    return "none" if record.weight_version is None else clean(record.weight_version, 80)
