"""Whatever engines, snapshots and callers do in whatever order: no score is of other weights.

Each seed decides the order in which tasks run, what is wrong with which life of which server, how
snapshots are damaged, and when the training dispatches. ``VIME_SEED`` names the first seed and
``VIME_SEEDS`` how many; a failure says how it is repeated.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import anyio
import pytest

from tests.fleet.answers import Content
from tests.fleet.test_seeded_schedules import draw_life
from tests.fleet.whole import WholeRun, open_run, threads_take
from tests.fleet.world import Life, World
from tests.virtual import repeatable, run_virtual
from vime.eval.config import EvalConfig
from vime.fsm.check import check
from vime.fsm.record import Record

_FIRST = int(os.environ.get("VIME_SEED", "0"))
SEEDS = range(_FIRST, _FIRST + int(os.environ.get("VIME_SEEDS", "2000")))
NUM_FAST = 60
NUM_BLOCKS = 8

Spoil = Callable[[Path], None]


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """What is there already is not looked through after each run: that is a fifth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: thousands of runs flush a lot."""
    shared = Path("/dev/shm")
    root = Path(mkdtemp(prefix="vime-test-", dir=shared if os.access(shared, os.W_OK) else None))
    yield root
    shutil.rmtree(root)


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def of_another_model(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))


def not_finite(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def on_a_full_disk(_: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SPOILS: list[Spoil] = [truncated, of_another_model, not_finite, on_a_full_disk]


def draw_lives(dice: random.Random, world: World, num_engines: int) -> None:
    """One engine at most computes other things than it says, in any of its lives."""
    liar = dice.randrange(num_engines) if num_engines > 1 and dice.random() < 0.4 else None
    for index in range(num_engines):
        lives = [draw_life(dice) for _ in range(6)]
        for life in lives if index == liar else []:
            _lie(life, dice)
        world.lives[f"engine_{index}"] = lives
    world.lives["router"] = [draw_life(dice) for _ in range(6)]


def _lie(life: Life, dice: random.Random) -> None:
    lie = dice.choice(["none", "loads_nothing", "keeps_cache", "computes", "labels", "halves"])
    if lie in ("loads_nothing", "keeps_cache", "halves"):
        setattr(life, lie, True)
    elif lie == "computes":
        life.computes = "with a stale copy"
    elif lie == "labels":
        life.labels = "run:0:0123456789ab"


async def chaos(run: WholeRun, dice: random.Random, num_engines: int) -> None:
    """Processes die, bytes on the disk change, and others load engines, for no reason."""
    while True:
        await anyio.sleep(dice.uniform(0, 60))
        snapshots = sorted(run.staging.glob("step_*/model.safetensors"))
        if snapshots and dice.random() < 0.3:
            path = dice.choice(snapshots)
            content = bytearray(path.read_bytes())
            content[-1] ^= 64
            path.write_bytes(content)
        elif dice.random() < 0.5:
            server = run.world.now(f"engine_{dice.randrange(num_engines)}")
            server.content, server.version = Content("foreign"), "run:0:0123456789ab"
        else:
            dice.choice(run.world.servers).kill()


async def train(run: WholeRun, dice: random.Random) -> None:
    """Steps that are due, now and then with weights that cannot be used."""
    for step in range(1, dice.randint(2, 6)):
        spoil = dice.choice(SPOILS) if dice.random() < 0.25 else None
        with anyio.move_on_after(dice.choice([1e9, 1e9, 1e9, 5])):  # Ctrl-C, now and then
            await run.dispatch(step, force=dice.random() < 0.2, spoil=spoil)
        await anyio.sleep(dice.uniform(0, 60))
    if dice.random() < 0.8:
        await run.drain(dice.choice([1e6, 1e6, 30]))


async def one_run(dice: random.Random, root: Path) -> WholeRun:
    world = World()
    num_engines = dice.choice([1, 2, 3])
    draw_lives(dice, world, num_engines)
    config = EvalConfig(
        uses_snapshots=True,
        num_gpus=num_engines,
        max_in_flight=dice.randint(1, 3),
        overflow_policy=dice.choice(["backpressure", "skip", "latest"]),
        keep_snapshots=dice.randint(0, 2),
        export_timeout_s=dice.choice([3, 100]),
        pin_timeout_s=dice.choice([20, 300]),
        eval_timeout_s=dice.choice([30, 1000]),
        backpressure_timeout_s=dice.choice([10, 1000]),
    )
    settings = {
        "num_engines": num_engines,
        "min_engines": dice.choice([None, 2]) if num_engines == 3 else None,
        "start_timeout_s": 60, "pin_timeout_s": config.pin_timeout_s, "call_timeout_s": 10,
        "probe_interval_s": dice.choice([20, 1000]), "probe_timeout_s": 10, "end_timeout_s": 1,
        "max_restarts": dice.choice([0, 3, 100]),
    }  # fmt: skip
    async with (
        open_run(world, root, config, settings) as run,
        anyio.create_task_group() as tasks,
    ):
        run.questions.pause = lambda: dice.choice([0, 0, dice.uniform(0, 60)])
        if dice.random() < 0.6:
            tasks.start_soon(chaos, run, dice, num_engines)
        await train(run, dice)
        tasks.cancel_scope.cancel()
    return run


def verify_run(run: WholeRun, root: Path) -> None:
    """Everything that must hold of any run."""
    assert [str(v) for v in check(run.records, ended=True)] == []
    dispatched = Counter(r.id for r in run.records if r.trigger == "dispatch")
    assert Counter(str(o.rollout_id) for o in run.outcomes) == dispatched
    for outcome in run.outcomes:
        if outcome.state == "done":
            assert outcome.weight_version is not None
            assert run.questions.is_sound(outcome.weight_version), "a score of other weights"
            assert outcome.canary is not None
        else:
            assert f"eval/skipped_{outcome.reason}" in outcome.metrics
            assert outcome.reason != "crashed", outcome.detail
    verify_causes(run.records)
    assert not any(record.rejected for record in run.records)
    assert run.world.wrongs == []
    assert run.world.leftovers() == []
    assert all(capture.released == 1 for capture in run.captures)
    assert not list((root / "staging").glob(".vime*")), "only finished snapshots are left"


def verify_causes(records: list[Record]) -> None:
    """The trace says why: a point pins the engines, they let it run, and one of them fails it."""
    by_seq = {record.seq: record for record in records}
    expected = {
        ("engine", "pin"): ("point", "pin"),
        ("point", "run"): ("engine", "serve"),
        ("point", "skip"): ("engine", "suspect"),
    }
    for record in records:
        cause = expected.get((record.machine, record.trigger))
        if cause is None or (record.trigger == "skip" and record.reason != "pin_violation"):
            continue
        assert record.cause_seq is not None
        found = by_seq[record.cause_seq]
        assert (found.machine, found.trigger) == cause, record
        assert found.weight_version == record.weight_version, record


def search(seeds: Sequence[int], memory: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Run them all; what came of their points, by reason, ``None`` for a score."""
    seen: Counter[str | None] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        threads_take(monkeypatch, lambda dice=dice: dice.choice([0, 0, 1, 10]))  # type: ignore[misc]
        root = memory / str(seed)
        root.mkdir()
        with repeatable(seed, __file__):
            run = run_virtual(lambda dice=dice, root=root: one_run(dice, root), seed)  # type: ignore[misc]
            verify_run(run, root)
        shutil.rmtree(root)
        seen.update(outcome.reason for outcome in run.outcomes)
    return seen


def test_no_score_is_of_other_weights_and_every_invariant_holds(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = search(SEEDS[:NUM_FAST], memory, monkeypatch)
    if len(SEEDS) >= NUM_FAST:
        assert {None, "unhealthy", "pin_violation"} <= seen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_nor_is_one_in_thousands_of_schedules(
    block: int, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = search(SEEDS[NUM_FAST:][block::NUM_BLOCKS], memory, monkeypatch)
    if len(SEEDS) >= 200 * NUM_BLOCKS:
        expected = {None, "unhealthy", "pin_violation", "snapshot_invalid", "export_failed",
                    "version_mixed"}  # fmt: skip
        assert seen.keys() >= expected, "the schedules try all of it"
