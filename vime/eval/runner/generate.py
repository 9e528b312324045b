"""Tokens in, tokens out: asks pinned engines, and believes no answer without its weight version.

One request is one sample (``n`` = 1), so that each has a seed, retries and a deadline of its own.
What vLLM's ``/inference/v1/generate`` answers: ``choices[0].token_ids`` (the stop token
included), ``finish_reason``, and ``weight_versions``, the spans ``{version, start, end}`` of the
tokens that each version of the weights sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson

from vime.eval.config import EvalConfig
from vime.eval.config.datasets import DatasetSettings
from vime.eval.contracts import PinProof
from vime.eval.runner.http import Connect, Post, Unreachable, connect
from vime.rollout.checkpoint_eval import EvalSkip

GENERATE_PATH = "/inference/v1/generate"

#: Attempts of one request, the first included. With the backoff, a fleet that stays away is
#: given up after about half a minute.
MAX_ATTEMPTS = 8
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0

#: A request may not outlive the router's own limit, whatever the evaluation may take.
MAX_REQUEST_S = 1800.0

#: 408 and 429 are the router's full queue; 5xx an engine that died under the request, or none.
_TRANSIENT = frozenset({408, 425, 429})
#: The request itself is wrong: a prompt that is too long, or has tokens that the model lacks.
_REFUSED = frozenset({400, 413, 422})
#: Reasons to finish that leave a whole answer; others ("abort", "error") leave a part of one.
_WHOLE = frozenset({"stop", "length", "repetition"})


class PromptRefused(Exception):
    """The engine refuses this prompt, and would refuse it again."""


class _Transient(Exception):
    """One attempt failed in a way that another one may not."""


@dataclass(frozen=True)
class Generation:
    """One whole answer.

    Attributes:
        token_ids: the stop token included.
        finish_reason: ``stop``, ``length`` or ``repetition``.
        weight_version: what generated every one of the tokens.
    """

    token_ids: list[int]
    finish_reason: str
    weight_version: str


def sample_seed(seed: int, dataset: str, prompt_index: int, sample_index: int) -> int:
    """The sampling seed of one sample, from 0 to 2**31 − 1: the same in every evaluation."""
    key = f"{seed}\0{dataset}\0{prompt_index}\0{sample_index}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4]) >> 1


def sampling_of(settings: EvalConfig | DatasetSettings) -> dict[str, Any]:
    """The sampling parameters of one eval set, as vLLM names them."""
    return {
        "n": 1,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_response_len,
        "detokenize": False,  # it is the tokens that are wanted; they are decoded here
    }


class Generator:
    """Asks the engines behind one proof.

    Args:
        post: to the proof's address, with its key; see :func:`open_generator`.
        config: the deadlines.
        proof: the served model's name and the weight version to expect.
    """

    def __init__(self, post: Post, config: EvalConfig, proof: PinProof) -> None:
        self._post = post
        self._proof = proof
        self._deadline_s = min(config.eval_timeout_s, MAX_REQUEST_S)

    async def generate(
        self, token_ids: Sequence[int], seed: int, sampling: Mapping[str, Any]
    ) -> Generation:
        """One answer; failures of transport are tried again, with backoff.

        Args:
            token_ids: the prompt.
            seed: of this one answer.
            sampling: see :func:`sampling_of`.

        Raises:
            PromptRefused: the engine does not take this prompt.
            EvalSkip: ``version_mixed``: a token came from other weights than the proof's, or
                from nobody knows which; ``unhealthy``: the fleet cannot be asked.
        """
        body = orjson.dumps(
            {
                "model": self._proof.model,
                "token_ids": list(token_ids),
                "sampling_params": {**sampling, "seed": seed},
            }
        )
        problem = "no answer"
        with anyio.move_on_after(self._deadline_s):
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    await anyio.sleep(_backoff_s(attempt, seed))
                try:
                    return await self._attempt(body)
                except _Transient as failure:
                    problem = str(failure)
            raise self._unhealthy(f"{MAX_ATTEMPTS} attempts failed, the last one with: {problem}")
        raise self._unhealthy(f"no answer within {self._deadline_s:.4g} s ({problem})")

    async def _attempt(self, body: bytes) -> Generation:
        try:
            status, said = await self._post(GENERATE_PATH, body)
        except Unreachable as error:
            raise _Transient(str(error)) from error
        if status != 200:
            raise self._failure(status, said)
        try:
            choice = orjson.loads(said)["choices"][0]
            tokens = list(map(int, choice["token_ids"]))
            reason, spans = choice["finish_reason"], choice.get("weight_versions") or []
            problem = version_problem(spans, len(tokens), self._proof.weight_version)
        except (ValueError, LookupError, TypeError) as error:
            raise _Transient(f"an answer of another form: {_text(said)}") from error
        if reason not in _WHOLE:
            raise _Transient(f"the engine broke off the answer (finish_reason {reason!r})")
        if problem:
            raise EvalSkip("version_mixed", problem)
        return Generation(tokens, reason, self._proof.weight_version)

    def _failure(self, status: int, said: bytes) -> Exception:
        """What an answer without an answer means."""
        problem = f"HTTP {status}: {_error_message(said)}"
        if status in _TRANSIENT or status >= 500:
            return _Transient(problem)
        if status in _REFUSED:
            return PromptRefused(problem)
        return self._unhealthy(problem)

    def _unhealthy(self, problem: str) -> EvalSkip:
        return EvalSkip("unhealthy", f"generating at {self._proof.base_url}: {problem}")


@asynccontextmanager
async def open_generator(
    config: EvalConfig, proof: PinProof, connect: Connect = connect
) -> AsyncIterator[Generator]:
    """A :class:`Generator` with connections of its own, closed on leaving.

    Args:
        config: the deadlines.
        proof: where to ask, with which key, and what to expect.
        connect: the way there; over the network unless a test has another.
    """
    async with connect(proof) as post:
        yield Generator(post, config, proof)


def version_problem(spans: Sequence[dict[str, Any]], num_tokens: int, expected: str) -> str | None:
    """Why an answer is no proof of its weights, as a sentence; ``None`` when it is one.

    Args:
        spans: ``weight_versions`` of the answer: ``version``, ``start`` and ``end`` (exclusive).
        num_tokens: of the answer; every one must lie in a span of ``expected``.
        expected: the point's weight version.
    """
    covered = 0
    for span in sorted(spans, key=lambda span: int(span["start"])):
        start, end = int(span["start"]), int(span["end"])
        if span["version"] != expected:
            return (
                f"tokens {start} to {end} of an answer were generated by weights "
                f"{span['version']!r}; expected {expected!r}"
            )
        if start > covered:
            break
        covered = max(covered, end)
    if covered < num_tokens or not spans:
        return (
            f"an answer of {num_tokens} tokens names the weights of the first {covered} only; "
            f"expected {expected!r} for all"
        )
    return None


def _backoff_s(attempt: int, seed: int) -> float:
    """Doubles up to a limit; the seed spreads the requests that failed together."""
    full = min(FIRST_BACKOFF_S * 2.0 ** (attempt - 1), MAX_BACKOFF_S)
    return full * (0.5 + (seed % 1024) / 2048)


def _error_message(said: bytes) -> str:
    """The message of vLLM's error object, or the body's beginning."""
    try:
        error = orjson.loads(said)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return _text(said)


def _text(said: bytes) -> str:
    """The beginning of a body, for messages."""
    return said[:1200].decode(errors="replace")[:300]
