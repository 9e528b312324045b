"""The reader uses whatever is sound in a file, tells the rest in a line, and never fails on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fsm.traces import healthy_run
from vime.fsm.read import MAX_LINE, TraceFile, TraceUnreadableError, read_trace
from vime.fsm.record import FIELDS, Record, record_of
from vime.fsm.trace import SCHEMA


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return healthy_run(tmp_path / "trace.jsonl")


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def seqs(trace: TraceFile) -> list[int]:
    return [record.seq for record in trace]


def test_records_come_out_as_they_were_written(trace: Path) -> None:
    file = read_trace(trace)
    records = list(file)
    assert [json.loads(line) for line in lines_of(trace)] == [
        {name: getattr(record, name) for name in FIELDS} for record in records
    ]
    assert file.num_records == len(records)
    assert not file.problems
    assert list(file) == records  # again, from the start


def test_a_run_directory_means_its_trace(trace: Path) -> None:
    assert read_trace(trace.parent).path == trace


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such file or run directory"),
        (".", "no trace.jsonl in this directory"),
        ("nul\0", "null"),
        ("x" * 300, "too long"),
        ("/dev/zero", "not a file"),
    ],
)
def test_what_is_no_trace_at_all_is_refused_in_one_line(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(TraceUnreadableError, match=message) as caught:
        read_trace(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_vanishes_is_reported_when_it_is_read(trace: Path) -> None:
    file = read_trace(trace)
    trace.unlink()
    with pytest.raises(TraceUnreadableError, match="No such file"):
        list(file)


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    file = read_trace(tmp_path / "t")
    assert list(file) == []
    assert file.problems == []


def test_a_trace_cut_at_any_byte_gives_every_whole_record_before_the_cut(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    data = b"".join(lines_of(path)[:4])
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        file = read_trace(path)
        whole = sum(end <= cut for end in ends)
        assert seqs(file) == list(range(whole)), cut
        torn = cut not in (0, *ends, *(end + 1 for end in ends))
        assert file.torn == torn
        expected = f"line {whole + 1} is torn: the trace is valid up to there"
        assert file.problems == ([expected] if torn else [])


def test_a_binary_file_holds_no_record_and_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(random.Random(0).randbytes(200_000) + b"\n")
    file = read_trace(path)
    assert list(file) == []
    (problem,) = file.problems
    assert "lines left out: line 1 is not JSON" in problem


@pytest.mark.parametrize("junk", [b"\x00" * 5000, b"[1, 2]", b'"text"', b"{}", b"17", b"{" * 5000])
def test_a_line_that_is_no_record_is_left_out_and_the_others_are_used(
    trace: Path, junk: bytes
) -> None:
    lines = lines_of(trace)
    trace.write_bytes(b"".join([*lines[:3], junk + b"\n", *lines[3:]]))
    file = read_trace(trace)
    assert seqs(file) == list(range(len(lines)))
    (problem,) = file.problems
    assert problem.startswith("1 line left out: line 4 is ")


def test_a_line_of_100_megabytes_is_passed_over_without_holding_it(trace: Path) -> None:
    lines = lines_of(trace)
    with trace.open("wb") as file:
        file.writelines(lines[:3])
        for _ in range(100):
            file.write(b" " * (1 << 20))
        file.write(b"\n")
        file.writelines(lines[3:])
    program = f"""
