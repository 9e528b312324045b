"""A driver that is killed at any moment, and resumed, loses no point and reports none twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.programs.mortal import NUM_STEPS, SKIPPED_STEP, weight_of, write_checkpoint
from vime.eval.rerun import rerun
from vime.fsm.check import check
from vime.fsm.lives import lives_of
from vime.fsm.read import read_trace
from vime.fsm.record import Record
from vime.fsm.replay import replay
from vime.fsm.tables import POINT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_KILLS = 200
POINTS = ["hf:0", *map(str, range(1, NUM_STEPS + 1))]
BASE_WEIGHT = 0.75


class Zygote:
    """A warm process that forks drivers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.mortal"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def drive(self, root: Path, kill_at: int, seed: int) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"root": str(root), "kill_at": kill_at, "seed": seed}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def zygotes() -> Iterator[SimpleQueue[Zygote]]:
    both = [Zygote(), Zygote()]
    free: SimpleQueue[Zygote] = SimpleQueue()
    for zygote in both:
        free.put(zygote)
    yield free
    for zygote in both:
        zygote.end()


@pytest.fixture(scope="module")
def num_moments(zygotes: SimpleQueue[Zygote], tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many moments an undisturbed run has."""
    root = new_root(tmp_path_factory.mktemp("undisturbed"))
    zygote = zygotes.get()
    result = zygote.drive(root, 0, 0)
    zygotes.put(zygote)
    assert result["status"] == 0
    assert check_whole(root, lost=set(), num_runs=1)["seen"] == POINTS_SEEN
    return result["moments"]


ALL_THAT_CAN_HAPPEN = (
    "unreported", "torn", "lost", "evaluated from what was there", "taken up twice",
)  # fmt: skip
POINTS_SEEN = Counter(["True:0", *(f"False:{step}" for step in range(1, NUM_STEPS + 1))])


def new_root(root: Path) -> Path:
    (root / "base").mkdir()
    write_checkpoint(root / "base", BASE_WEIGHT)
    return root


def end_of(point: str) -> tuple[str, Any]:
    """What an undisturbed run makes of a point: its state, and its score or reason."""
    if point == str(SKIPPED_STEP):
        return "skipped", "service_away"
    return "done", BASE_WEIGHT if point == "hf:0" else weight_of(int(point))


def pending_in(trace: Path) -> set[str]:
    """The points that were dispatched and have no end."""
    states: dict[str, str] = {}
    for record in read_trace(trace) if trace.exists() else ():
        if record.machine == "point":
            states[record.id] = record.dest
    return {name for name, state in states.items() if state not in POINT.terminal}


def lost_in(root: Path) -> set[str]:
    """The points that a killed run has left without a whole snapshot."""
    pending = pending_in(root / "run" / "trace.jsonl") - {"hf:0"}
    staging = root / "staging"
    return {n for n in pending if not (staging / f"step_{n}" / ".complete").exists()}


def check_whole(root: Path, lost: set[str], num_runs: int) -> dict[str, Any]:
    """The run has ended, and is as if nothing had happened but for what was lost."""
    trace = read_trace(root / "run" / "trace.jsonl")
    records: list[Record] = list(trace)
    assert [r.seq for r in records] == list(range(len(records)))
    assert trace.problems == []
    assert list(check(records, ended=True)) == []
    assert replay(records)[1] is None
    assert rerun(records).divergence is None
    runs = list(dict.fromkeys(r.run_id for r in records))
    assert len(runs) <= num_runs
    firsts = [next(r for r in records if r.run_id == run_id) for run_id in runs]
    named = [(r.detail or {}).get("continues") for r in firsts]
    assert named == [None, *runs[:-1]]
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    outcomes = {}
    for told in map(json.loads, lines):
        name = str(told["rollout_id"]) if told["hf_dir"] is None else f"hf:{told['rollout_id']}"
        assert name not in outcomes, "reported twice"
        outcomes[name] = (told["state"], told["reason"] or told["metrics"]["eval/sums"])
    crashed = dict.fromkeys(lost, ("skipped", "crashed"))
    assert outcomes == {name: end_of(name) for name in POINTS} | crashed
    lives = {life.id: (life.state, life.reason) for life in lives_of(records).of("point")}
    assert {name: state for name, (state, _) in lives.items()} == {
        name: state for name, (state, _) in outcomes.items()
    }
    seen = Counter((root / "seen").read_text().splitlines())
    assert max(seen.values()) == 1, "no tracker hears of an outcome twice"
    left = {path.name for path in (root / "staging").iterdir()}
    assert len(left) <= 1
    assert all(name.startswith("step_") for name in left), "no room, no lock"
    assert not (root / "run" / ".run.lock").exists()
    return {"seen": seen, "records": records}


def one_life(zygote: Zygote, root: Path, seed: int, num_moments: int) -> Counter[str]:
    """Kill a driver, and those that resume it, some times; then let one come to its end.

    Returns:
        What happened on the way, so that the test can see to it that everything does.
    """
    chance = random.Random(seed)
    lost: set[str] = set()
    kills = chance.choice((1, 1, 1, 2, 3))
    happened: Counter[str] = Counter()
    for _ in range(kills):
        at_some_time = chance.random() < 0.1
        kill_at = -chance.randrange(60_000) - 1 if at_some_time else chance.randint(1, num_moments)
        result = zygote.drive(root, kill_at, seed)
        assert result["status"] in (0, -9)
        happened["killed"] += result["status"] == -9
        happened["unreported"] += num_unreported(root)
        happened["torn"] += is_torn(root / "run" / "trace.jsonl")
        lost |= lost_in(root)
    assert zygote.drive(root, 0, seed)["status"] == 0
    records = check_whole(root, lost, kills + 1)["records"]
    happened["lost"] += len(lost)
    happened["evaluated from what was there"] += sum(r.trigger == "inherit" for r in records)
    happened["taken up twice"] += any(r.attempt > 1 for r in records if r.machine == "point")
    return happened


def num_unreported(root: Path) -> int:
    """How many ends are in the trace that are not in ``metrics.jsonl``."""
    trace, metrics = root / "run" / "trace.jsonl", root / "run" / "metrics.jsonl"
    records = read_trace(trace) if trace.exists() else ()
    ends = sum(r.machine == "point" and r.dest in POINT.terminal for r in records)
    reported = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return ends - reported


def is_torn(path: Path) -> bool:
    content = path.read_bytes() if path.exists() else b""
    return bool(content) and not content.endswith(b"\n")


def test_a_driver_killed_at_200_seeded_moments_and_resumed_has_one_outcome_a_point_and_its_scores(
    zygotes: SimpleQueue[Zygote], num_moments: int, tmp_path: Path
) -> None:
    def life(seed: int) -> Counter[str]:
        root = tmp_path / str(seed)
        root.mkdir()
        zygote = zygotes.get()
        try:
            return one_life(zygote, new_root(root), seed, num_moments)
        except BaseException as error:
            error.add_note(f"seed {seed}, in {root}")
            raise
        finally:
            zygotes.put(zygote)

    with ThreadPoolExecutor(2) as pool:
        happened = sum(pool.map(life, range(NUM_KILLS)), Counter())
    assert happened["killed"] >= NUM_KILLS
    assert all(happened[what] > 0 for what in ALL_THAT_CAN_HAPPEN), happened
