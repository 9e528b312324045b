"""The docs' page on states, made from the tables: ``python -m vime.fsm.diagram docs/states.md``.

``--check`` writes nothing, and fails when the page is not what the tables say.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.fsm.generated import write_or_check
from vime.fsm.tables import NEW, TABLES, Table, table_hash

_HEAD = """\
# States

Made from `vime/fsm/tables.py` by `make docs`; do not edit. Table hash: `{hash}`.

Every eval point, engine and snapshot is a machine over one of these tables. A trigger that its
row does not list is illegal there: it raises, changes nothing, and is traced as rejected.
Nothing leaves a terminal state. Each transition is one record of the trace, which
`vime trace` shows, checks and replays.
"""

_TITLES = {"point": "Eval point", "engine": "Engine", "snapshot": "Snapshot"}


def mermaid(table: Table) -> str:
    """The state diagram of one table; triggers between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for source, trigger, dest in table.edges():
        arrows.setdefault((source, dest), []).append(trigger)
    lines = ["stateDiagram-v2"]
    for (source, dest), triggers in arrows.items():
        start = "[*]" if source == NEW else source
        lines.append(f"    {start} --> {dest}: {', '.join(triggers)}")
    lines += [f"    {state} --> [*]" for state in table.states if state in table.terminal]
    return "\n".join(lines)


def markdown_table(table: Table) -> str:
    """One row a state: its meaning, and where each legal trigger leads."""
    lines = ["| State | Meaning | Trigger → next state |", "|---|---|---|"]
    for state, ways in table.states.items():
        legal = ", ".join(f"`{trigger}` → {dest}" for trigger, dest in ways.items())
        lines.append(f"| `{state}` | {table.meanings[state]} | {legal or 'terminal'} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page in Markdown."""
    parts = [_HEAD.format(hash=table_hash())]
    for name, table in TABLES.items():
        parts.append(f"## {_TITLES.get(name, name)}\n")
        parts.append(f"```mermaid\n{mermaid(table)}\n```\n")
        parts.append(markdown_table(table) + "\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page; 0 when it is as it should be."""
    return write_or_check(
        page(),
        argv,
        prog="python -m vime.fsm.diagram",
        description=__doc__,
        source="vime/fsm/tables.py",
    )


if __name__ == "__main__":
    sys.exit(main())