from pathlib import Path
from vime.fsm.read import read_trace
# Not ru_maxrss: it keeps the peak of the process that started this one.
peak_kib = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
import sys
before = peak_kib()
trace = read_trace({str(trace)!r})
assert len(list(trace)) == {len(lines)}
assert trace.problems == ["1 line left out: line 4 is longer than {MAX_LINE >> 20} MiB"], trace.problems
print(peak_kib() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(out.stdout) < 60_000  # KiB


def test_a_long_last_line_without_an_end_is_a_torn_one(trace: Path) -> None:
    with trace.open("ab") as file:
        file.write(b"x" * (MAX_LINE + 10))
    file = read_trace(trace)
    assert len(list(file)) == len(lines_of(trace)) - 1
    assert file.torn


def test_swapped_and_repeated_lines_are_put_back_and_counted(trace: Path) -> None:
    lines = lines_of(trace)
    shuffled = [*lines, *lines[5:8]]
    random.Random(1).shuffle(shuffled)
    trace.write_bytes(b"".join(shuffled))
    file = read_trace(trace)
    assert seqs(file) == list(range(len(lines)))
    assert any("3 records came twice or too late" in problem for problem in file.problems)
    assert any("stood out of order and were put back" in problem for problem in file.problems)
    assert file.missing == 0


def test_a_gap_is_counted_and_what_follows_it_is_used(trace: Path) -> None:
    lines = lines_of(trace)
    trace.write_bytes(b"".join([*lines[:4], *lines[6:]]))
    file = read_trace(trace)
    assert seqs(file) == [*range(4), *range(6, len(lines))]
    assert file.problems == ["2 records are missing, the first: seq 4 to 5 of node driver"]
    assert file.missing == 2


def test_a_gap_longer_than_the_window_does_not_hold_the_records_back(trace: Path) -> None:
    lines = lines_of(trace)
    trace.write_bytes(b"".join([*lines[:4], *lines[6:], lines[4]]))
    file = TraceFile(trace, window=3)
    assert seqs(file) == [*range(4), *range(6, len(lines))]
    assert [problem.split(",")[0] for problem in file.problems] == [
        "2 records are missing",
        "1 records came twice or too late and were left out",
    ]


def test_the_sequences_of_several_nodes_and_runs_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "t"
    healthy_run(path, num_points=1)
    first = lines_of(path)
    other = [line.replace(b'"driver"', b'"other"') for line in first]
    anew = [line.replace(b'"run-1"', b'"run-2"') for line in first]
    onward = [
        json.dumps({**json.loads(line), "run_id": "run-3", "seq": i + len(anew)}).encode() + b"\n"
        for i, line in enumerate(first)
    ]
    mixed = [line for pair in zip(first, other, strict=True) for line in pair]
    path.write_bytes(b"".join([*mixed, *anew, *onward]))
    file = read_trace(path)
    assert len(list(file)) == 4 * len(first)
    assert file.problems == []


def test_a_file_that_grows_while_it_is_read_is_read_up_to_where_it_stood(trace: Path) -> None:
    lines = lines_of(trace)
    records = iter(read_trace(trace))
    first = next(records)
    with trace.open("ab") as file:
        file.writelines(line.replace(b'"run-1"', b'"later"') for line in lines)
    assert [first, *records] == list(read_trace(trace))[: len(lines)]


def test_a_pipe_can_be_read_like_a_file(trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(trace.read_bytes()))
    writer.start()
    assert list(read_trace(pipe)) == list(read_trace(trace))
    writer.join()


def test_an_older_record_is_filled_up_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t"
    old = {
        "seq": 0,
        "machine": "point",
        "id": "4",
        "trigger": "dispatch",
        "source": "new",
        "dest": "queued",
        "mono_ns": 1,
    }
    path.write_text(json.dumps({**old, "colour": "red"}) + "\n")
    file = read_trace(path)
    (record,) = file
    assert (record.schema, record.node, record.rejected, record.attempt) == (0, "driver", False, 0)
    assert record.detail is record.reason is record.cause_seq is record.weight_version is None
    (problem,) = file.problems
    assert problem.startswith("written under other tables (")


def test_a_newer_schema_is_read_as_far_as_it_is_known(trace: Path) -> None:
    newer = trace.read_bytes().replace(b'"schema":1', b'"schema":9')
    trace.write_bytes(newer)
    file = read_trace(trace)
    assert len(list(file)) == len(lines_of(trace))
    assert file.problems == [
        f"written by a newer vime (schema 9, {SCHEMA} is known): what it added is ignored"
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq", -1, "seq is -1; 0 or more, and below"),
        ("seq", "1", "seq is a string; a whole number was expected"),
        ("seq", True, "seq is true or false; a whole number was expected"),
        ("id", 40, "id is a whole number; a string was expected"),
        ("detail", [], "detail is a list; an object or null was expected"),
        ("rejected", None, "rejected is null; true or false was expected"),
        ("mono_ns", 1.5, "mono_ns is a fraction; a whole number was expected"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(
    trace: Path, field: str, value: object, message: str
) -> None:
    fields = json.loads(lines_of(trace)[0])
    with pytest.raises(ValueError, match=message):
        record_of({**fields, field: value})
    del fields["dest"], fields["seq"]
    with pytest.raises(ValueError, match="seq, dest missing"):
        record_of(fields)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_to_a_trace_makes_the_reader_fail(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t"
    if not path.exists():
        healthy_run(tmp_path / "sound", num_points=1)
    whole = (tmp_path / "sound").read_bytes()
    path.write_bytes(data.draw(damaged(whole)))
    file = TraceFile(path, window=data.draw(st.integers(0, 5)))
    records = list(file)
    assert all(isinstance(record, Record) for record in records)
    assert all(len(problem.splitlines()) == 1 for problem in file.problems)
    given_out = [(r.node, r.run_id, r.seq) for r in records]
    assert len(given_out) == len(set(given_out))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` after a few cuts, flips, insertions and repetitions of parts."""
    data = whole
    for _ in range(draw(st.integers(0, 6))):
        a, b = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        junk = draw(
            st.binary(max_size=20) | st.sampled_from([b"\n", b"null", b'"', b"\x00\n", b"1e99"])
        )
        data = draw(
            st.sampled_from(
                [
                    data[:b],
                    data[a:],
                    data[:a] + data[b:],
                    data[:a] + junk + data[a:],
                    data + data[a:b],
                ]
            )
        )[: 4 * len(whole)]
    return data


def test_reading_takes_constant_memory(trace: Path) -> None:
    lines = lines_of(trace)
    with trace.open("wb") as file:
        for i in range(60_000):
            line = lines[i % len(lines)]
            file.write(line.replace(b'"seq":%d,' % (i % len(lines)), b'"seq":%d,' % i))
    program = f"""
from pathlib import Path
from vime.fsm.read import read_trace
# Not ru_maxrss: it keeps the peak of the process that started this one.
peak_kib = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
trace = read_trace({str(trace)!r})
next(iter(trace))
before = peak_kib()
assert sum(1 for _ in trace) == 60_000
print(peak_kib() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(out.stdout) < 10_000  # KiB
