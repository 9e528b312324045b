"""The injector strikes once, at the moment that was drawn, and damages what it says."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.chaos import weights
from bench.chaos.faults import Fault
from bench.chaos.injector import Injector
from bench.chaos.private import Ballast
from tests.fsm.traces import Run, version
from vime.eval.contracts import Snapshot
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.manifest import Manifest
from vime.eval.snapshot.verify import SnapshotInvalid, verify


class Harmless(Injector):
    """Kills nobody, and remembers when it would have."""

    def _victim(self, fault: Fault) -> psutil.Process | None:
        return psutil.Process() if fault.engine == 0 else None

    def _kill(self, number: int, fault: Fault, victim: psutil.Process) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "trace.jsonl")
    yield run
    run.trace.close()


def injecting(tmp_path: Path, run: Run, fault: Fault) -> Harmless:
    injector = Harmless([fault], tmp_path / "injected.jsonl", Ballast(tmp_path / "ballast"), 0)
    run.trace.subscribe(injector.on_record)
    return injector


def struck(tmp_path: Path) -> list[tuple[str, str, list[int]]]:
    path = tmp_path / "injected.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(row["kind"], row["when"], row["points"]) for row in rows]


def to_running(run: Run, point: int) -> None:
    for trigger in ("dispatch", "export", "pin", "run"):
        run.fire("point", point, trigger)


def test_it_strikes_once_at_the_answer_of_the_point_that_was_drawn(
    tmp_path: Path, run: Run
) -> None:
    injector = injecting(tmp_path, run, Fault("kill_runner", 2, "answer", answer=3))
    for point in (1, 2, 3):
        to_running(run, point)
        for count in range(1, 6):
            assert (struck(tmp_path) != []) == (point > 2 or (point == 2 and count > 3))
            injector.on_answer()
        run.fire("point", point, "finish")
    assert struck(tmp_path) == [("kill_runner", "answer 3", [2])]


def test_a_point_that_does_not_come_so_far_hands_the_fault_on(tmp_path: Path, run: Run) -> None:
    injecting(tmp_path, run, Fault("kill_router", 2, "running"))
    run.fire("point", 2, "dispatch")
    run.fire("point", 2, "skip", reason="export_failed")
    assert struck(tmp_path) == []
    to_running(run, 3)
    assert struck(tmp_path) == [("kill_router", "running", [3])]


def test_an_engine_is_struck_when_it_is_told_to_load_and_not_when_the_other_one_is(
    tmp_path: Path, run: Run
) -> None:
    injecting(tmp_path, run, Fault("kill_core", 4, "loading", engine=0))
    detail = {"pid": 1}
    for engine in ("engine_1", "engine_0"):
        run.fire("engine", engine, "start")
        run.fire("engine", engine, "ready", detail=detail)
    run.fire("engine", "engine_1", "pin", weight_version=version(4))
    assert struck(tmp_path) == []
    run.fire("engine", "engine_0", "pin", weight_version=version(4))
    assert [kind for kind, _, _ in struck(tmp_path)] == ["kill_core"]


def test_a_fault_whose_victim_is_away_waits_for_it(tmp_path: Path, run: Run) -> None:
    injecting(tmp_path, run, Fault("kill_core", 1, "running", engine=1))
    to_running(run, 1)
    assert struck(tmp_path) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights.write_checkpoint(tmp_path_factory.mktemp("whole") / "step_1", 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncated", "incomplete", "foreign"])
def test_each_bad_export_is_one_that_the_verifier_refuses(
    kind: str, whole: Path, tmp_path: Path, run: Run
) -> None:
    injector = injecting(tmp_path, run, Fault(kind, 1, "exporting"))
    kept = tmp_path / "kept"
    shutil.copytree(whole, kept)
    injector.export(1, kept, tmp_path / "staged")
    injector.export(2, kept, tmp_path / "next")
    assert struck(tmp_path) == [(kind, "exporting", [1])]
    base = BaseSpec.read(kept)
    with pytest.raises(SnapshotInvalid):
        verify(tmp_path / "staged", base, owned=False)
    verify(tmp_path / "next", base, owned=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotten", "cut_later"])
def test_a_snapshot_is_damaged_between_the_check_and_the_pin(
    kind: str, whole: Path, tmp_path: Path, run: Run
) -> None:
    injecting(tmp_path, run, Fault(kind, 1, "verified"))
    staged = tmp_path / "step_1"
    shutil.copytree(whole, staged)
    before = Manifest.of_directory(staged, "run", 1, owned=False)
    snapshot = Snapshot(1, staged, before.weight_version, before.digest, owned=False)
    run.fire("snapshot", "step_1", "write")
    run.fire("snapshot", "step_1", "seal")
    run.fire("snapshot", "step_1", "verify", detail={"path": str(snapshot.path)})
    assert struck(tmp_path) == [(kind, "verified", [1])]
    if kind == "rotten":
        assert Manifest.of_directory(staged, "run", 1, owned=False).digest != before.digest
    else:
        size = (whole / weights.WEIGHTS).stat().st_size
        assert (staged / weights.WEIGHTS).stat().st_size == size // 2


@pytest.mark.slow
def test_a_flipped_byte_is_one_of_a_number(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "flipped")
    for seed in range(5):
        weights.flip_a_byte(tmp_path / "flipped", random.Random(seed))
    verify(tmp_path / "flipped", BaseSpec.read(whole), owned=False)
