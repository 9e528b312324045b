"""What a rule of the check is, and what it says when it is broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from vime.fsm.record import Record
from vime.fsm.text import clean

Run = tuple[str, str]
"""Run and node: whose records may be compared with each other."""


@dataclass(frozen=True)
class Violation:
    """One broken invariant.

    Attributes:
        invariant: its number, see :data:`vime.fsm.check.INVARIANTS`.
        text: what is wrong, in a sentence.
        records: the records that show it, the decisive one last.
    """

    invariant: int
    text: str
    records: tuple[Record, ...]


class Context:
    """What all rules of a check may know.

    Attributes:
        late: the runs whose beginning the trace does not have.
        latest: node → the run that it wrote last; the ones before it were cut off.
        ended: the life in which the present record's machine had come to its end before it.
    """

    def __init__(self) -> None:
        self.late: set[Run] = set()
        self.latest: dict[str, str] = {}
        self.ended: int | None = None

    def is_latest(self, record: Record) -> bool:
        """Whether ``record`` is of the last run of its node."""
        return self.latest.get(record.node) == record.run_id


class Rule:
    """Watches the records of some machines; one instance a trace."""

    invariant: ClassVar[int]
    machines: ClassVar[tuple[str, ...]] = ()  # all of them
    reads_rejected: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self.context = context

    def feed(self, record: Record) -> Iterable[Violation]:
        """What ``record`` violates, given those before it."""
        raise NotImplementedError

    def end(self, ended: bool) -> Iterable[Violation]:  # noqa: ARG002 -- for rules
        """What the end of the trace violates; ``ended``: the run is over."""
        return ()

    def broken(self, text: str, *records: Record | None) -> Violation:
        """A violation of this rule's invariant; what it quotes of the trace steers no terminal."""
        return Violation(self.invariant, clean(text), tuple(r for r in records if r is not None))


def run_of(record: Record) -> Run:
    """The sequence that ``record`` belongs to."""
    return record.run_id, record.node


def number(record: Record, *names: str) -> float | None:
    """A number of the record's detail, under nested ``names``."""
    value: object = record.detail
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
