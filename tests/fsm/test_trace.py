"""The trace file: whole lines, gapless numbers, private, and in the file before ``fire`` returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from vime.fsm.encode import MAX_LINE
from vime.fsm.machine import TracedMachine
from vime.fsm.read import next_seq, read_trace
from vime.fsm.tables import POINT, table_hash
from vime.fsm.trace import FIELDS, SCHEMA, Record, Trace


def write(trace: Trace, **changes: object) -> Record:
    fields = {
        "machine": "point",
        "id": "40",
        "attempt": 0,
        "trigger": "dispatch",
        "source": "new",
        "dest": "queued",
        "rejected": False,
        "reason": None,
        "detail": None,
        "cause_seq": None,
        "weight_version": None,
    }
    return trace.write(**{**fields, **changes})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_record_is_one_json_line_with_every_field(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Trace(path, "run-1", mono_ns=lambda: 5, wall_ns=lambda: 7) as trace:
        record = write(trace, detail={"force": True}, weight_version="run-1:40:abc")
        (line,) = lines(path)  # it is there before the trace is closed
    assert tuple(line) == FIELDS
    assert line == {name: getattr(record, name) for name in FIELDS}
    assert (line["schema"], line["table_hash"], line["node"]) == (SCHEMA, table_hash(), "driver")
    assert (line["mono_ns"], line["wall_ns"]) == (5, 7)


def test_the_file_is_readable_by_its_owner_alone_also_when_it_was_there_before(
    tmp_path: Path,
) -> None:
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    old.touch(mode=0o644)
    for path in (fresh, old):
        Trace(path, "run").close()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_is_one_write_system_call(tmp_path: Path) -> None:
    program = f"""
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import POINT
from vime.fsm.trace import Trace
from pathlib import Path

def calls():
    text = Path("/proc/self/io").read_text()
    return int(text.split("syscw: ")[1].split()[0])

trace = Trace(Path({str(tmp_path / "t")!r}), "run")
machines = [TracedMachine(POINT, str(i), trace) for i in range(100)]
before = calls()
for machine in machines:
    machine.fire("dispatch", detail={{"text": "x" * 9000}})
