"""Recomputes every reported score from a copy of the snapshot that nobody has damaged.

Two ways. For *every* score, ``transformers`` loads the copy cold and is shown each prompt with the
answer that was reported: every token of it must have been the likeliest, or have missed that by
less than :data:`TIE` in its logit, which two correct programs may round differently. For *some*,
a plain vLLM server is started on the copy, with nothing of vime's in it, and must give the same
tokens up to the first such tie. The score must be the mean of what these answers are worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from bench.chaos import weights
from bench.chaos.reward import worth_of
from bench.json_lines import json_lines
from bench.plain_engine import plain_engine
from vime.eval.fleet.launch import loopback_client

#: Logits of these weights are of the order of 1 to 10, and their rounding errors of 1e-5.
TIE = 1e-3

_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """One line of a samples file.

    Attributes:
        prompt: the text.
        tokens: of the answer, the stop token included.
        version: the weights that it says it came from.
    """

    prompt: str
    tokens: tuple[int, ...]
    version: str


def read_answers(path: Path) -> list[Answer]:
    """The samples of one point."""
    return [
        Answer(row["prompt"], tuple(row["output_token_ids"] or ()), str(row["weight_version"]))
        for row in json_lines(path)
    ]


def score_of(answers: Sequence[Answer], kept: Path) -> float:
    """The mean worth of the answers, decoded by the kept snapshot's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kept)
    texts = [tokenizer.decode(list(a.tokens), skip_special_tokens=True) for a in answers]
    return sum(map(worth_of, texts)) / len(texts)


def ties_of(answers: Sequence[Answer], kept: Path) -> list[list[float]]:
    """By how much each token misses the likeliest one's logit, in a cold load of ``kept``.

    Returns:
        One list an answer, one number of at least 0 a token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kept)
    model = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for answer in answers:
            prompt = tokenizer(answer.prompt).input_ids
            ids = torch.tensor([[*prompt, *answer.tokens]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            given = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            found.append((logits.max(dim=1).values - given).tolist())
    return found


def problems_of(
    answers: Sequence[Answer], score: float, version: str, kept: Path, prompts: Sequence[str]
) -> list[str]:
    """Why a reported score is wrong, one sentence for each thing; empty when it is right.

    Args:
        answers: the samples behind it.
        score: as reported.
        version: the weights that it names.
        kept: the point's snapshot, undamaged.
        prompts: of the eval set.
    """
    problems = []
    if [answer.prompt for answer in answers] != list(prompts):
        problems.append(f"{len(answers)} samples, which are not those of the eval set")
    if foreign := {a.version for a in answers} - {version}:
        problems.append(f"samples of {sorted(foreign)}, reported for {version}")
    right = score_of(answers, kept)
    if not math.isclose(score, right, abs_tol=1e-9):
        problems.append(f"{score} was reported, and the answers are worth {right}")
    for index, missed_by in enumerate(ties_of(answers, kept)):
        if not missed_by or max(missed_by) > TIE:
            place = missed_by.index(max(missed_by)) if missed_by else 0
            problems.append(
                f"token {place} of answer {index} is no greedy one of the snapshot: its logit "
                f"misses the best by {max(missed_by, default=math.inf):.4g}"
            )
            break
    return problems


def engine_problems(answers: Sequence[Answer], kept: Path, log_path: Path) -> list[str]:
    """The same, by a plain vLLM server that is started on ``kept``, token by token."""
    cold = anyio.run(_ask_cold_engine, answers, kept, log_path)
    for index, (answer, tokens) in enumerate(zip(answers, cold, strict=True)):
        if tokens == answer.tokens:
            continue
        pairs = zip(tokens, answer.tokens, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), -1)
        instead = Answer(answer.prompt, tokens, answer.version)
        if place < 0 or ties_of([instead], kept)[0][place] > TIE:
            return [f"answer {index}: {answer.tokens}; a cold engine gives {tokens}"]
    return []


async def _ask_cold_engine(
    answers: Sequence[Answer], kept: Path, log_path: Path
) -> list[tuple[int, ...]]:
    words = ["--served-model-name", "cold", "--dtype", "float32"]
    words += ["--max-model-len", str(weights.MAX_TOKENS)]
    async with (
        plain_engine(kept, log_path, *words) as engine,
        loopback_client(engine.url) as client,
    ):
        return [await _ask(client, answer, kept) for answer in answers]


async def _ask(client: httpx.AsyncClient, answer: Answer, kept: Path) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    order: dict[str, Any] = {
        "model": "cold",
        "token_ids": AutoTokenizer.from_pretrained(kept)(answer.prompt).input_ids,
        "sampling_params": {"temperature": 0.0, "max_tokens": weights.NUM_ANSWER_TOKENS},
    }
    with anyio.fail_after(_ANSWER_TIMEOUT_S):
        response = await client.post("/inference/v1/generate", json=order)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return tuple(int(token) for token in choice["token_ids"])
