"""No trace, however forged or damaged, makes a command fail with more than a line.

``VIME_FUZZ_EXAMPLES=500 pytest tests/fsm/test_fuzz_commands.py`` looks longer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fsm.test_read import damaged
from tests.fsm.traces import healthy_run
from vime.cli import main
from vime.fsm.record import FIELDS
from vime.fsm.tables import TABLES

pytestmark = pytest.mark.slow

COMMANDS = {
    "show": ["show", "{trace}"],
    "show-json": ["show", "{trace}", "--json", "--since", "1s", "--state", "skipped"],
    "timeline": ["timeline", "{trace}", "--since", "5", "--until", "1h", "--machine", "snapshot"],
    "timeline-json": ["timeline", "{trace}", "--json"],
    "check": ["check", "{trace}", "--ended"],
    "check-json": ["check", "{trace}", "--json", "--point", "10"],
    "why": ["why", "{trace}", "10"],
    "why-json": ["why", "{trace}", "engine:eval-0", "--json"],
    "stats": ["stats", "{trace}"],
    "stats-json": ["stats", "{trace}", "--json", "--engine", "eval-0"],
    "replay": ["replay", "{trace}"],
    "replay-json": ["replay", "{trace}", "--json", "--reason", "busy"],
    "replay-at-seq": ["replay", "{trace}", "--at", "7"],
    "replay-at-time": ["replay", "{trace}", "--at", "12.5", "--json"],
    "rerun": ["rerun", "{trace}"],
    "rerun-json": ["rerun", "{trace}", "--json"],
    "diff": ["diff", "{trace}", "{sound}"],
    "diff-json": ["diff", "{sound}", "{trace}", "--json"],
    "perfetto": ["export", "{trace}", "--format", "perfetto"],
    "mermaid": ["export", "{trace}", "--format", "mermaid"],
    "html": ["export", "{trace}", "--format", "html"],
    "merge": ["merge", "{trace}", "{sound}"],
    "follow": ["follow", "{trace}", "--idle", "0"],
    "follow-json": ["follow", "{trace}", "--idle", "0", "--json"],
}

names = [state for table in TABLES.values() for state in table.states]
triggers = [trigger for table in TABLES.values() for trigger in table.triggers]
small = st.integers(-3, 30)
numbers = small | st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(max_size=5) | st.sampled_from(
    ["10", "hf:10", "eval-0", "\x1b[2J", "</script>", "é"]
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
details = st.fixed_dictionaries(
    {},
    optional={
        "metrics": st.dictionaries(st.sampled_from(["eval/sums", "eval/step", "a"]), anything) | anything,
        "message": texts | anything,
        "engines": st.lists(texts, max_size=2) | anything,
        "max_in_flight": numbers | anything,
        "pending": anything,
        "stall_s": anything,
        "lag_steps": anything,
        "duration_s": anything,
        "deadlines_s": st.dictionaries(st.sampled_from(["stall", *names]), anything, max_size=3) | anything,
        "cause_node": texts | anything,
    },
)  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Records of the right form that tell of anything; most follow the tables."""
    made = []
    states: dict[tuple[str, str], str] = {}
    for seq in range(draw(st.integers(1, 12))):
        table = draw(st.sampled_from(list(TABLES.values())))
        name = draw(st.sampled_from(["10", "eval-0", "20"]) | texts)
        source = states.get((table.name, name), "new")
        legal = list(table.states.get(source, {}))
        trigger = draw(st.sampled_from(legal) if legal else st.sampled_from(triggers))
        dest = table.states.get(source, {}).get(trigger, source)
        record = {
            "schema": 1,
            "table_hash": "x",
            "run_id": "run-1",
            "node": "driver",
            "seq": seq,
            "machine": table.name,
            "id": name,
            "attempt": 0,
            "trigger": trigger,
            "source": source,
            "dest": dest,
            "rejected": not legal,
            "reason": None,
            "detail": draw(details | st.none()),
            "cause_seq": draw(st.none() | small),
            "weight_version": draw(st.none() | st.sampled_from(["run-1:10:a", "v"]) | texts),
            "mono_ns": seq * 10**9,
            "wall_ns": 10**18 + seq * 10**9,
        }
        if draw(st.integers(0, 4)) == 0:
            forged = draw(st.sampled_from(FIELDS))
            record[forged] = draw(FORGERIES.get(forged, texts) | anything)
        states[table.name, name] = dest
        made.append(record)
    return made


FORGERIES: dict[str, st.SearchStrategy[Any]] = {
    "seq": numbers,
    "attempt": numbers,
    "mono_ns": numbers,
    "wall_ns": numbers,
    "cause_seq": numbers,
    "schema": numbers,
    "rejected": st.booleans(),
    "source": st.sampled_from(names) | texts,
    "dest": st.sampled_from(names) | texts,
    "trigger": st.sampled_from(triggers) | texts,
    "machine": st.sampled_from(list(TABLES)) | texts,
}


def run(command: str, trace: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process; what it printed."""
    if not sound.exists():
        healthy_run(sound, num_points=1)
    capsys.readouterr()
    args = [arg.format(trace=trace, sound=sound) for arg in COMMANDS[command]]
    status = main(["trace", *args])
    out, err = capsys.readouterr()
    assert status in (0, 1, 2)
    streams = command in ("perfetto", "mermaid", "html", "merge", "follow", "follow-json")
    assert status != 2 or (err and (streams or not out))
    assert all(line.startswith("vime: ") for line in err.splitlines())
    assert "\x1b[2J" not in out + err
    return out


fuzz = settings(
    max_examples=int(os.environ.get("VIME_FUZZ_EXAMPLES", "15")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
every_command = pytest.mark.parametrize("command", COMMANDS)


@every_command
@fuzz
@given(data=st.data())
def test_no_forged_record_makes_a_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, data: st.DataObject
) -> None:
    trace, sound = tmp_path / "t", tmp_path / "sound"
    made = data.draw(records())
    trace.write_text("".join(json.dumps(record) + "\n" for record in made))
    out = run(command, trace, sound, capsys)
    if out and command.endswith(("-json", "perfetto", "time")) and "follow" not in command:
        json.loads(out)


@every_command
@fuzz
@given(data=st.data())
def test_no_damage_makes_a_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, data: st.DataObject
) -> None:
    trace, sound = tmp_path / "t", tmp_path / "sound"
    if not sound.exists():
        healthy_run(sound, num_points=1)
    trace.write_bytes(data.draw(damaged(sound.read_bytes())))
    run(command, trace, sound, capsys)