print(calls() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(out.stdout) == 100
    assert len(lines(tmp_path / "t")) == 100


def test_seq_has_no_gap_and_lines_stay_whole_under_threads(tmp_path: Path) -> None:
    path = tmp_path / "t"
    start = threading.Barrier(8)

    def life(thread: int) -> None:
        start.wait()
        for i in range(200):
            TracedMachine(POINT, f"{thread}-{i}", trace).fire("dispatch", detail={"x": "y" * 500})

    with Trace(path, "run") as trace:
        threads = [threading.Thread(target=life, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [line["seq"] for line in lines(path)] == list(range(1600))
    times = [line["mono_ns"] for line in lines(path)]
    assert times == sorted(times)


def test_kill_9_loses_nothing_that_fire_returned_for(tmp_path: Path) -> None:
    path = tmp_path / "t"
    program = f"""
import sys
from pathlib import Path
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import POINT
from vime.fsm.trace import Trace
trace = Trace(Path({str(path)!r}), "run")
for i in range(10**9):
    seq = TracedMachine(POINT, str(i), trace).fire("dispatch").seq
    sys.stdout.write(f"{{seq}}\\n"); sys.stdout.flush()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child:
        for _ in range(300):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        acknowledged = child.stdout.read().splitlines()
    seqs = [record.seq for record in read_trace(path)]
    assert seqs == list(range(len(seqs)))
    whole = [line for line in acknowledged if line][:-1]  # the last one may be cut itself
    assert len(seqs) > int(whole[-1]) if whole else len(seqs) >= 300


def test_a_continued_trace_never_glues_a_record_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Trace(path, "run") as trace:
        for _ in range(3):
            write(trace)
    path.write_bytes(path.read_bytes()[:-40])
    assert next_seq(path) == 2
    with Trace(path, "run", first_seq=next_seq(path)) as trace:
        write(trace)
    trace_file = read_trace(path)
    assert [record.seq for record in trace_file] == [0, 1, 2]
    (problem,) = trace_file.problems
    assert problem.startswith("1 line left out: line 3 is not JSON")


def test_next_seq_is_0_without_a_trace_and_counts_each_node_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "t"
    assert next_seq(path) == 0
    for node, first in (("driver", 0), ("b", 7)):
        with Trace(path, "run", node, first_seq=first) as trace:
            write(trace)
    assert (next_seq(path), next_seq(path, "b"), next_seq(path, "c")) == (1, 8, 0)


def test_a_full_disk_raises_and_the_next_record_stands_on_a_line_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    program = f"""
import resource, signal
from pathlib import Path
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import POINT
from vime.fsm.trace import Trace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trace = Trace(Path({str(path)!r}), "run")
machine = TracedMachine(POINT, "40", trace)
machine.fire("dispatch")
size = Path({str(path)!r}).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        machine.fire("export")
        raise SystemExit("the write did not fail")
    except OSError:
        assert machine.state == "queued", machine.state
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
machine.fire("export")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    trace = read_trace(path)
    assert [(record.seq, record.trigger) for record in trace] == [(0, "dispatch"), (1, "export")]
    assert len(trace.problems) == 1


def test_details_that_json_lacks_are_written_all_the_same(tmp_path: Path) -> None:
    class Colour(StrEnum):
        RED = "red"

    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no")

    cycle: dict = {}
    cycle["self"] = cycle
    details = [
        ({"a": np.float32(0.5), "b": np.int64(3)}, {"a": 0.5, "b": 3}),
        ({"path": Path("/x"), 3: {4}}, {"path": "/x", "3": [4]}),
        ({"bad": "\ud800", "path": Path(os.fsdecode(b"\xff"))}, {"bad": r"\ud800", "path": r"\udcff"}),
        ({"huge": 1 << 80}, {"huge": str(1 << 80)}),
        ({"nan": float("nan")}, {"nan": None}),
        ({"enum": Colour.RED}, {"enum": "red"}),
        ({"rude": Rude()}, {"rude": "<Rude without a text: RuntimeError>"}),
        ({"lines": "a\nb\r\u2028"}, {"lines": "a\nb\r\u2028"}),
        ({"array": np.zeros(2)}, {"array": "[0. 0.]"}),
    ]  # fmt: skip
    path = tmp_path / "t"
    with Trace(path, "run") as trace:
        for detail, _ in details:
            write(trace, detail=detail)
        write(trace, detail=cycle)
    read = read_trace(path)
    records = list(read)
    assert not read.problems
    assert [record.detail for record in records[:-1]] == [expected for _, expected in details]
    assert "…" in json.dumps(records[-1].detail, ensure_ascii=False)


@pytest.mark.parametrize(
    "detail",
    [{"message": "x" * (3 * MAX_LINE)}, {"many": list(range(MAX_LINE))}],
    ids=["a long text", "many numbers"],
)
def test_a_record_above_the_longest_line_keeps_its_transition_and_loses_detail(
    tmp_path: Path, detail: dict
) -> None:
    path = tmp_path / "t"
    with Trace(path, "run") as trace:
        write(trace, detail=detail, reason="r")
    assert path.stat().st_size <= MAX_LINE
    (record,) = read_trace(path)
    assert (record.trigger, record.reason) == ("dispatch", "r")
    assert record.detail is not None
    assert str(record.detail.get("message", "")).endswith("…") or record.detail["dropped_bytes"]


def test_a_listener_gets_each_record_and_cannot_break_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = Trace(None, "run")
    seen: list[Record] = []

    def broken(record: Record) -> None:
        raise RuntimeError("broken listener")

    trace.subscribe(broken)
    trace.subscribe(seen.append)
    machine = TracedMachine(POINT, "40", trace)
    record = machine.fire("dispatch")
    assert seen == [record]
    assert machine.state == "queued"
    assert "a listener failed on trace record 0 of point 40" in caplog.text


def test_a_closed_trace_refuses_further_records(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t", "run")
    trace.close()
    trace.close()
    with pytest.raises(ValueError, match="closed"):
        write(trace)


def test_a_trace_is_not_inherited_by_started_processes(tmp_path: Path) -> None:
    with Trace(tmp_path / "t", "run") as trace:
        assert trace._file is not None
        assert not os.get_inheritable(trace._file.fileno())
