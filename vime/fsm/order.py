"""Brings the records of each node back into the order of ``seq``, within a bounded window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from vime.fsm.record import Record

WINDOW = 4096
"""Records of one node that may be held back while an earlier one is awaited."""


@dataclass(slots=True)
class _Sequence:
    """Where one run of one node stands."""

    next: int
    held: dict[int, Record] = field(default_factory=dict)
    seqs: list[int] = field(default_factory=list)


class SeqOrder:
    """Gives back what is put in, each node's records by ``seq`` and each once.

    A record that comes early is held until its predecessors are there, or until more than
    ``window`` wait with it; then the predecessors count as missing. One that was given already,
    or comes after it was counted as missing, is dropped.

    Attributes:
        missing: how many records never came.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._sequences: dict[tuple[str, str], _Sequence] = {}
        self._latest: dict[str, _Sequence] = {}
        self._swapped = 0
        self._repeated = 0
        self._first: dict[str, str] = {}
        self.missing = 0

    def is_next(self, record: Record) -> bool:
        """The usual case, made quick: ``record`` is the next one, and none waits behind it."""
        sequence = self._sequences.get((record.node, record.run_id))
        if sequence is None or record.seq != sequence.next or sequence.held:
            return False
        sequence.next += 1
        return True

    def put(self, record: Record) -> Iterator[Record]:
        """The records that can be given out now that ``record`` is there."""
        key = record.node, record.run_id
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._begin(key, record.seq)
        if record.seq == sequence.next:
            sequence.next += 1
            yield record
            if sequence.held:
                yield from self._release(sequence, early=True)
        elif record.seq < sequence.next or record.seq in sequence.held:
            self._repeated += 1
            self._first.setdefault("repeated", f"seq {record.seq} of node {record.node}")
        else:
            sequence.held[record.seq] = record
            heappush(sequence.seqs, record.seq)
            if len(sequence.held) > self._window:
                yield from self._give_up(sequence)

    def rest(self) -> Iterator[Record]:
        """What is still held, at the end of the trace."""
        for sequence in self._sequences.values():
            while sequence.held:
                yield from self._give_up(sequence)

    def _begin(self, key: tuple[str, str], seq: int) -> _Sequence:
        """A further run of a node continues the numbers of the one before, or starts anew."""
        before = self._latest.get(key[0])
        first = before.next if before is not None and before.next <= seq else 0
        sequence = self._sequences[key] = self._latest[key[0]] = _Sequence(first)
        return sequence

    def _release(self, sequence: _Sequence, *, early: bool) -> Iterator[Record]:
        """The held records that follow without a gap; ``early``: it was a swap that held them."""
        while sequence.seqs and sequence.seqs[0] == sequence.next:
            record = sequence.held.pop(heappop(sequence.seqs))
            sequence.next += 1
            if early:
                self._swapped += 1
                self._first.setdefault("swapped", f"seq {record.seq} of node {record.node}")
            yield record

    def _give_up(self, sequence: _Sequence) -> Iterator[Record]:
        """Count what is awaited as missing, and go on behind it."""
        record = sequence.held.pop(heappop(sequence.seqs))
        self.missing += record.seq - sequence.next
        self._first.setdefault(
            "missing", f"seq {_span(sequence.next, record.seq - 1)} of node {record.node}"
        )
        sequence.next = record.seq + 1
        yield record
        yield from self._release(sequence, early=False)

    @property
    def problems(self) -> list[str]:
        """One line a kind."""
        texts = {
            "missing": f"{self.missing} records are missing",
            "swapped": f"{self._swapped} records stood out of order and were put back",
            "repeated": f"{self._repeated} records came twice or too late and were left out",
        }
        return [f"{texts[kind]}, the first: {first}" for kind, first in self._first.items()]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
