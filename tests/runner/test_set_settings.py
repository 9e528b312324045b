"""Settings of each eval set by itself: sampling, samples, rewards, and prompts that are too long."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import VERSION
from tests.runner.engine_double import EngineDouble
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.runner.stock import StockEvaluation
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio

LONG = "x" * 50


def sets(tmp_path: Path, **rows: list[dict[str, Any]]) -> tuple[tuple[str, Path], ...]:
    for name, lines in rows.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    return tuple((name, tmp_path / name) for name in rows)


def row(prompt: str, label: Any = "") -> dict[str, Any]:
    return {"input": prompt, "label": label}


def rows_of(output: EvalOutput) -> list[dict[str, Any]]:
    assert output.samples_path is not None
    return [json.loads(line) for line in output.samples_path.read_bytes().splitlines()]


async def test_each_set_is_asked_and_scored_by_its_own_settings(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.answer = lambda tokens, seed: [ord("7") - 33, 257]
    config = EvalConfig(
        prompt_data=sets(tmp_path, few=[row("a", "7.0")] * 3, many=[row("b", "seven")] * 3),
        dataset_overrides={
            "few": {"take": 2, "reward": "numeric", "max_response_len": 9},
            "many": {"n_samples_per_prompt": 4, "temperature": 0.7, "top_p": 0.5},
        },
    )
    output = await StockEvaluation(config, tmp_path / "run", engine.connect).evaluate(
        point, snapshot, proof
    )
    assert (output.metrics["eval/few"], output.metrics["eval/many"]) == (1.0, 0.0)
    assert "eval/many/pass@4" in output.metrics
    assert "eval/few/pass@2" not in output.metrics
    assert "eval/few/prompts_skipped" not in output.metrics
    assert Counter(r["dataset"] for r in rows_of(output)) == {"few": 2, "many": 12}
    asked = Counter(
        (s["temperature"], s["top_p"], s["max_tokens"])
        for s in (request["sampling_params"] for request in engine.requests)
    )
    assert asked == {(0.0, 1.0, 9): 2, (0.7, 0.5, 256): 12}


async def test_a_set_that_takes_fewer_examples_has_the_same_seeds_for_them(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    data = sets(tmp_path, toy=[row(f"q{n}") for n in range(6)])
    seeds = []
    for take in (6, 2):
        config = EvalConfig(
            prompt_data=data, n_samples_per_prompt=2, dataset_overrides={"toy": {"take": take}}
        )
        stock = StockEvaluation(config, tmp_path / str(take), EngineDouble().connect)
        output = await stock.evaluate(point, snapshot, proof)
        seeds.append([r["seed"] for r in rows_of(output)])
    assert len(set(seeds[0])) == 12
    assert seeds[1] == seeds[0][:4]


@pytest.mark.parametrize(
    ("policy", "num_asked", "lengths", "cut", "skipped", "failed_ratio"),
    [("fail", 2, [2, 10], 0, 0, 1 / 3), ("cut", 3, [2, 10, 10], 1, 0, 0), ("skip", 2, [2, 10], 0, 1, 0)],
)  # fmt: skip
async def test_a_prompt_that_is_too_long_fails_is_cut_or_left_out_and_is_counted(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof,
    policy: str, num_asked: int, lengths: list[int], cut: int, skipped: int, failed_ratio: float,
) -> None:  # fmt: skip
    engine = EngineDouble()
    config = EvalConfig(
        prompt_data=sets(tmp_path, toy=[row("ab"), row("y" * 40 + "0123456789"), row("x" * 10)]),
        max_prompt_len=10,
        overlong_prompt=policy,
    )
    output = await StockEvaluation(config, tmp_path / "run", engine.connect).evaluate(
        point, snapshot, proof
    )
    asked = [request["token_ids"] for request in engine.requests]
    assert sorted(map(len, asked)) == lengths
    assert len(asked) == num_asked
    if policy == "cut":
        assert [ord(c) - 33 for c in "0123456789"] in asked
    assert output.metrics["eval/toy/prompts_cut"] == cut
    assert output.metrics["eval/toy/prompts_skipped"] == skipped
    assert output.metrics["eval/toy/failed_ratio"] == pytest.approx(failed_ratio)
    said = "toy prompt 1: the prompt has 50 tokens; --eval-max-prompt-len is 10"
    assert output.detail.get("prompts_skipped") == ([said] if policy == "skip" else None)
    (failure,) = output.detail["failures"] or [None]
    assert (failure is not None) == (policy == "fail")
    assert [r["prompt_index"] for r in rows_of(output)] == (
        [0, 2] if policy == "skip" else [0, 1, 2]
    )


async def test_a_set_without_any_prompt_that_is_short_enough_has_no_score(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    config = EvalConfig(
        prompt_data=sets(tmp_path, toy=[row(LONG)]), max_prompt_len=10, overlong_prompt="skip"
    )
    stock = StockEvaluation(config, tmp_path / "run", EngineDouble().connect)
    with pytest.raises(EvalSkip, match=r"every prompt of toy has more than .* 10 tokens"):
        await stock.evaluate(point, snapshot, proof)


async def test_text_prompts_go_through_the_chat_template_where_that_is_wanted(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    config = EvalConfig(
        prompt_data=sets(tmp_path, toy=[row("hi")]), apply_chat_template=True, system_prompt="short"
    )
    output = await StockEvaluation(config, tmp_path / "run", engine.connect).evaluate(
        point, snapshot, proof
    )
    text = "".join(chr(token + 33) for token in engine.requests[0]["token_ids"][1:])
    assert text == "system:short;user:hi;assistant:"
    assert rows_of(output)[0]["prompt"][0] == {"role": "system", "content": "short"}
    assert rows_of(output)[0]["weight_version"] == VERSION
