"""Why: the chain of causes crosses from machine to machine, and stays short."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fsm.traces import SECOND, START_WALL_NS, Run, healthy_run, pinned_point
from vime.fsm.explain import explain
from vime.fsm.read import read_trace
from vime.fsm.sentences import line, sentence
from vime.fsm.why import Story, stories


def story_of(path: Path, point: str, **options: int) -> Story:
    (story,) = stories(read_trace(path), ["point"], [point], **options)
    return story


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """Point 30 is skipped because an engine, long in use, hung."""
    run = Run(tmp_path / "t")
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready", 30)
    for step in (10, 20):
        pinned_point(run, step)
    run.fire("point", 30, "dispatch")
    run.fire("point", 30, "export")
    asked = run.fire("point", 30, "pin")
    run.fire("engine", "eval-0", "pin", cause_seq=asked)
    detail = {"message": "no answer\nwithin 600 s"}
    suspect = run.fire("engine", "eval-0", "suspect", 600, reason="hung", detail=detail)
    run.fire("point", 30, "skip", reason="unhealthy", cause_seq=suspect)
    run.trace.close()
    return run.path


def test_a_skip_is_traced_back_through_the_engine_to_the_dispatch(hung: Path) -> None:
    story = story_of(hung, "30")
    assert [(link.crosses, str(link)) for link in story.chain] == [
        (False, "point 30 was skipped: unhealthy"),
        (True, "engine eval-0 became suspect: hung: no answer"),
        (False, "engine eval-0 began to load its weights"),
        (True, "point 30 asked the fleet for its weights"),
        (False, "the export of point 30 began"),
        (False, "point 30 was dispatched"),
    ]
    assert [link.record.trigger for link in story.own] == ["dispatch", "export", "pin", "skip"]


def test_a_long_stretch_within_one_machine_is_shortened_to_its_ends(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=40)
    chain = story_of(path, "400").chain
    assert len(chain) < 10
    assert str(chain[-1]).startswith("engine eval-0 was started (")
    assert sum(link.skipped for link in chain) + len(chain) == 2 + 2 * 40 + 2


def test_a_point_of_an_earlier_attempt_is_told_by_its_latest_life(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    del run._machines["point", "1"]
    run.machine("point", 1).attempt = 1
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "skip", reason="busy")
    run.trace.close()
    assert [link.record.seq for link in story_of(run.path, "1").own] == [1, 2]


@pytest.mark.parametrize("cause_seq", [-1, 2, 77, 1 << 63])
def test_a_cause_that_is_no_earlier_record_ends_the_chain(tmp_path: Path, cause_seq: int) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    run.fire("point", 2, "dispatch")
    path = run.path
    run.trace.close()
    text = path.read_text().splitlines()
    text.append(
        text[0]
        .replace('"seq":0', '"seq":2')
        .replace('"cause_seq":null', f'"cause_seq":{cause_seq}')
    )
    path.write_text("\n".join(text))
    chain = story_of(path, "1").chain
    assert [link.record.seq for link in chain] == [2]


def test_a_cause_on_another_node_is_found_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    other = Run(tmp_path / "t", node="b")
    gone = other.fire("engine", "e", "start")
    run.fire("point", 1, "skip", reason="unhealthy", cause_seq=gone, detail={"cause_node": "b"})
    for each in (run, other):
        each.trace.close()
    chain = story_of(run.path, "1").chain
    assert [link.record.node for link in chain] == ["driver", "b"]


def test_only_the_latest_machines_are_told_when_asked(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=5)
    told = stories(read_trace(path), ["point"], last=2, with_own=False)
    assert [story.key[3] for story in told] == ["40", "50"]
    assert [story.own for story in told] == [(), ()]


def test_every_transition_has_a_sentence_and_a_line(tmp_path: Path) -> None:
    from vime.fsm.sentences import _SENTENCES
    from vime.fsm.tables import TABLES

    edges = {(name, t) for name, table in TABLES.items() for _, t, _ in table.edges()}
    assert set(_SENTENCES) == edges
    for record in read_trace(healthy_run(tmp_path / "t")):
        assert record.id in sentence(record)
        assert f"driver:{record.seq}" in line(record, 5)


def test_a_refused_trigger_is_told_as_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    with pytest.raises(Exception, match="illegal"):
        run.fire("point", 1, "finish")
    run.trace.close()
    (record,) = read_trace(run.path)
    assert sentence(record) == "point 1 refused 'finish', which is illegal when new"
    assert "finish (new, rejected)" in line(record, 0)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ([("kill", 1), ("restart", 2), ("start", 3), ("ready", 25)], "it was restarted, and ready 31 s later"),
        ([("kill", 1), ("abandon", 4)], "it was given up 5.0 s later"),
        ([("kill", 1)], "it is dead when the trace ends"),
        ([("stop", 2)], "it was stopped with the run 2.0 s later"),
    ],
)  # fmt: skip
def test_the_story_in_a_sentence_says_who_decided_it_and_how_the_engine_fared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: list[tuple[str, int]], told: str
) -> None:
    monkeypatch.setattr("time.localtime", time.gmtime)
    run = Run(tmp_path / "t")
    run.fire("engine", "eval-1", "start")
    run.fire("engine", "eval-1", "ready", 30)
    run.fire("point", 40, "dispatch")
    asked = run.fire("point", 40, "pin")
    run.fire("engine", "eval-1", "pin", cause_seq=asked)
    error = {"error": "the reload failed: Error while deserializing header"}
    suspect = run.fire("engine", "eval-1", "suspect", reason="misloaded", detail=error)
    run.fire("point", 40, "skip", 0.0, reason="pin_violation", cause_seq=suspect)
    for trigger, after_s in then:
        run.fire("engine", "eval-1", trigger, after_s)
    run.trace.close()
    when = time.strftime("%H:%M:%S", time.gmtime((START_WALL_NS + 35 * SECOND) / 1e9))
    assert explain(story_of(run.path, "40")) == (
        f"point 40 was skipped as pin_violation, because engine eval-1 became suspect at {when} "
        f"(misloaded: the reload failed: Error while deserializing header); {told}"
    )


def test_an_engine_that_was_away_already_is_told_from_its_failure_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    for trigger in ("start", "ready", "suspect", "kill", "restart"):
        run.fire("engine", "eval-0", trigger, reason="died" if trigger == "suspect" else None)
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "pin")
    away = run.fire("engine", "eval-0", "start")
    run.fire("point", 1, "skip", 60, reason="unhealthy", cause_seq=away)
    run.fire("engine", "eval-0", "ready", 10)
    run.trace.close()
    told = str(explain(story_of(run.path, "1")))
    assert "because engine eval-0 became suspect at" in told
    assert told.endswith("(died); it was restarted, and ready 75 s later".replace("75 s", "1m15s"))


def test_a_point_that_no_other_machine_decided_is_told_by_its_own_record(tmp_path: Path) -> None:
    assert explain(story_of(healthy_run(tmp_path / "t"), "20")) is None
