"""A rerun does again what was recorded, and names the record that was changed."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dispatch.desk import Desk, open_desk
from tests.dispatch.test_seeded_schedules import drive, schedule
from tests.fakes import Plan, Plans, Stage, raiser
from tests.virtual import run_virtual
from vime.cli import main
from vime.eval.config import EvalConfig
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.rerun import rerun
from vime.fsm.check import check
from vime.fsm.encode import encode
from vime.fsm.read import read_trace
from vime.fsm.record import FIELDS, Record
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.slow

REAL = Path(__file__).parent / "real_run.jsonl"
FIRST = int(os.environ.get("VIME_SEED", "0"))


def recorded(seed: int) -> list[Record]:
    """The trace of a seeded schedule in which no two things end in the very same moment.

    What is simultaneous may come in either order, and a rerun can choose the other one.
    """
    rng = random.Random(seed)
    config, plans = schedule(rng)
    for plan in plans.values():
        for stage in (plan.write, plan.pin, plan.run):
            stage.seconds += rng.uniform(0.001, 0.1)
    waits = ("export_timeout_s", "pin_timeout_s", "eval_timeout_s", "backpressure_timeout_s")
    config = replace(config, **{w: getattr(config, w) + rng.uniform(0.001, 0.1) for w in waits})

    async def main() -> Desk:
        return await drive(rng, config, plans)

    # On virtual time, too, both clocks of a record go together.
    return [replace(r, wall_ns=r.mono_ns + 10**18) for r in run_virtual(main, seed).records]


@pytest.mark.parametrize("block", range(4))
def test_a_rerun_of_every_seeded_schedule_does_exactly_what_was_recorded(block: int) -> None:
    seen: set[str | None] = set()
    for seed in range(FIRST + block, FIRST + 200, 4):
        records = recorded(seed)
        done = rerun(records, tolerance_s=1e-6)
        assert done.divergence is None, f"VIME_SEED={seed}: {done.divergence}"
        assert done.num_records == len(records)
        assert list(check(records, ended=True)) == [], f"VIME_SEED={seed}"
        seen |= {record.reason for record in records}
    assert seen >= {None, "busy", "superseded", "cancelled", "timeout_export", "crashed"}


def test_a_trace_that_was_cut_anywhere_is_run_again_up_to_there() -> None:
    records = next(r for seed in range(100) if len(r := recorded(seed)) > 25)
    for length in range(1, len(records)):
        done = rerun(records[:length], tolerance_s=1e-6)
        assert (done.divergence, done.num_records) == (None, length)


#: Field → what a forger makes of it. What a collaborator answered (a score, the words of an
#: error) is an input of a rerun: a change of it is another run, and no divergence.
FORGERIES: dict[str, Any] = {
    "trigger": lambda record: "pin" if record.trigger != "pin" else "run",
    "dest": lambda record: "pinning" if record.dest != "pinning" else "running",
    "source": lambda record: "pinning" if record.source != "pinning" else "queued",
    "rejected": lambda record: True,
    "reason": lambda record: "busy" if record.reason != "busy" else "crashed",
    "weight_version": lambda record: f"{record.weight_version}x",
    "mono_ns": lambda record: record.mono_ns + 10**16,
    "wall_ns": lambda record: record.wall_ns - 10**11,
    "detail": lambda record: {
        name: value + 7 if name in ("duration_s", "pending", "stall_s") else value
        for name, value in record.detail.items()
    },
}


@pytest.mark.parametrize("field", FORGERIES)
def test_of_a_trace_in_which_one_record_was_changed_the_rerun_names_that_record(field: str) -> None:
    rng = random.Random(field)
    num_forged = 0
    for seed in range(40):
        records = recorded(seed)
        if field == "detail":
            indices = [n for n, r in enumerate(records) if r.detail and r.trigger != "run"]
        elif field == "weight_version":  # of two records nobody can say which one was changed
            indices = [
                n for n, r in enumerate(records) if (r.source, r.trigger) == ("pinning", "run")
            ]
        elif field == "wall_ns":
            indices = list(range(1, len(records) - 1))
        else:
            indices = list(range(len(records)))
        if not indices:
            continue
        index = rng.choice(indices)
        forged = replace(records[index], **{field: FORGERIES[field](records[index])})
        divergence = rerun([*records[:index], forged, *records[index + 1 :]]).divergence
        assert divergence is not None, (seed, forged)
        assert divergence.record == forged, (seed, divergence)
        num_forged += 1
    assert num_forged > 10


def one_point(plan: Plan, **limits: float) -> list[Record]:
    """The trace of a point with this plan."""

    async def main() -> list[Record]:
        config = EvalConfig(uses_snapshots=True, **limits)  # type: ignore[arg-type]
        async with open_desk(config, Plans({0: plan})) as desk:
            await desk.dispatch(0)
            await desk.drain()
            return desk.records

    return run_virtual(main)


@pytest.mark.parametrize(
    "error", [EvalSkip("away", "D" * 1_000_000), RuntimeError("D" * 1_000_000)]
)
def test_a_rerun_comes_to_the_same_shortened_message(error: Exception) -> None:
    assert rerun(one_point(Plan(run=Stage(1, raiser(error))))).divergence is None


def test_a_rerun_takes_the_words_of_an_older_trace_for_an_overdue_wait() -> None:
    records = one_point(Plan(write=Stage(10)), export_timeout_s=3)
    detail = records[-1].detail
    assert detail is not None
    detail["message"] = "writing and verifying the snapshot took longer than 2.98 s"
    assert rerun(records).divergence is None
    detail["message"] = "the evaluation's last word took longer than 2.98 s"
    assert rerun(records).divergence is not None


def test_a_rerun_takes_the_endless_deadlines_of_an_older_trace() -> None:
    first, *others = one_point(Plan())
    assert first.detail is not None
    endless = {
        "timeouts_s": {**first.detail["timeouts_s"], "pin": 1e20},
        "deadlines_s": {**first.detail["deadlines_s"], "pinning": 2e20},
    }
    assert rerun([replace(first, detail=first.detail | endless), *others]).divergence is None


def three_points() -> list[Record]:
    """Under backpressure, one after the other; the last one's backend refuses."""

    async def main() -> list[Record]:
        plans = Plans({n: Plan(write=Stage(2), pin=Stage(3), run=Stage(5)) for n in range(3)})
        plans[2].run.fault = raiser(EvalSkip("service_away", "no answer"))
        config = EvalConfig(uses_snapshots=True, max_in_flight=1)
        async with open_desk(config, plans) as desk:
            for step in range(3):
                await desk.dispatch(step)
            await desk.drain()
            return desk.records

    return run_virtual(main)


