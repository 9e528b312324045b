"""The docs' page on states says what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vime.fsm.diagram import main, markdown_table, mermaid, page
from vime.fsm.record import FIELDS
from vime.fsm.tables import NEW, TABLES, Table
from vime.trace_cli import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "states.md"
every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def test_the_page_in_the_repository_has_not_drifted_from_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@every_table
def test_the_diagram_shows_exactly_the_edges_of_the_table(table: Table) -> None:
    drawn = set()
    for source, dest, triggers in re.findall(r"    (\S+) --> (\w+): (.+)", mermaid(table)):
        for trigger in triggers.split(", "):
            drawn.add((NEW if source == "[*]" else source, trigger, dest))
    assert drawn == set(table.edges())
    assert set(re.findall(r"(\w+) --> \[\*\]", mermaid(table))) == table.terminal


@every_table
def test_the_table_of_the_page_has_a_row_for_each_state(table: Table) -> None:
    rows = [line.split(" | ")[0] for line in markdown_table(table).splitlines()[2:]]
    assert rows == [f"| `{state}`" for state in table.states]


def test_check_tells_a_page_that_has_drifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "states.md"
    assert main([str(path), "--check"]) == 1
    assert "run `make docs`" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert main([str(path), "--check"]) == 0
    path.write_text(path.read_text().replace("queued", "waiting"))
    assert main([str(path), "--check"]) == 1


def test_the_page_on_the_trace_names_every_field_and_every_command() -> None:
    text = PAGE.with_name("trace.md").read_text()
    fields, commands = text.split("## Commands")
    rows = [line.split("|")[1] for line in fields.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(FIELDS)
    named = re.findall(r"^\| `(\w+) [A-Z]", commands, re.MULTILINE)
    assert sorted(named) == sorted(name for name, _, _ in COMMANDS)
