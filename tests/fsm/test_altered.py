"""Of a trace with one altered record, replay or check names a fault, or the change means nothing.

What means nothing is listed in ``docs/trace.md``; here each kind is tried on every record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.fsm.record import FIELDS, Record
from vime.fsm.replay import replay
from vime.fsm.tables import TABLES

TESTS = Path(__file__).parents[1]
FAR_NS = 10**15


def another(values: Any, value: str) -> str:
    return next(other for other in values if other != value)


#: Change → field and new value; ``None`` for what is done to the list of records.
CHANGES: dict[str, tuple[str, Callable[[Record], Any]]] = {
    "run_id": ("run_id", lambda r: "another"),
    "node": ("node", lambda r: "another"),
    "seq": ("seq", lambda r: r.seq + 1000),
    "machine": ("machine", lambda r: another(TABLES, r.machine)),
    "an unknown machine": ("machine", lambda r: "router"),
    "id": ("id", lambda r: f"{r.id}9"),
    "attempt": ("attempt", lambda r: r.attempt + 1),
    "trigger": ("trigger", lambda r: another(TABLES[r.machine].triggers, r.trigger)),
    "source": ("source", lambda r: another(TABLES[r.machine].states, r.source)),
    "dest": ("dest", lambda r: another(TABLES[r.machine].states, r.dest)),
    "rejected": ("rejected", lambda r: not r.rejected),
    "weight_version": ("weight_version", lambda r: f"{r.weight_version}x"),
    "a later cause": ("cause_seq", lambda r: r.seq + 1),
    "no cause": ("cause_seq", lambda r: None),
    "much later": ("mono_ns", lambda r: r.mono_ns + FAR_NS),
    "much earlier": ("mono_ns", lambda r: r.mono_ns - FAR_NS),
}

MEANINGLESS: dict[str, Callable[[Record, list[Record]], bool]] = {
    "seq": lambda r, every: r is every[0],
    "dropped": lambda r, every: r is every[0],
    "weight_version": lambda r, every: (
        (r.machine == "engine" and r.trigger not in ("pin", "serve")) or r.reason == "busy"
    ),
    "no cause": lambda r, every: r.source == "new",
    "much later": lambda r, every: r is every[-1],
    "much earlier": lambda r, every: r is every[0],
}  # fmt: skip


def objects(records: list[Record]) -> bool:
    return replay(records)[1] is not None or any(True for _ in check(records, ended=True))


@pytest.fixture(scope="module", params=["rerun/real_run", "traces/two_engines"])
def records(request: pytest.FixtureRequest) -> list[Record]:
    found = list(read_trace(TESTS / f"{request.param}.jsonl"))
    assert not objects(found)
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_record_is_objected_to_unless_the_change_means_nothing(
    records: list[Record], change: str
) -> None:
    field, alter = CHANGES[change]
    for index, record in enumerate(records):
        altered = replace(record, **{field: alter(record)})
        noticed = objects([*records[:index], altered, *records[index + 1 :]])
        means_nothing = MEANINGLESS.get(change, lambda *_: False)(record, records)
        assert noticed or means_nothing, altered


@pytest.mark.parametrize("change", ["dropped", "doubled", "swapped"])
def test_a_record_that_is_missing_doubled_or_out_of_place_is_objected_to(
    records: list[Record], change: str
) -> None:
    for index, record in enumerate(records[:-1]):
        before, after = records[:index], records[index + 1 :]
        forged = {
            "dropped": [*before, *after],
            "doubled": [*before, record, record, *after],
            "swapped": [*before, after[0], record, *after[1:]],
        }[change]
        means_nothing = MEANINGLESS.get(change, lambda *_: False)(record, records)
        assert objects(forged) or means_nothing, record


def test_every_field_is_altered_here_or_named_as_meaningless_on_the_page() -> None:
    page = (TESTS.parent / "docs" / "trace.md").read_text()
    section = page.partition("## What a changed record gives away")[2].partition("\n## ")[0]
    altered = {field for field, _ in CHANGES.values()}
    for name in FIELDS:
        assert name in altered or f"`{name}`" in section, name
