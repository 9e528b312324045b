"""Why a point was skipped, told through the engines: dispatcher, store and supervisor are real."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from tests.fleet.whole import WholeRun, open_run, threads_take
from tests.fleet.world import Life, World, fails
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.fsm.check import check
from vime.fsm.explain import explain
from vime.fsm.why import stories


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WholeRun:
    """Engine 1 cannot read what is given to it; its next life can."""
    monkeypatch.setattr("time.localtime", time.gmtime)
    threads_take(monkeypatch, lambda: 0.5)

    async def main() -> WholeRun:
        world = World()
        broken = fails(500, "Error while deserializing header: invalid header length")
        world.lives["engine_1"] = [Life(faults={"/collective_rpc": broken}), Life()]
        config = EvalConfig(uses_snapshots=True, num_gpus=2)
        settings = {"num_engines": 2, "start_timeout_s": 60, "probe_interval_s": 1000}
        async with open_run(world, tmp_path, config, settings) as run:
            for step in (40, 50):
                await run.dispatch(step, force=False)
                await run.drain(1e6)
                assert run.fleet is not None
                await run.fleet.wait_ready()
            await anyio.sleep(60)
        return run

    return run_virtual(main, 0)


def test_the_chain_leads_from_the_skip_through_the_engine_to_the_point_that_asked(
    run: WholeRun,
) -> None:
    assert [(o.rollout_id, o.reason) for o in run.outcomes] == [(40, "pin_violation"), (50, None)]
    assert list(check(run.records, ended=True)) == []
    (story,) = stories(run.records, ["point"], ["40"])
    told = [(link.record.machine, link.record.id, link.record.trigger) for link in story.chain]
    assert told == [
        ("point", "40", "skip"),
        ("engine", "engine_1", "suspect"),
        ("engine", "engine_1", "pin"),
        ("point", "40", "pin"),
        ("point", "40", "export"),
        ("point", "40", "dispatch"),
    ]
    assert [link.crosses for link in story.chain] == [False, True, False, True, False, False]


def test_one_sentence_says_which_engine_failed_at_what_and_when_it_was_back(run: WholeRun) -> None:
    (story,) = stories(run.records, ["point"], ["40"])
    (recovery,) = story.recoveries
    assert recovery.was_restarted
    took_s = (recovery.end.mono_ns - recovery.suspect.mono_ns) / 1e9
    when = time.strftime("%H:%M:%S", time.gmtime(recovery.suspect.wall_ns / 1e9))
    text = str(explain(story))
    assert text.startswith(
        f"point 40 was skipped as pin_violation, because engine engine_1 became suspect at {when} "
    )
    assert "Error while deserializing header: invalid header length" in text
    unit = f"{took_s:.0f} s" if took_s >= 9.95 else f"{took_s:.1f} s"
    assert text.endswith(f"; it was restarted, and ready {unit} later")
    (after,) = stories(run.records, ["point"], ["50"])
    assert explain(after) is None
