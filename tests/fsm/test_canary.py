"""When two answers to the canary prompts agree, and what of them a record holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fsm.traces import Run, version
from vime.fsm.canary import TOLERANCE, Canary, difference
from vime.fsm.check import Check
from vime.fsm.check_rule import Violation
from vime.fsm.read import read_trace

ONE = Canary(((1, 2), (3, 4)), ((-1.0, -2.0), (-0.5, -3.0)), ((1.0, 0.1), (2.0, 1.0)))


def test_a_record_holds_all_of_it() -> None:
    assert Canary.of_detail(json.loads(json.dumps(ONE.as_detail()))) == ONE


@pytest.mark.parametrize(
    "detail",
    [
        None,
        [],
        {},
        {"tokens": [[1]], "logprobs": [[-1.0]]},
        {"tokens": [[1]], "logprobs": [[-1.0, -2.0]], "gaps": [[0.5]]},
        {"tokens": [["1"]], "logprobs": [[-1.0]], "gaps": [[0.5]]},
        {"tokens": [[1]], "logprobs": [[float("nan")]], "gaps": [[0.5]]},
        {"tokens": 1, "logprobs": 1, "gaps": 1},
    ],
)
def test_what_is_nothing_like_it_is_none(detail: object) -> None:
    assert Canary.of_detail(detail) is None


def test_the_digest_changes_with_any_token_and_any_probability() -> None:
    others = [
        replace(ONE, tokens=((1, 2), (3, 5))),
        replace(ONE, logprobs=((-1.0, -2.0), (-0.5, -3.0000001))),
    ]
    assert len({ONE.digest, *(other.digest for other in others)}) == 3
    assert replace(ONE, gaps=((0.0, 0.0), (0.0, 0.0))).digest == ONE.digest


def test_nearly_the_same_probabilities_agree_and_others_do_not() -> None:
    near = replace(ONE, logprobs=((-1.0, -2.0), (-0.5, -3.0 - TOLERANCE / 2)))
    far = replace(ONE, logprobs=((-1.0, -2.0), (-0.5, -3.0 - TOLERANCE * 2)))
    assert difference(ONE, near) is None
    assert difference(ONE, far) == "canary 1, token 1: 4 (logprob -3.0000) and 4 (-3.5000)"


def test_another_token_is_a_difference_unless_both_were_about_as_likely() -> None:
    wrong = replace(ONE, tokens=((9, 2), (3, 4)))
    assert difference(ONE, wrong) == "canary 0, token 0: 1 (logprob -1.0000) and 9 (-1.0000)"
    tied = replace(ONE, tokens=((1, 9), (3, 4)))
    assert difference(ONE, tied) is None
    sure = replace(tied, gaps=((1.0, 3.0), (2.0, 1.0)))
    assert difference(ONE, sure) is not None
    assert difference(sure, ONE) is not None


def test_what_follows_a_tie_is_another_answer_and_is_not_compared() -> None:
    tied = Canary(((9, 7), (3, 4)), ((-1.0, -8.0), (-0.5, -3.0)), ((0.0, 5.0), (2.0, 1.0)))
    assert difference(replace(ONE, gaps=((0.0, 0.1), (2.0, 1.0))), tied) is None


def test_answers_of_different_lengths_differ() -> None:
    shorter = Canary(((1,), (3, 4)), ((-1.0,), (-0.5, -3.0)), ((1.0,), (2.0, 1.0)))
    assert difference(ONE, shorter) == "the answers are of different lengths"


# -- the check of a trace ----------------------------------------------------------------------


def scored(run: Run, step: int, digest: str, *canaries: Canary) -> None:
    """A point that so many engines were pinned for, with these answers."""
    v = version(step)
    run.fire("point", step, "dispatch")
    run.fire("point", step, "pin", weight_version=v)
    for index, canary in enumerate(canaries):
        detail = {"digest": digest, "canary": canary.as_detail()}
        run.fire("engine", f"e{index}", "pin", weight_version=v)
        run.fire("engine", f"e{index}", "serve", weight_version=v, detail=detail)
    engines = [f"e{index}" for index in range(len(canaries))]
    run.fire("point", step, "run", weight_version=v, detail={"engines": engines})
    run.fire("point", step, "finish", weight_version=v, detail={"metrics": {}})


def begun(tmp_path: Path) -> Run:
    run = Run(tmp_path / "trace.jsonl")
    for index in range(2):
        run.fire("engine", f"e{index}", "start")
        run.fire("engine", f"e{index}", "ready")
    return run


def checked(run: Run) -> tuple[list[Violation], int]:
    run.trace.close()
    check = Check()
    found = [violation for record in read_trace(run.path) for violation in check.feed(record)]
    found += check.end()
    return found, check.num_unchanged


OTHER = replace(ONE, tokens=((5, 6), (7, 8)))


def test_engines_that_answer_alike_pass(tmp_path: Path) -> None:
    run = begun(tmp_path)
    scored(run, 10, "a", ONE, ONE)
    scored(run, 20, "b", OTHER, OTHER)
    scored(run, 30, "a", ONE, ONE)
    assert checked(run) == ([], 0)


def test_a_score_of_engines_that_answered_otherwise_violates_invariant_4(tmp_path: Path) -> None:
    run = begun(tmp_path)
    scored(run, 10, "a", ONE, OTHER)
    (violation,), _ = checked(run)
    assert violation.invariant == 4
    assert "point 10 is scored on weights that e0 answers otherwise than e1 did" in violation.text


def test_the_same_weights_with_other_answers_violate_invariant_4(tmp_path: Path) -> None:
    run = begun(tmp_path)
    scored(run, 10, "a", ONE, ONE)
    scored(run, 20, "a", OTHER, OTHER)
    (violation,), _ = checked(run)
    assert violation.invariant == 4
    assert "point 20" in violation.text


def test_other_weights_with_exactly_the_same_answers_are_counted(tmp_path: Path) -> None:
    run = begun(tmp_path)
    scored(run, 10, "a", ONE, ONE)
    scored(run, 20, "b", ONE, ONE)
    assert checked(run) == ([], 1)