def test_a_change_in_the_dispatchers_behaviour_shows_where_it_first_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = three_points()
    assert rerun(records).divergence is None

    async def never_waits(self: DispatchActor, life: Any) -> None:
        return None

    monkeypatch.setattr(DispatchActor, "_window", never_waits)
    divergence = rerun(records).divergence
    assert divergence is not None
    assert (divergence.record.id, divergence.record.trigger) == ("1", "export")
    assert (divergence.field, divergence.expected) == ("mono_ns", "10 s earlier")


def test_a_dispatcher_that_breaks_down_is_a_divergence_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = three_points()

    async def breaks(self: DispatchActor, admitted: Any, capture: Any, scope: Any) -> None:
        raise SystemError("bug")

    monkeypatch.setattr(DispatchActor, "_live", breaks)
    divergence = rerun(records).divergence
    assert divergence is not None
    assert divergence.expected.startswith("nothing: the dispatcher broke down by SystemError: bug")


def write(path: Path, records: list[Record]) -> Path:
    lines = [encode({name: getattr(r, name) for name in FIELDS}) for r in records]
    path.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
    return path


def test_the_command_says_that_all_came_out_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t", three_points())
    assert main(["trace", "rerun", str(path)]) == 0
    out = capsys.readouterr().out
    assert out == "15 records of 3 points: the dispatcher does again what was recorded\n"
    assert main(["trace", "rerun", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"records": 15, "points": 3, "runs": 1, "divergence": None}


def test_the_command_shows_the_record_that_differs_and_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = three_points()
    index = next(n for n, r in enumerate(records) if (r.id, r.trigger) == ("1", "pin"))
    records[index] = replace(records[index], dest="running")
    path = write(tmp_path / "t", records)
    assert main(["trace", "rerun", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the rerun diverges at: ")
    assert f"driver:{records[index].seq}" in lines[0]
    assert [line.split() for line in lines[1:]] == [
        ["field:", "dest"], ["rerun:", "pinning"], ["recorded:", "running"],
    ]  # fmt: skip
    assert main(["trace", "rerun", "--json", str(path)]) == 1
    told = json.loads(capsys.readouterr().out)["divergence"]
    assert (told["field"], told["record"]["seq"]) == ("dest", records[index].seq)


def test_what_cannot_be_run_again_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "rerun", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").touch()
    assert main(["trace", "rerun", str(tmp_path / "empty")]) == 2
    assert "no eval point in this trace" in capsys.readouterr().err
    records = three_points()
    detail = {**(records[0].detail or {}), "max_in_flight": -1}
    path = write(tmp_path / "t", [replace(records[0], detail=detail)])
    assert main(["trace", "rerun", str(path)]) == 2
    assert "max_in_flight -1 in a dispatch record" in capsys.readouterr().err


def test_a_rerun_loads_nothing_heavy_and_is_done_within_two_seconds() -> None:
    program = f"""
import sys, time
from vime.cli import main
assert main(["trace", "rerun", {str(REAL)!r}]) == 0
heavy = ("torch", "transformers", "vllm", "ray", "numpy", "matplotlib", "safetensors")
print(time.process_time(), [name for name in heavy if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    seconds, loaded = out.stdout.decode().splitlines()[-1].split(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 2


def test_a_plain_install_brings_what_a_rerun_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    names = {word.partition(">")[0] for word in project["project"]["dependencies"]}
    assert {"trio", "anyio"} <= names


def test_a_trace_of_a_real_run_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "rerun", str(REAL)]) == 0
    assert list(check(read_trace(REAL), ended=True)) == []
    for name in ("resumed", "resumed_real"):
        path = Path(__file__).parents[1] / "traces" / f"{name}.jsonl"
        assert main(["trace", "rerun", str(path)]) == 0


def test_of_a_resumed_run_a_changed_record_of_any_part_is_named() -> None:
    path = Path(__file__).parents[1] / "traces" / "resumed_real.jsonl"
    records = list(read_trace(path))
    points = [n for n, record in enumerate(records) if record.machine == "point"]
    assert len({records[n].run_id for n in points}) == 3
    for index in points:
        forged = replace(records[index], reason=FORGERIES["reason"](records[index]))
        divergence = rerun([*records[:index], forged, *records[index + 1 :]]).divergence
        assert divergence is not None
        assert divergence.record == forged


@pytest.mark.parametrize("block", range(4))
def test_whichever_moment_was_changed_and_however_little_the_rerun_names_its_record(
    block: int,
) -> None:
    num_forged = 0
    for seed in range(FIRST + block, FIRST + 40, 4):
        rng = random.Random(f"moments {seed}")
        records = recorded(seed)
        for index, record in enumerate(records):
            shift_s = rng.choice((-1, 1)) * math.exp(rng.uniform(math.log(1.1), math.log(1e7)))
            forged = replace(record, mono_ns=record.mono_ns + int(shift_s * 1e9))
            divergence = rerun([*records[:index], forged, *records[index + 1 :]]).divergence
            what = f"VIME_SEED={seed}: record {index} moved by {shift_s} s: {divergence}"
            if 0 < index < len(records) - 1:  # the run may have begun earlier, or ended later
                assert divergence is not None, what
            assert divergence is None or divergence.record == forged, what
            num_forged += 1
    assert num_forged > 100


@pytest.mark.parametrize("name", ["rerun/real_run", "traces/resumed_real"])
def test_of_a_real_trace_every_single_change_is_named(name: str) -> None:
    rng = random.Random(name)
    records = list(read_trace(Path(__file__).parents[1] / f"{name}.jsonl"))
    of_runs: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        if record.machine == "point":
            of_runs.setdefault(record.run_id, []).append(index)
    ends = {index for indices in of_runs.values() for index in (indices[0], indices[-1])}
    fields = [name for name in FORGERIES if name != "detail"]
    for index in (index for indices in of_runs.values() for index in indices):
        field, record = rng.choice(fields), records[index]
        changes = {field: FORGERIES[field](record)}
        changes = changes if changes[field] != getattr(record, field) else {"trigger": "dispatched"}
        shift_s = rng.choice((-1, 1)) * math.exp(rng.uniform(math.log(1.1), math.log(1e7)))
        for change in (changes, {"mono_ns": record.mono_ns + int(shift_s * 1e9)}):
            forged = replace(record, **change)
            divergence = rerun([*records[:index], forged, *records[index + 1 :]]).divergence
            may_pass = index in ends and change.keys() <= {"mono_ns", "wall_ns"}
            assert divergence is not None or may_pass, (record, change)
            assert divergence is None or divergence.record == forged, (change, divergence)


def test_a_wall_clock_that_was_set_or_is_absent_says_nothing() -> None:
    records = three_points()
    hour = 3600 * 10**9
    for since in range(len(records)):
        late = [replace(r, wall_ns=r.wall_ns + hour) for r in records[since:]]
        assert rerun([*records[:since], *late]).divergence is None
    assert rerun([replace(r, wall_ns=0) for r in records]).divergence is None


def test_a_trace_that_was_written_by_hand_diverges_where_no_dispatcher_would_go(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = Path(__file__).parents[1] / "traces" / "two_engines.jsonl"
    assert main(["trace", "rerun", "--json", str(made)]) == 1
    told = json.loads(capsys.readouterr().out)["divergence"]
    assert (told["record"]["id"], told["field"]) == ("hf:0", "detail.duration_s")
