from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from tests.runner.engine_double import EngineDouble, answer, broken, status
from tests.runner.sockets import serving, speaks_for
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.eval.contracts import PinProof
from vime.eval.runner import generate
from vime.eval.runner.generate import (
    MAX_ATTEMPTS,
    Generation,
    Generator,
    PromptRefused,
    open_generator,
    sample_seed,
    sampling_of,
    version_problem,
)
from vime.rollout.checkpoint_eval import EvalSkip

PROMPT = [1, 2, 3]
V = "run:1:abc"


@asynccontextmanager
async def asking(
    engine: EngineDouble, key: str | None = "secret", **settings: Any
) -> AsyncIterator[Generator]:
    proof = PinProof("http://engine.test", "m", V, api_key=key)
    async with open_generator(EvalConfig(**settings), proof, engine.connect) as generator:
        yield generator


@asynccontextmanager
async def asking_over_sockets(
    engine: EngineDouble, key: str | None = "secret", **settings: Any
) -> AsyncIterator[Generator]:
    async with serving(speaks_for(engine)) as (url, _):
        proof = PinProof(url, "m", V, api_key=key)
        async with open_generator(EvalConfig(**settings), proof) as generator:
            yield generator


def sampling(**settings: Any) -> dict[str, Any]:
    return sampling_of(EvalConfig(**settings))


Ask = Callable[..., Generation]


