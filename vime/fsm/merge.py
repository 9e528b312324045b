"""Merges the traces of several nodes into one order that respects every cause.

Wall clocks of different machines disagree, so time decides nothing: the records of a node keep
the order of ``seq``, and no record comes before its cause. Where that leaves a choice, the
smaller ``seq`` comes first, then the node's name: the result depends on the records alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from vime.fsm.record import Record, cause_of


class Merge:
    """One order for the records of several traces; iterate over it once.

    Args:
        traces: each in the order of its nodes' ``seq``.

    Attributes:
        num_repeated: records that were in more than one trace and are given once.
        num_broken: records whose cause came nowhere before them.
        nodes: node → how many of its records were given.
    """

    def __init__(self, traces: Iterable[Iterable[Record]]) -> None:
        self._sources = [iter(trace) for trace in traces]
        self._free: list[tuple[int, str, int, Record]] = []
        self._waiting: dict[str, list[tuple[int, int, Record]]] = {}
        self._given: dict[str, int] = {}
        self._last: dict[tuple[str, str], int] = {}
        self.num_repeated = 0
        self.num_broken = 0
        self.nodes: dict[str, int] = {}

    def __iter__(self) -> Iterator[Record]:
        for source in range(len(self._sources)):
            self._advance(source)
        while self._free or self._waiting:
            if not self._free:
                self._give_up_one()
            _, _, source, record = heappop(self._free)
            if self._is_repeated(record):  # another trace gave it in the meantime
                self._advance(source)
                continue
            yield record
            self._given[record.node] = max(self._given.get(record.node, -1), record.seq)
            self._last[record.node, record.run_id] = record.seq
            self.nodes[record.node] = self.nodes.get(record.node, 0) + 1
            self._wake(record.node)
            self._advance(source)

    def _advance(self, source: int) -> None:
        """Take the next record of a source that has not been given yet."""
        for record in self._sources[source]:
            if self._is_repeated(record):
                continue
            cause = cause_of(record)
            if cause is None or self._is_given(*cause, record):
                heappush(self._free, (record.seq, record.node, source, record))
            else:
                heappush(self._waiting.setdefault(cause[0], []), (cause[1], source, record))
            return

    def _is_repeated(self, record: Record) -> bool:
        repeated = record.seq <= self._last.get((record.node, record.run_id), -1)
        self.num_repeated += repeated
        return repeated

    def _is_given(self, node: str, seq: int, record: Record) -> bool:
        # Of its own node every earlier record is given: there the order of ``seq`` is kept.
        return node == record.node or self._given.get(node, -1) >= seq

    def _wake(self, node: str) -> None:
        """Free the records that waited for what has been given of ``node``."""
        waiting = self._waiting.get(node)
        while waiting and waiting[0][0] <= self._given[node]:
            _, source, record = heappop(waiting)
            heappush(self._free, (record.seq, record.node, source, record))
        if waiting is not None and not waiting:
            del self._waiting[node]

    def _give_up_one(self) -> None:
        """Every source waits: the cause of one is in none of the traces, or they form a ring."""
        self.num_broken += 1
        node = min(self._waiting, key=lambda n: (self._waiting[n][0][2].seq, n))
        _, source, record = heappop(self._waiting[node])
        if not self._waiting[node]:
            del self._waiting[node]
        heappush(self._free, (record.seq, record.node, source, record))
