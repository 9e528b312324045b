"""The trace commands: what they print, their JSON, their exit statuses."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fsm.traces import Run, edit, healthy_run
from vime.cli import main
from vime.fsm.follow import Follower
from vime.fsm.read import read_trace
from vime.trace_cli import follow as follow_command


class Vime:
    """Runs ``vime trace …`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *args: object, status: int = 0) -> str:
        self._capsys.readouterr()
        got = main(["trace", *map(str, args)])
        out, self.err = self._capsys.readouterr()
        assert got == status, self.err
        return out

    def json(self, *args: object, status: int = 0) -> Any:
        return json.loads(self(*args, "--json", status=status))


@pytest.fixture
def vime(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Vime:
    monkeypatch.setenv("COLUMNS", "120")
    return Vime(capsys)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    (tmp_path / "sound").mkdir()
    return healthy_run(tmp_path / "sound" / "trace.jsonl")


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A snapshot is deleted while it is read, and a state is forged."""
    run = Run(tmp_path / "faulty.jsonl")
    run.fire("snapshot", 10, "write")
    run.fire("snapshot", 10, "seal")
    run.fire("snapshot", 10, "verify")
    run.fire("snapshot", 10, "lease")
    run.fire("snapshot", 10, "delete")
    run.fire("point", 10, "dispatch")
    run.fire("point", 10, "export")
    run.trace.close()
    return edit(run.path, lambda f: {**f, "dest": "pinning"} if f["trigger"] == "export" else f)


# -- check and replay ------------------------------------------------------------------------


def test_check_of_a_sound_trace_lists_ten_invariants_and_ends_with_0(
    vime: Vime, sound: Path
) -> None:
    out = vime("check", sound, "--ended")
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:10]] == [[str(i), "ok"] for i in range(1, 11)]
    assert lines[10] == "42 records"
    found = vime.json("check", sound.parent)
    assert (found["records"], found["violations"], found["pending"]) == (42, [], 0)


def test_check_prints_each_violation_with_its_records_and_ends_with_1(
    vime: Vime, faulty: Path
) -> None:
    out = vime("check", faulty, status=1)
    first, *_ = out.split("invariant 9")
    assert first.splitlines()[0] == "invariant 6: snapshot 10 is deleted under 1 reader"
    assert "driver:3" in first.splitlines()[1]
    assert "driver:4" in first.splitlines()[2]
    assert " 6  1 fault " in out
    found = vime.json("check", faulty, status=1)
    assert found["counts"]["6"] == found["counts"]["9"] == 1
    assert [r["seq"] for r in found["violations"][0]["records"]] == [3, 4]


def test_check_with_a_filter_tells_only_what_is_asked_for(vime: Vime, faulty: Path) -> None:
    assert vime.json("check", faulty, "--point", "10", status=1)["counts"]["6"] == 0
    assert vime.json("check", faulty, "--until", "1s")["violations"] == []


def test_replay_of_a_sound_trace_ends_with_0(vime: Vime, sound: Path) -> None:
    assert (
        vime("replay", sound) == "42 records of 7 machines replayed: every state is as recorded\n"
    )
    assert vime.json("replay", sound) == {"records": 42, "machines": 7, "divergence": None}


def test_replay_stops_at_the_first_divergence_with_expected_and_found(
    vime: Vime, faulty: Path
) -> None:
    out = vime("replay", faulty, status=1)
    assert out.startswith("the replay diverges at: +6.0 s")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["field:", "dest"],
        ["expected:", "exporting"],
        ["found:", "pinning"],
    ]
    divergence = vime.json("replay", faulty, status=1)["divergence"]
    assert (divergence["field"], divergence["record"]["seq"]) == ("dest", 6)
    assert vime.json("replay", faulty, "--engine", "e")["divergence"] is None


@pytest.mark.parametrize("place", ["5", "driver:5", "34s", "2026-09-21T14:13:55+00:00"])
def test_replay_at_a_record_or_a_time_prints_every_state(
    vime: Vime, sound: Path, place: str
) -> None:
    states = {(m["machine"], m["id"]): m["state"] for m in vime.json("replay", sound, "--at", place)["machines"]}  # fmt: skip
    assert states == {("engine", "eval-0"): "ready", ("point", "10"): "exporting", ("snapshot", "10"): "whole"}  # fmt: skip
    out = vime("replay", sound, "--at", place)
    assert out.splitlines()[0] == "after 6 records"
    assert any(line.split()[:3] == ["snapshot", "10", "whole"] for line in out.splitlines())


@pytest.mark.parametrize("place", ["999", "other:5"])
def test_replay_at_a_record_that_is_not_there_is_bad_usage(
    vime: Vime, sound: Path, place: str
) -> None:
    assert vime("replay", sound, "--at", place, status=2) == ""
    assert vime.err == f"vime: {sound}: no record {place} in this trace\n"


# -- why, stats, diff, timeline ----------------------------------------------------------------


def test_why_tells_the_chain_and_the_life(vime: Vime, sound: Path) -> None:
    lines = vime("why", sound, "20").splitlines()
    assert lines[0] == "point 20 was scored on run-1:20:000000000014"
    assert "because engine eval-0 proved that it serves run-1:20:" in lines[3]
    assert lines[lines.index("its own life:") + 1].endswith("point 20 was dispatched")
    (told,) = vime.json("why", sound, "engine:eval-0")
    assert told["machine"] == "engine"
    assert told["own"][0]["text"] == "engine eval-0 was started"


def test_why_prints_a_whole_message_and_not_only_its_headline(vime: Vime, tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    message = "Traceback (most recent call last):\n  File x\nValueError: bad prompt"
    run.fire("point", 1, "skip", reason="crashed", detail={"message": message})
    run.trace.close()
    lines = vime("why", run.path, "1").splitlines()
    assert lines[0] == "point 1 was skipped: crashed: ValueError: bad prompt"
    assert lines[1:4] == [f"  | {line}" for line in message.splitlines()]


def test_why_of_an_unknown_point_names_those_that_are_there(vime: Vime, sound: Path) -> None:
    vime("why", sound, "7", status=2)
    assert vime.err == f"vime: {sound}: no point '7'; the trace has 10, 20, 30\n"
    vime("why", sound, "snapshot:7", status=2)
    assert "no snapshot '7'; the trace has 10, 20, 30" in vime.err


def test_stats_print_a_row_a_state(vime: Vime, sound: Path) -> None:
    lines = vime("stats", sound).splitlines()
    assert lines[0] == "42 records over 1m22s; points: 3 done"
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:]}
    assert rows["point", "exporting"] == ["3", *["5.0", "s"] * 4]
    assert rows["point", "(stall)"] == ["3", *["250", "ms"] * 4]
    found = vime.json("stats", sound)
    assert found["ends"] == {"done": 3}
    assert found["lag_steps"] == {"count": 3, "p50": 1, "p90": 1, "p99": 1, "max": 1}


def test_diff_of_like_runs_ends_with_0_and_of_unlike_ones_with_1(
    vime: Vime, sound: Path, tmp_path: Path
) -> None:
    assert vime("diff", sound, sound).startswith("the behaviour is the same: 7 machines")
    other = edit(
        healthy_run(tmp_path / "b"),
        lambda f: {**f, "reason": "hung"} if f["trigger"] == "stop" else f,
    )
    out = vime("diff", sound, other, status=1).splitlines()
    assert out[0].startswith("the first difference: engine eval-0, after 8 same steps")
    assert out[1].startswith("  A: stop → stopped (seq 41")
    assert out[2].startswith("  B: stop → stopped: hung (seq 41")
    found = vime.json("diff", sound, other, status=1)
    assert [difference["id"] for difference in found["differences"]] == ["eval-0"]


def test_timeline_zooms_and_chooses(vime: Vime, sound: Path) -> None:
    lines = vime("timeline", sound, "--machine", "snapshot").splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["10", "20", "30"]
    zoomed = vime("timeline", sound, "--since", "40s", "--until", "45s", "--point", "10")
    assert set(zoomed.splitlines()[0].split()[2]) == {"█", "✓"}
    (life,) = vime.json("timeline", sound, "--point", "10")
    assert life["spans"][0] == {"state": "queued", "start_s": 31.0, "end_s": 32.0}
    assert vime("timeline", sound, "--point", "7").startswith("nothing to show")
    assert vime("show", sound, "--point", "7").splitlines()[1].startswith("nothing to show")


@pytest.mark.parametrize("columns", [1, 20, 40, 80])
@pytest.mark.parametrize("command", ["show", "stats", "replay --at 30"])
def test_a_narrow_terminal_cuts_no_column_of_a_table(
    vime: Vime, sound: Path, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    name, *options = command.split()

    def words() -> list[str]:
        found = vime(name, sound, *options).split()
        return [word for word in found if word[:1].isalnum() and ":" not in word]

    wide = words()
    monkeypatch.setenv("COLUMNS", str(columns))
    told = "".join(words())
    heads = "state", "queue", "score", "skipped", "weights", "machine", "p99", "since"
    assert all(head in told for head in heads if head in wide)
    assert "…" not in vime(name, sound, *options)


def test_only_the_latest_machines_are_shown_unless_all_are_asked_for(
    vime: Vime, sound: Path
) -> None:
    assert [p["id"] for p in vime.json("show", sound, "--last", "2")["points"]] == ["20", "30"]
    assert vime.err == "vime: 1 earlier point left out; --last 0 shows all\n"
    assert len(vime.json("show", sound, "--last", "0")["points"]) == 3
    vime("show", sound, "--last", "-1", status=2)


# -- export and merge --------------------------------------------------------------------------


def test_perfetto_gets_a_slice_a_stay_and_a_row_a_machine(vime: Vime, sound: Path) -> None:
    events = json.loads(vime("export", sound, "--format", "perfetto"))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and rows[e["tid"]] == "point 10"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("queued", 31e6, 1e6),
        ("exporting", 32e6, 5e6),
        ("pinning", 37e6, 3e6),
        ("running", 40e6, 5e6),
    ]
    assert slices[3]["args"]["weight_version"] == "run-1:10:00000000000a"
    pending = [e["args"]["points"] for e in events if e["ph"] == "C"]
    assert pending == [1, 0] * 3
    ends = [e["name"] for e in events if e["ph"] == "i" and rows[e["tid"]].startswith("point")]
    assert ends == ["done"] * 3
    assert all({"name", "ph", "pid"} <= set(event) for event in events)


def test_mermaid_gets_an_arrow_a_way_with_its_count_and_the_median_stay(
    vime: Vime, sound: Path
) -> None:
    lines = [line.strip() for line in vime("export", sound, "--format", "mermaid").splitlines()]
    assert lines[0] == "stateDiagram-v2"
    assert "[*] --> point_queued : dispatch ×3" in lines
    assert "point_exporting --> point_pinning : pin ×3, after 5.0 s" in lines
    assert "point_running --> point_done : finish ×3, after 5.0 s" in lines
    assert "engine_starting --> engine_ready : ready ×1, after 30 s" in lines
    assert "snapshot_verified --> snapshot_deleted : delete ×3, after 12 s" in lines
    assert "point_done --> [*]" in lines
    assert lines.count("}") == 3
    only = vime("export", sound, "--format", "mermaid", "--point", "10")
    assert "dispatch ×1" in only
    assert "engine" not in only


@pytest.mark.parametrize("format", ["perfetto", "mermaid", "html"])
def test_an_export_goes_to_a_file_and_a_failed_one_leaves_none(
    vime: Vime, sound: Path, tmp_path: Path, format: str
) -> None:
    target = tmp_path / "out"
    assert vime("export", sound, "--format", format, "-o", target) == ""
    printed = vime("export", sound, "--format", format)
    assert target.read_text() == printed
    target.unlink()
    (tmp_path / "bad").write_text("nonsense\n")
    vime("export", tmp_path / "bad", "--format", format, "-o", target, status=2)
    vime("export", sound, "--format", format, "-o", tmp_path / "no" / "where", status=2)
    assert vime.err.endswith("No such file or directory\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "sound"]
    vime("export", sound, "--format", format, "--json", status=2)
    assert vime.json("export", sound, "--format", format, "-o", target)["records"] == 42


def test_merge_writes_one_trace_that_replays(vime: Vime, sound: Path, tmp_path: Path) -> None:
    other = healthy_run(tmp_path / "other")
    edit(other, lambda f: {**f, "node": "b"})
    merged = tmp_path / "merged"
    assert vime("merge", sound, other, "-o", merged) == "84 records of 2 nodes merged\n"
    assert vime("replay", merged).startswith("84 records of 14 machines")
    assert vime("merge", sound, other) == merged.read_text()
    assert [f for f in read_trace(merged) if f.node == "driver"] == list(read_trace(sound))
    vime("merge", sound, other, "-o", other, status=2)
    assert "is one of the traces to read" in vime.err


# -- follow ------------------------------------------------------------------------------------


def test_a_follower_gives_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    lines = healthy_run(tmp_path / "source").read_bytes().splitlines(keepends=True)
    path = tmp_path / "t"
    path.write_bytes(lines[0] + lines[1][:30])
    with Follower(path) as follower:
        assert [record.seq for record in follower.poll()] == [0]
        assert follower.poll() == []
        with path.open("ab") as file:
            file.write(lines[1][30:] + lines[3])  # a gap is no reason to wait
        assert [record.seq for record in follower.poll()] == [1, 3]
        path.write_bytes(lines[0])
        assert [record.seq for record in follower.poll()] == [0]
        assert follower.restarted == 1
        (tmp_path / "new").write_bytes(b"".join(lines[:2]))
        (tmp_path / "new").replace(path)
        assert [record.seq for record in follower.poll()] == [0, 1]
        path.unlink()
        assert follower.poll() == []


def test_follow_prints_what_a_running_run_writes(
    vime: Vime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    waits = []

    def wait(seconds: float) -> None:  # the run goes on while the command waits
        waits.append(seconds)
        if len(waits) == 1:
            run.fire("point", 1, "skip", reason="busy")

    monkeypatch.setattr(follow_command.time, "sleep", wait)
    monkeypatch.setattr(follow_command.time, "monotonic", lambda: float(len(waits)))
    lines = vime("follow", run.path, "--idle", "3").splitlines()
    run.trace.close()
    assert "dispatch (new → queued)" in lines[0]
    assert lines[1].endswith("skip (queued → skipped)  busy")
    assert len(lines) == 2
    assert len(waits) == 4
    vime("follow", run.path, "--idle", "never", status=2)


def test_an_interrupted_follow_is_quiet(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    command = [sys.executable, "-m", "vime.cli", "trace", "follow", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for seq in range(16):
            assert json.loads(child.stdout.readline())["seq"] == seq
        child.send_signal(2)
        assert child.wait(timeout=30) == 130
        assert child.stderr.read() == b""


@pytest.mark.parametrize("command", ["show", "timeline", "replay", "check", "stats", "export"])
def test_an_empty_file_is_the_trace_of_a_run_that_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "trace.jsonl").touch()
    more = ["--format", "perfetto"] if command == "export" else []
    assert main(["trace", command, str(tmp_path), *more]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("empty: its run has not written a record yet")


@pytest.mark.parametrize("words", [["why", "1"], ["rerun"]])
def test_to_ask_an_empty_file_for_a_point_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "t").touch()
    assert main(["trace", words[0], str(tmp_path / "t"), *words[1:]]) == 2
    assert "Traceback" not in capsys.readouterr().err


# -- step --------------------------------------------------------------------------------------


class Screen:
    """``vime trace replay --step`` in a terminal of its own."""

    def __init__(self, path: Path, *args: str) -> None:
        self.terminal, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "vime.cli", "trace", "replay", str(path), "--step", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            start_new_session=True,
        )
        os.close(theirs)

    def shows(self, text: str) -> str:
        """Wait until the screen shows ``text`` and then the line of keys."""
        seen = ""
        while not (text in seen and "q: quit" in seen.split(text)[-1]):
            assert select.select([self.terminal], [], [], 30)[0], seen
            seen += os.read(self.terminal, 65536).decode()
        return seen

    def press(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def quit(self) -> int:
        self.press("q")
        status = self._child.wait(timeout=30)
        os.close(self.terminal)
        return status


def test_step_walks_forth_and_back_by_key(sound: Path) -> None:
    screen = Screen(sound)
    screen.shows("record 1 ")
    screen.press("n")
    screen.shows("record 2 ")
    screen.press("\x1b[C")
    assert "queued" in screen.shows("record 3 ")
    screen.press("p")
    assert "queued" not in screen.shows("record 2 ")
    screen.press("G")
    screen.shows("record 42 ")
    screen.press("g")
    screen.shows("record 1 ")
    assert screen.quit() == 0


def test_step_stops_only_at_what_is_asked_for(sound: Path) -> None:
    screen = Screen(sound, "--point", "20")
    screen.shows("record 16 ")
    screen.press("p")
    screen.shows("record 16 ")  # there is none before
    screen.press("G")
    screen.shows("record 26 ")
    assert screen.quit() == 0


def test_step_shows_a_divergence(faulty: Path) -> None:
    screen = Screen(faulty)
    screen.shows("record 1 ")
    screen.press("G")
    assert "DIVERGES" in screen.shows("record 7 ")
    assert screen.quit() == 0


def test_step_without_a_terminal_is_bad_usage(vime: Vime, sound: Path) -> None:
    vime("replay", sound, "--step", status=2)
    assert vime.err == "vime: --step needs a terminal: it waits for keys\n"


def test_a_walk_goes_back_further_than_it_remembers(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime.fsm.filters import Filter
    from vime.trace_cli import step

    monkeypatch.setattr(step, "_KEEP", 3)
    walk = step.Walk(read_trace(sound), Filter())
    states = {}
    while walk.next():
        states[walk.position] = {key: p.state for key, p in walk.replay.machines.items()}
    assert walk.position == 42
    while walk.back():
        assert {key: p.state for key, p in walk.replay.machines.items()} == states[walk.position]
    assert walk.position == 1
    assert walk.next()
    assert walk.position == 2


# -- all of them -------------------------------------------------------------------------------


def test_a_pipe_is_read_by_commands_that_read_once_and_refused_by_the_others(
    vime: Vime, sound: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command, status in ((["stats", pipe], 0), (["why", pipe, "10"], 2)):
        writer = threading.Thread(target=lambda: pipe.write_bytes(sound.read_bytes()))
        writer.start()
        vime(*command, status=status)
        writer.join()
    assert vime.err == f"vime: {pipe}: a pipe can be read once only; give a file\n"


@pytest.mark.parametrize(
    "command",
    ["show", "timeline", "check", "stats", "replay", "follow", "why", "diff", "merge", "export"],
)
def test_every_command_has_a_help_with_its_statuses(vime: Vime, command: str) -> None:
    out = vime(command, "--help")
    assert "Exit status: 0 fine, 1 the trace shows a fault" in out
    assert "--json" in out
    assert "--since TIME" in out
    vime(command, status=2)
    assert vime.err.startswith(f"vime trace {command}: the following arguments are required")
