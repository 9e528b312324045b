"""One line of a trace: its fields, and how a decoded JSON object becomes a record.

Reading is lenient about what an older writer did not know and about fields that a newer one
added, and strict about types: whatever passes here can be used without further checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from sys import intern
from typing import Any

SCHEMA = 1

CONTINUES = "continues"
"""In the detail of a resumed run's first record: the run that it continues."""

TAKEN_UP = "taken_up"
"""In the detail of a point's ``dispatch``: where an earlier run had left it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace.

    Attributes:
        schema: the version of this record's form.
        table_hash: the rules under which it was written (:func:`vime.fsm.tables.table_hash`).
        run_id: the run; unique in the world.
        node: which writer of the run; ``driver`` on one machine.
        seq: 0, 1, 2 … without a gap for each node.
        machine: ``point``, ``engine`` or ``snapshot``.
        id: which one.
        attempt: 0 for the first life of the thing, then 1, 2 … (an engine's restarts).
        trigger, source, dest: the transition; ``dest == source`` when it was rejected.
        rejected: the table forbade it, and nothing changed.
        reason: why, as a short name.
        detail: further facts.
        cause_seq: the record that made this one happen; of the same node, unless ``detail`` has
            ``cause_node`` (see :func:`cause_of`).
        weight_version: the weights that the thing carries or awaits.
        mono_ns: monotonic clock in nanoseconds: differences have a meaning, values have none.
        wall_ns: nanoseconds since the epoch, for people.
    """

    schema: int
    table_hash: str
    run_id: str
    node: str
    seq: int
    machine: str
    id: str
    attempt: int
    trigger: str
    source: str
    dest: str
    rejected: bool
    reason: str | None
    detail: dict[str, Any] | None
    cause_seq: int | None
    weight_version: str | None
    mono_ns: int
    wall_ns: int


FIELDS: tuple[str, ...] = tuple(Record.__slots__)


def cause_of(record: Record) -> tuple[str, int] | None:
    """Node and ``seq`` of the record that made ``record`` happen."""
    if record.cause_seq is None:
        return None
    node = record.detail.get("cause_node") if record.detail else None
    return (node if isinstance(node, str) else record.node), record.cause_seq


def taken_up_from(record: Record) -> str | None:
    """The run that had left a point, if ``record`` says that a later one goes on with it."""
    told = record.detail.get(TAKEN_UP) if record.detail and record.trigger == "dispatch" else None
    run_id = told.get("run_id") if isinstance(told, dict) else None
    return run_id if isinstance(run_id, str) else None


_TEXT, _COUNT = (str,), (int,)
_TYPES: dict[str, tuple[type, ...]] = {
    "schema": _COUNT,
    "table_hash": _TEXT,
    "run_id": _TEXT,
    "node": _TEXT,
    "seq": _COUNT,
    "machine": _TEXT,
    "id": _TEXT,
    "attempt": _COUNT,
    "trigger": _TEXT,
    "source": _TEXT,
    "dest": _TEXT,
    "rejected": (bool,),
    "reason": (str, type(None)),
    "detail": (dict, type(None)),
    "cause_seq": (int, type(None)),
    "weight_version": (str, type(None)),
    "mono_ns": _COUNT,
    "wall_ns": _COUNT,
}

#: What a writer that did not know the field meant by leaving it out. The other fields are the
#: transition itself: a line without them is no record.
_ABSENT: dict[str, Any] = {
    "schema": 0,
    "table_hash": "",
    "run_id": "",
    "node": "driver",
    "attempt": 0,
    "rejected": False,
    "reason": None,
    "detail": None,
    "cause_seq": None,
    "weight_version": None,
    "wall_ns": 0,
}

_SEQ_END = 1 << 62
_values = itemgetter(*FIELDS)
_sound_types: set[tuple[type, ...]] = set()
"""Combinations of types that were checked field by field before: the few that real traces have."""


def record_of(fields: object) -> Record:
    """Make a record of one decoded line.

    Raises:
        ValueError: it is no record; says which field is missing or of a wrong type.
    """
    if type(fields) is not dict:
        raise ValueError(f"a JSON object was expected, not {_json_type(fields)}")
    try:
        values = _values(fields)
    except KeyError:
        values = _values(_filled(fields))
    types = tuple(map(type, values))
    if types not in _sound_types:
        _check_types(values)
        _sound_types.add(types)
    schema, table_hash, run_id, node, seq, machine, *rest = values
    # Readers keep these with each machine: one string for all of its records, and not one each.
    record = Record(schema, table_hash, intern(run_id), intern(node), seq, intern(machine), *rest)
    if not 0 <= record.seq < _SEQ_END:
        raise ValueError(f"seq is {record.seq}; 0 or more, and below 2**62, was expected")
    return record


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    filled = {**_ABSENT, **fields}
    missing = [name for name in FIELDS if name not in filled]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return filled


def _check_types(values: tuple[Any, ...]) -> None:
    for name, value in zip(FIELDS, values, strict=True):
        if type(value) not in _TYPES[name]:
            expected = " or ".join(_TYPE_NAMES[kind] for kind in _TYPES[name])
            raise ValueError(f"{name} is {_json_type(value)}; {expected} was expected")


_TYPE_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a fraction",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def _json_type(value: object) -> str:
    return _TYPE_NAMES.get(type(value), type(value).__name__)
