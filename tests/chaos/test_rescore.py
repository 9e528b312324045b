"""A score is recomputed from answers that only its own snapshot gives; any other one is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from bench.chaos import rescore, weights

pytestmark = pytest.mark.slow  # it imports transformers, and generates

PROMPTS = weights.prompts(0, 3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("kept")
    return [weights.write_checkpoint(root / f"step_{step}", 0, step) for step in range(2)]


@pytest.fixture(scope="module")
def answers(kept: list[Path]) -> list[list[rescore.Answer]]:
    return [answers_of(directory) for directory in kept]


def answers_of(directory: Path) -> list[rescore.Answer]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        for _ in range(weights.NUM_ANSWER_TOKENS):
            best = model(ids).logits[0, -1].argmax().reshape(1, 1)
            ids = torch.cat([ids, best], dim=1)
        tokens = tuple(ids[0, -weights.NUM_ANSWER_TOKENS :].tolist())
        found.append(rescore.Answer(prompt, tokens, "v"))
    return found


def problems(answers: list[rescore.Answer], kept: Path, more: float = 0.0) -> list[str]:
    score = rescore.score_of(answers, kept) + more
    return rescore.problems_of(answers, score, "v", kept, PROMPTS)


def test_the_answers_of_the_snapshot_itself_are_right(
    kept: list[Path], answers: list[list[rescore.Answer]]
) -> None:
    assert problems(answers[0], kept[0]) == []
    assert problems(answers[1], kept[1]) == []


def test_the_answers_of_another_step_are_found_out(
    kept: list[Path], answers: list[list[rescore.Answer]]
) -> None:
    (problem,) = problems(answers[1], kept[0])
    assert "is no greedy one of the snapshot" in problem
    mixed = [*answers[0][:-1], answers[1][-1]]
    (problem,) = problems(mixed, kept[0])
    assert problem.startswith("token 0 of answer 2") or "of answer 2" in problem


def test_one_token_that_is_another_one_is_found_out(
    kept: list[Path], answers: list[list[rescore.Answer]]
) -> None:
    first, *others = answers[0]
    changed = replace(first, tokens=(*first.tokens[:-1], (first.tokens[-1] + 1) % 256))
    (problem,) = problems([changed, *others], kept[0])
    assert problem.startswith(f"token {weights.NUM_ANSWER_TOKENS - 1} of answer 0")


def test_a_score_that_is_not_the_answers_worth_is_found_out(
    kept: list[Path], answers: list[list[rescore.Answer]]
) -> None:
    (problem,) = problems(answers[0], kept[0], more=1e-6)
    assert "was reported, and the answers are worth" in problem


def test_samples_of_other_weights_or_of_other_prompts_are_found_out(
    kept: list[Path], answers: list[list[rescore.Answer]]
) -> None:
    foreign = [replace(answers[0][0], version="w"), *answers[0][1:]]
    assert problems(foreign, kept[0]) == ["samples of ['w'], reported for v"]
    (problem,) = problems(answers[0][:2], kept[0])
    assert problem == "2 samples, which are not those of the eval set"


def test_answers_may_hold_whatever_a_model_writes(tmp_path: Path) -> None:
    samples = tmp_path / "step_1.jsonl"
    row = {"prompt": "a\u2028b\x85c\x1d", "output_token_ids": [1], "weight_version": "v"}
    samples.write_bytes(orjson.dumps(row) + b"\n")
    assert rescore.read_answers(samples) == [rescore.Answer(row["prompt"], (1,), "v")]