@pytest.fixture(params=["memory", "sockets"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """One request: on virtual time, and once more over the network, there without backoff."""
    over_sockets = request.param == "sockets"
    if over_sockets:
        monkeypatch.setattr(generate, "FIRST_BACKOFF_S", 0.0)
    way = asking_over_sockets if over_sockets else asking

    def ask(
        engine: EngineDouble,
        prompt: list[int] = PROMPT,
        key: str | None = "secret",
        **settings: Any,
    ) -> Generation:
        async def main() -> Generation:
            async with way(engine, key, **settings) as generator:
                return await generator.generate(prompt, 7, sampling(**settings))

        return anyio.run(main) if over_sockets else run_virtual(main)

    return ask


def test_a_request_says_what_the_endpoint_expects(ask: Ask) -> None:
    engine = EngineDouble(api_key="secret")
    ask(engine, temperature=0.5, top_p=0.9, max_response_len=8)
    assert engine.requests == [
        {
            "model": "m",
            "token_ids": PROMPT,
            "sampling_params": {
                "n": 1,
                "temperature": 0.5,
                "top_p": 0.9,
                "max_tokens": 8,
                "detokenize": False,
                "seed": 7,
            },
        }
    ]


def test_an_answer_carries_its_tokens_its_end_and_its_weights(ask: Ask) -> None:
    engine = EngineDouble()
    engine.answer = lambda tokens, seed: [5, 6, 257]
    generation = ask(engine)
    assert (generation.token_ids, generation.finish_reason) == ([5, 6, 257], "stop")
    assert generation.weight_version == V
    assert ask(engine, max_response_len=2).finish_reason == "length"


@pytest.mark.parametrize(
    "fault",
    [
        status(408),
        status(429),
        status(500),
        status(502),
        status(503),
        broken,
        lambda request: (200, b"<html>not json"),
        lambda request: (200, {"choices": []}),
        lambda request: (200, answer([5], V, "abort")),
        lambda request: (200, answer([5], "other", "abort")),
    ],
)
def test_a_passing_failure_is_tried_again(ask: Ask, fault: Any) -> None:
    engine = EngineDouble()
    engine.faults = [fault, fault]
    assert ask(engine).weight_version == V
    assert len(engine.requests) == 3
    assert engine.requests[0] == engine.requests[2]


def test_a_lasting_failure_ends_the_evaluation_and_is_named(ask: Ask) -> None:
    engine = EngineDouble()
    engine.faults = [status(503)] * 100
    with pytest.raises(EvalSkip) as caught:
        ask(engine)
    assert caught.value.reason == "unhealthy"
    assert "8 attempts failed, the last one with: HTTP 503: fault 503" in caught.value.detail
    assert "generating at http://" in caught.value.detail
    assert len(engine.requests) == MAX_ATTEMPTS


def test_an_engine_that_never_answers_ends_at_the_deadline() -> None:
    engine = EngineDouble()

    async def main() -> float:
        engine.hold = anyio.Event()
        began = anyio.current_time()
        async with asking(engine, eval_timeout_s=50.0) as generator:
            with pytest.raises(EvalSkip, match="no answer within 50 s") as caught:
                await generator.generate(PROMPT, 7, sampling())
        assert caught.value.reason == "unhealthy"
        return anyio.current_time() - began

    assert run_virtual(main) == pytest.approx(50.0)


def test_cancellation_ends_a_request_in_the_middle_of_its_backoff() -> None:
    engine = EngineDouble()
    engine.faults = [status(503)] * 100

    async def main() -> None:
        async with asking(engine) as generator:
            with anyio.move_on_after(1.0) as scope:
                await generator.generate(PROMPT, 7, sampling())
            assert scope.cancelled_caught

    run_virtual(main)
    assert 1 < len(engine.requests) < MAX_ATTEMPTS


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_prompt_that_the_engine_refuses_is_asked_once(ask: Ask, code: int) -> None:
    engine = EngineDouble()
    engine.faults = [status(code)]
    with pytest.raises(PromptRefused, match=f"HTTP {code}: fault {code}"):
        ask(engine)
    assert len(engine.requests) == 1


def test_a_prompt_that_is_too_long_is_refused_with_the_engines_words(ask: Ask) -> None:
    with pytest.raises(PromptRefused, match=r"length 300.* is longer than the maximum model"):
        ask(EngineDouble(), [1] * 300)


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_fleet_that_does_not_know_us_ends_the_evaluation_at_once(ask: Ask, code: int) -> None:
    engine = EngineDouble()
    engine.faults = [status(code)]
    with pytest.raises(EvalSkip, match=f"HTTP {code}") as caught:
        ask(engine)
    assert caught.value.reason == "unhealthy"
    assert len(engine.requests) == 1


def test_the_key_is_sent_only_where_there_is_one(ask: Ask) -> None:
    with pytest.raises(EvalSkip, match="HTTP 401: Unauthorized"):
        ask(EngineDouble(api_key="another"))
    assert ask(EngineDouble(), key=None).weight_version == V


@pytest.mark.parametrize("version", ["default", "run:0:abc", None])
def test_an_answer_from_other_or_unknown_weights_is_never_believed(
    ask: Ask, version: str | None
) -> None:
    engine = EngineDouble()
    engine.faults = [lambda request: (200, answer([5, 6], version))]
    with pytest.raises(EvalSkip) as caught:
        ask(engine)
    assert caught.value.reason == "version_mixed"
    assert repr(V) in caught.value.detail


def spans(*triples: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": v, "start": start, "end": end} for v, start, end in triples]


@pytest.mark.parametrize(
    ("given", "num_tokens", "good"),
    [
        (spans((V, 0, 5)), 5, True),
        (spans((V, 2, 5), (V, 0, 2)), 5, True),
        (spans((V, 0, 0)), 0, True),
        (spans((V, 0, 2), ("new", 2, 5)), 5, False),
        (spans(("old", 0, 1), (V, 1, 5)), 5, False),
        (spans((V, 0, 4)), 5, False),
        (spans((V, 1, 5)), 5, False),
        (spans((V, 0, 2), (V, 3, 5)), 5, False),
        (spans((V, 0, 3), (V, 0, 2)), 3, True),
        ([], 5, False),
        ([], 0, False),
    ],
)
def test_spans_prove_an_answer_only_when_they_cover_it_with_the_expected_version(
    given: list[dict[str, Any]], num_tokens: int, good: bool
) -> None:
    assert (version_problem(given, num_tokens, V) is None) is good


def test_seeds_are_the_same_in_every_evaluation_and_differ_between_samples() -> None:
    seeds = {
        (base, name, prompt, sample): sample_seed(base, name, prompt, sample)
        for base in (0, 1)
        for name in ("a", "b")
        for prompt in range(50)
        for sample in range(4)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert sample_seed(0, "gsm8k", 3, 1) == 1339457918  # a changed seed changes every score
