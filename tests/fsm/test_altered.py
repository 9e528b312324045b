"""Of a trace with one altered record, replay or check names a fault, or the change means nothing.

What means nothing is listed in ``docs/trace.md``; here each kind is tried on every record.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rerun.test_rerun import recorded
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.fsm.record import FIELDS, Record
from vime.fsm.replay import replay
from vime.fsm.tables import TABLES

TESTS = Path(__file__).parents[1]
FAR_NS = 10**15
FIRST = int(os.environ.get("VIME_SEED", "0"))


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


def ends_of_runs(every: list[Record]) -> tuple[list[Record], list[Record]]:
    """The first and the last record of each run of a resumed trace."""
    last = {record.run_id: record for record in every}
    first = {record.run_id: record for record in reversed(every)}
    return list(first.values()), list(last.values())


def is_first(record: Record, every: list[Record]) -> bool:
    return record in ends_of_runs(every)[0]


def is_last(record: Record, every: list[Record]) -> bool:
    return record in ends_of_runs(every)[1]


def is_alone(record: Record, every: list[Record]) -> bool:
    """Whether nothing else was heard of its machine, for its run was killed right then."""
    name = record.run_id, record.machine, record.id
    return sum((r.run_id, r.machine, r.id) == name for r in every) == 1


def is_first_to_name_weights(record: Record, every: list[Record]) -> bool:
    name = record.run_id, record.machine, record.id
    of_it = [r for r in every if (r.run_id, r.machine, r.id) == name and r is not record]
    return all(r.weight_version is None for r in of_it)


MEANINGLESS: dict[str, Callable[[Record, list[Record]], bool]] = {
    "seq": lambda r, every: r is every[0],
    "run_id": lambda r, every: is_alone(r, every) and is_last(r, every),
    "id": is_alone,
    "attempt": is_alone,
    "dropped": lambda r, every: r is every[0],
    "weight_version": lambda r, every: (
        (r.machine == "engine" and r.trigger not in ("pin", "serve"))
        or (r.trigger == "skip" and is_first_to_name_weights(r, every))
        or is_alone(r, every)
    ),
    "no cause": lambda r, every: r.source == "new",
    "much later": is_last,
    "much earlier": is_first,
}


def objects(records: list[Record]) -> bool:
    return replay(records)[1] is not None or any(True for _ in check(records, ended=True))


@pytest.fixture(
    scope="module", params=["rerun/real_run", "traces/two_engines", "traces/resumed_real"]
)
def records(request: pytest.FixtureRequest) -> list[Record]:
    found = list(read_trace(TESTS / f"{request.param}.jsonl"))
    assert not objects(found)
    return found


def assert_noticed(records: list[Record], change: str, index: int, forged: list[Record]) -> None:
    means_nothing = MEANINGLESS.get(change, lambda *_: False)(records[index], records)
    assert objects(forged) or means_nothing, (change, records[index])


@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_record_is_objected_to_unless_the_change_means_nothing(
    records: list[Record], change: str
) -> None:
    for index in range(len(records)):
        assert_noticed(records, change, index, altered(records, change, index))


def altered(records: list[Record], change: str, index: int) -> list[Record]:
    field, alter = CHANGES[change]
    forged = replace(records[index], **{field: alter(records[index])})
    return [*records[:index], forged, *records[index + 1 :]]


def misplaced(records: list[Record], change: str, index: int) -> list[Record]:
    record, before, after = records[index], records[:index], records[index + 1 :]
    return {
        "dropped": [*before, *after],
        "doubled": [*before, record, record, *after],
        "swapped": [*before, *after[:1], record, *after[1:]],
    }[change]


@pytest.mark.parametrize("change", ["dropped", "doubled", "swapped"])
def test_a_record_that_is_missing_doubled_or_out_of_place_is_objected_to(
    records: list[Record], change: str
) -> None:
    for index in range(len(records) - 1):
        assert_noticed(records, change, index, misplaced(records, change, index))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_whatever_trace_the_dispatcher_makes_is_sound_and_no_altered_record_of_it_passes(
    block: int,
) -> None:
    for seed in range(FIRST + block, FIRST + 60, 2):
        rng, records = random.Random(seed), recorded(seed)
        assert not objects(records), f"VIME_SEED={seed}"
        for change in CHANGES:
            for index in rng.sample(range(len(records)), min(4, len(records))):
                forged = altered(records, change, index)
                if forged != records:
                    assert_noticed(records, change, index, forged)
        for change in ("dropped", "doubled", "swapped"):
            for index in rng.sample(range(len(records) - 1), min(4, len(records) - 1)):
                assert_noticed(records, change, index, misplaced(records, change, index))


def test_every_field_is_altered_here_or_named_as_meaningless_on_the_page() -> None:
    page = (TESTS.parent / "docs" / "trace.md").read_text()
    section = page.partition("## What a changed record gives away")[2].partition("\n## ")[0]
    altered = {field for field, _ in CHANGES.values()}
    for name in FIELDS:
        assert name in altered or f"`{name}`" in section, name
