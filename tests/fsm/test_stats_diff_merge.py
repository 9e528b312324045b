"""Numbers of one trace, differences of two, and one order for many."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fsm.traces import SECOND, Run, edit, healthy_run, pinned_point
from vime.fsm.diff import behaviour, differences
from vime.fsm.filters import Filter, Moment
from vime.fsm.merge import Merge
from vime.fsm.read import read_trace
from vime.fsm.record import Record, cause_of
from vime.fsm.stats import Stats, Summary, stats

pytestmark = pytest.mark.slow

# -- stats -----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_nearest_rank(values: list[float]) -> None:
    summary = Summary.of(values)
    assert summary is not None
    expected = np.percentile(values, [50, 90, 99, 100], method="inverted_cdf")
    assert (summary.p50, summary.p90, summary.p99, summary.max) == tuple(expected)
    assert summary.count == len(values)


def numbers(path: Path, **asked: object) -> Stats:
    return stats(read_trace(path), Filter(**asked))


def test_stays_ends_stalls_and_lags_are_counted(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=4)
    found = numbers(path)
    dwell = {(machine, state): summary for machine, state, summary in found.states()}
    assert list(dwell)[:4] == [
        ("point", "queued"),
        ("point", "exporting"),
        ("point", "pinning"),
        ("point", "running"),
    ]
    assert dwell["point", "exporting"] == Summary(4, 5.0, 5.0, 5.0, 5.0)
    assert dwell["engine", "starting"] == Summary(1, 30.0, 30.0, 30.0, 30.0)
    assert found.ends == {"done": 4}
    assert Summary.of(found.stall_s) == Summary(4, 0.25, 0.25, 0.25, 0.25)
    assert Summary.of(found.lag_steps) == Summary(4, 1, 1, 1, 1)
    assert Summary.of(found.duration_s) == Summary(4, 10, 10, 10, 10)
    assert found.num_records == len(path.read_bytes().splitlines())


def test_filters_choose_what_is_counted(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready")
    pinned_point(run, 10)
    run.fire("point", 20, "dispatch")
    run.fire("point", 20, "skip", 3, reason="busy")
    run.trace.close()
    assert numbers(run.path, points=("20",)).ends == {"skipped": 1}
    assert numbers(run.path, reasons=("busy",)).reasons == {("point", "busy"): 1}
    only = numbers(run.path, states=("queued",))
    assert [(machine, state) for machine, state, _ in only.states()] == [("point", "queued")]
    assert numbers(run.path, until=Moment(2 * 10**9)).ends == {}
    assert {machine for machine, _, _ in numbers(run.path, engines=("eval-0",)).states()} == {
        "engine"
    }


# -- diff ------------------------------------------------------------------------------------


def test_a_run_does_not_differ_from_itself_whatever_its_times_and_names(tmp_path: Path) -> None:
    a = healthy_run(tmp_path / "a")
    b = healthy_run(tmp_path / "b")
    edit(b, lambda f: {**f, "mono_ns": 2 * f["mono_ns"], "run_id": "other", "weight_version": "x"})
    first, second = (behaviour(read_trace(path)) for path in (a, b))
    assert differences(first, second) == []


def test_the_first_difference_is_the_earliest_one(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in "ab"]
    for run, reason in zip(runs, ("busy", "crashed"), strict=True):
        run.fire("point", 10, "dispatch")
        run.fire("point", 20, "dispatch")
        run.fire("point", 20, "skip", reason=reason)
    runs[0].fire("point", 10, "export")
    for run in runs:
        run.trace.close()
    first, second = (behaviour(read_trace(run.path)) for run in runs)
    reason, longer = differences(first, second)
    assert (reason.name, reason.index) == (("point", "20"), 1)
    assert reason.a is not None
    assert reason.b is not None
    assert (reason.a.step[3], reason.b.step[3]) == ("busy", "crashed")
    assert (longer.name, longer.index, longer.b) == (("point", "10"), 1, None)
    assert longer.a is not None
    assert longer.a.seq == 3


def test_a_machine_of_one_run_only_is_a_difference(tmp_path: Path) -> None:
    a, b = healthy_run(tmp_path / "a", 1), healthy_run(tmp_path / "b", 2)
    first, second = (behaviour(read_trace(path)) for path in (a, b))
    found = {difference.name: difference.index for difference in differences(first, second)}
    assert found[("point", "20")] == 0
    assert first.scores == {"10": {"sums": 0.1}}


# -- merge -----------------------------------------------------------------------------------


def two_nodes(tmp_path: Path, skew_s: float = 0) -> tuple[Path, Path]:
    """Engines of node ``b`` are pinned by points of the driver, and the other way round."""
    driver, node = Run(tmp_path / "driver"), Run(tmp_path / "b", node="b")
    node.clock.now_s += skew_s
    node.fire("engine", "e", "start")
    ready = node.fire("engine", "e", "ready")
    driver.fire("point", 1, "dispatch")
    here, there = {"cause_node": "driver"}, {"cause_node": "b"}
    asked = driver.fire("point", 1, "pin", cause_seq=ready, detail=there)
    node.fire("engine", "e", "pin", cause_seq=asked, detail=here)
    serve = node.fire("engine", "e", "serve")
    driver.fire("point", 1, "run", cause_seq=serve, detail=there)
    driver.fire("point", 1, "finish")
    for run in (driver, node):
        run.trace.close()
    return driver.path, node.path


@pytest.mark.parametrize("skew_s", [0, -1e6, 1e6])
@pytest.mark.parametrize("swapped", [False, True])
def test_merged_records_follow_their_causes_whatever_the_clocks_say(
    tmp_path: Path, skew_s: float, swapped: bool
) -> None:
    paths = two_nodes(tmp_path, skew_s)
    merge = Merge([read_trace(path) for path in (reversed(paths) if swapped else paths)])
    merged = [(record.node, record.trigger) for record in merge]
    assert merged == [
        ("b", "start"),
        ("driver", "dispatch"),
        ("b", "ready"),
        ("driver", "pin"),
        ("b", "pin"),
        ("b", "serve"),
        ("driver", "run"),
        ("driver", "finish"),
    ]
    assert (merge.num_repeated, merge.num_broken) == (0, 0)
    assert merge.nodes == {"b": 4, "driver": 4}


def test_a_record_of_two_traces_is_given_once(tmp_path: Path) -> None:
    paths = two_nodes(tmp_path)
    merge = Merge([read_trace(path) for path in (*paths, paths[0])])
    assert len(list(merge)) == 8
    assert merge.num_repeated == 4


def test_a_cause_in_none_of_the_traces_holds_nothing_up(tmp_path: Path) -> None:
    driver, _ = two_nodes(tmp_path)
    merge = Merge([read_trace(driver)])
    assert [record.seq for record in merge] == [0, 1, 2, 3]
    assert merge.num_broken == 2


@given(seed=st.integers(0, 2**32 - 1))
def test_any_causes_are_respected_and_no_record_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [f"n{i}" for i in range(draw.randint(1, 4))]
    history: list[Record] = []  # in an order that is possible
    seqs = dict.fromkeys(nodes, 0)
    for _ in range(draw.randint(0, 40)):
        node = draw.choice(nodes)
        cause = draw.choice(history) if history and draw.random() < 0.6 else None
        detail = {"cause_node": cause.node} if cause else None
        history.append(
            Record(
                *(1, "h", "run", node, seqs[node], "point", "1", 0, "t", "a", "b", False, None),
                *(detail, cause.seq if cause else None, None, 0, 0),
            )
        )
        seqs[node] += 1
    merge = Merge([[r for r in history if r.node == node] for node in nodes])
    merged = list(merge)
    assert sorted(map(id, merged)) == sorted(map(id, history))
    assert merge.num_broken == 0
    seen: set[tuple[str, int]] = set()
    for record in merged:
        assert record.seq == sum(node == record.node for node, _ in seen)
        assert cause_of(record) is None or cause_of(record) in seen
        seen.add((record.node, record.seq))


# -- figures ---------------------------------------------------------------------------------


def long_trace(path: Path, num_records: int) -> Path:
    """About ``num_records`` records of one engine and many points, quickly made."""
    run = Run(path)
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready")
    pinned_point(run, 1)
    run.trace.close()
    start, ready, *life = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    with path.open("wb") as file:
        file.write(orjson.dumps(start) + b"\n" + orjson.dumps(ready) + b"\n")
        for point in range(num_records // len(life)):
            for fields in life:
                file.write(
                    orjson.dumps(fields).replace(b'"id":"1"', b'"id":"%d"' % (point + 1)) + b"\n"
                )
                fields["seq"] += len(life)
                fields["mono_ns"] += 20 * SECOND
                fields["cause_seq"] = fields["seq"] - 1
                if (fields["machine"], fields["trigger"]) == ("engine", "pin"):
                    fields["source"] = "serving"
                if "metrics" in (fields["detail"] or ()):
                    fields["detail"]["metrics"]["eval/step"] += 1
    return path


@pytest.fixture(scope="module")
def long_traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("long")
    return [long_trace(root / str(number), number) for number in (10_000, 100_000)]


@pytest.mark.parametrize(
    "command",
    [
        "stats {trace}",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (
                "show {trace}",
                "timeline {trace}",
                "check {trace}",
                "replay {trace}",
                "replay {trace} --at 9000",
                "why {trace} 10",
                "diff {trace} {trace}",
                "merge {trace} -o /dev/null",
                "export {trace} --format perfetto -o /dev/null",
                "export {trace} --format mermaid -o /dev/null",
            )
        ),
    ],
)
def test_a_command_takes_200_mb_at_most_for_a_million_records(
    long_traces: list[Path], command: str
) -> None:
    """Measured on a tenth, after a hundredth; it must leave room for ten times its own growth."""
    few, many = (["trace", *command.format(trace=path).split()] for path in long_traces)
    program = f"""
import sys
from pathlib import Path
from vime.cli import main
# Not ru_maxrss: it keeps the peak of the process that started this one.
peak_kib = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
main({few!r})
before = peak_kib()
assert main({many!r}) in (0, 1)
sys.stderr.write(f"\\n{{peak_kib()}} {{peak_kib() - before}}")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    peak_kib, growth_kib = map(float, out.stderr.split()[-2:])
    assert peak_kib + 10 * growth_kib < 200_000
