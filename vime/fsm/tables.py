"""The states, triggers and transition tables of every machine of vime, as data.

The rules, which every reader and writer of these tables may rely on:

1. A machine is one row of facts about one thing: an eval point, an engine, or a snapshot.
   It begins in the pseudo-state ``new`` (the thing is not there yet), and its first trigger
   brings it to life; that first transition is traced like any other.
2. Triggers are verbs in the imperative, states are adjectives or participles. The pair
   (source, trigger) decides the destination: the tables are deterministic.
3. A trigger that the table does not list for the present state is *illegal*: it raises,
   changes nothing, and is traced with ``rejected: true``.
4. A terminal state has an entry with no way out. Nothing leaves it, not even by itself.
5. Tables hold no conditions and no effects. Why a transition is taken is in the record
   (``reason``, ``detail``, ``cause_seq``); what follows from it is the caller's business and
   happens after the record has been written.
6. A transition whose source and destination are the same state is an *event of the life* of
   the thing (a lease of a snapshot, say), traced because an invariant depends on it.

Diagrams, the docs' tables and the replay of traces are all generated from this file. Whoever
changes a table changes :func:`table_hash`, which every record carries, so that an old trace
is never read by new rules unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

NEW = "new"


@dataclass(frozen=True)
class Table:
    """One machine's rules: ``states`` maps each state to its meaning and its ways out.

    Attributes:
        name: what the trace calls the machine: ``point``, ``engine`` or ``snapshot``.
        states: state → trigger → destination; a terminal state maps to an empty dictionary.
        meanings: state → one sentence.
    """

    name: str
    states: Mapping[str, Mapping[str, str]]
    meanings: Mapping[str, str]

    @property
    def initial(self) -> str:
        """The pseudo-state in which every machine begins."""
        return NEW

    @cached_property
    def terminal(self) -> frozenset[str]:
        """The states that nothing leaves."""
        return frozenset(state for state, ways in self.states.items() if not ways)

    @property
    def triggers(self) -> tuple[str, ...]:
        """Every trigger of the table, in the order of its first appearance."""
        seen = dict.fromkeys(trigger for ways in self.states.values() for trigger in ways)
        return tuple(seen)

    def dest(self, source: str, trigger: str) -> str | None:
        """Where ``trigger`` leads from ``source``; ``None`` when that is illegal."""
        return self.states[source].get(trigger)

    def edges(self) -> list[tuple[str, str, str]]:
        """All (source, trigger, destination) of the table, in the order written here."""
        return [(s, t, d) for s, ways in self.states.items() for t, d in ways.items()]


def _table(name: str, rows: Mapping[str, tuple[str, Mapping[str, str]]]) -> Table:
    states = {state: MappingProxyType(dict(ways)) for state, (_, ways) in rows.items()}
    meanings = {state: meaning for state, (meaning, _) in rows.items()}
    return Table(name, MappingProxyType(states), MappingProxyType(meanings))


#: An eval point, from the call of ``dispatch`` to its one outcome.
POINT = _table(
    "point",
    {
        NEW: ("not dispatched yet", {"dispatch": "queued"}),
        "queued": (
            "admitted or waiting for the admission window",
            {"export": "exporting", "pin": "pinning", "run": "running", "skip": "skipped"},
        ),
        "exporting": (
            "its snapshot is captured, written and verified",
            {"pin": "pinning", "run": "running", "skip": "skipped"},
        ),
        "pinning": (
            "it waits for its turn at the fleet, then its weights are loaded and proven",
            {"run": "running", "skip": "skipped"},
        ),
        "running": ("the evaluation generates and scores", {"finish": "done", "skip": "skipped"}),
        "done": ("it has a score", {}),
        "skipped": ("it has a reason instead of a score", {}),
    },
)

#: One inference engine of the fleet: a server process and everything below it.
ENGINE = _table(
    "engine",
    {
        NEW: ("not asked for yet", {"start": "starting"}),
        "starting": (
            "its process has been started and has not answered yet",
            {"ready": "ready", "suspect": "suspect", "stop": "stopped"},
        ),
        "ready": (
            "it answers and serves the weights that it was started with",
            {"pin": "pinning", "suspect": "suspect", "stop": "stopped"},
        ),
        "pinning": (
            "a snapshot's weights are being loaded; it serves nothing",
            {"serve": "serving", "suspect": "suspect", "stop": "stopped"},
        ),
        "serving": (
            "it has proven a snapshot's weights and may be asked",
            {"pin": "pinning", "suspect": "suspect", "stop": "stopped"},
        ),
        "suspect": (
            "a control call failed or was overdue: it is believed no more",
            {"kill": "dead", "stop": "stopped"},
        ),
        "dead": (
            "its whole process tree has been ended",
            {"restart": "restarting", "abandon": "lost", "stop": "stopped"},
        ),
        "restarting": (
            "it waits out its backoff before the next start",
            {"start": "starting", "stop": "stopped"},
        ),
        "lost": ("it died more often than allowed and stays down", {"stop": "stopped"}),
        "stopped": ("it was shut down in an orderly way", {}),
    },
)

#: One snapshot: a Hugging Face checkpoint directory that engines may load.
SNAPSHOT = _table(
    "snapshot",
    {
        NEW: (
            "nothing on disk, or a directory of somebody else's or of a run that died",
            {"write": "writing", "adopt": "whole", "inherit": "whole"},
        ),
        "writing": (
            "being written beside its final name",
            {"seal": "whole", "abandon": "discarded"},
        ),
        "whole": (
            "complete under its final name, with its manifest",
            {"verify": "verified", "reject": "invalid", "delete": "deleted", "release": "released"},
        ),
        "verified": (
            "checked against its manifest and its base; engines may read it",
            {
                "lease": "verified",
                "leave": "verified",
                "delete": "deleted",
                "release": "released",
            },
        ),
        "invalid": (
            "the check found it unfit; no engine hears of it",
            {"delete": "deleted", "release": "released"},
        ),
        "discarded": ("the writing failed and its remains were removed", {}),
        "deleted": ("removed from disk by its owner, after its last reader", {}),
        "released": ("let go without touching it: it was never vime's", {}),
    },
)

TABLES: Mapping[str, Table] = MappingProxyType({t.name: t for t in (POINT, ENGINE, SNAPSHOT)})


@cache
def table_hash() -> str:
    """Twelve hexadecimal digits that change with any state, trigger or destination."""
    rules = {name: table.edges() for name, table in TABLES.items()}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:12]
