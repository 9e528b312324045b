"""Tokens in, tokens out: asks pinned engines, and believes no answer without its weight version.

One request is one sample (``n`` = 1), so that each has a seed, retries and a deadline of its own.
What vLLM's ``/inference/v1/generate`` answers: ``choices[0].token_ids`` (the stop token
included), ``finish_reason``, and ``weight_versions``, the spans ``{version, start, end}`` of the
tokens that each version of the weights sampled.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import anyio
import httpx

from vime.eval.config import EvalConfig
from vime.eval.config.datasets import DatasetSettings
from vime.eval.contracts import PinProof
from vime.rollout.checkpoint_eval import EvalSkip

GENERATE_PATH = "/inference/v1/generate"

#: Attempts of one request, the first included. With the backoff, a fleet that stays away is
#: given up after about half a minute.
MAX_ATTEMPTS = 8
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0

#: A request may not outlive the router's own limit, whatever the evaluation may take.
MAX_REQUEST_S = 1800.0
CONNECT_TIMEOUT_S = 10.0

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
    }


class Generator:
    """Asks the engines behind one proof.

    Args:
        client: with the proof's address and key; see :func:`open_generator`.
        config: the deadlines.
        proof: the served model's name and the weight version to expect.
    """

    def __init__(self, client: httpx.AsyncClient, config: EvalConfig, proof: PinProof) -> None:
        self._client = client
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
        problem = "no answer"
        with anyio.move_on_after(self._deadline_s):
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    await anyio.sleep(_backoff_s(attempt, seed))
                try:
                    return await self._attempt(token_ids, {**sampling, "seed": seed})
                except _Transient as failure:
                    problem = str(failure)
            raise self._unhealthy(f"{MAX_ATTEMPTS} attempts failed, the last one with: {problem}")
        raise self._unhealthy(f"no answer within {self._deadline_s:.4g} s ({problem})")

    async def _attempt(self, token_ids: Sequence[int], sampling: dict[str, Any]) -> Generation:
        body = {
            "model": self._proof.model,
            "token_ids": list(token_ids),
            "sampling_params": sampling,
        }
        try:
            response = await self._client.post(GENERATE_PATH, json=body)
        except httpx.RequestError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        self._check_status(response)
        try:
            choice = response.json()["choices"][0]
            tokens = [int(token) for token in choice["token_ids"]]
            reason, spans = choice["finish_reason"], choice.get("weight_versions") or []
            problem = version_problem(spans, len(tokens), self._proof.weight_version)
        except (ValueError, LookupError, TypeError) as error:
            raise _Transient(f"an answer of another form: {response.text:.300}") from error
        if reason not in _WHOLE:
            raise _Transient(f"the engine broke off the answer (finish_reason {reason!r})")
        if problem:
            raise EvalSkip("version_mixed", problem)
        return Generation(tokens, reason, self._proof.weight_version)

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        said = f"HTTP {status}: {_error_message(response)}"
        if status in _TRANSIENT or status >= 500:
            raise _Transient(said)
        if status in _REFUSED:
            raise PromptRefused(said)
        raise self._unhealthy(said)

    def _unhealthy(self, problem: str) -> EvalSkip:
        return EvalSkip("unhealthy", f"generating at {self._proof.base_url}: {problem}")


@asynccontextmanager
async def open_generator(
    config: EvalConfig, proof: PinProof, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Generator]:
    """A :class:`Generator` with a connection of its own, closed on leaving.

    Open one for each request that is to be in flight: httpx looks through all connections of a
    client at every request, which at 64 of them took half of this process's time.

    Args:
        config: the deadlines.
        proof: where to ask, with which key, and what to expect.
        transport: for tests; the network if absent.
    """
    headers = {} if proof.api_key is None else {"Authorization": f"Bearer {proof.api_key}"}
    async with httpx.AsyncClient(
        base_url=proof.base_url,
        headers=headers,
        # Requests have one deadline each, above; an answer may take long to begin.
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        verify=_tls() if proof.base_url.startswith("https:") else False,
        trust_env=False,  # a proxy for the outside world does not know our loopback
        transport=transport,
    ) as client:
        yield Generator(client, config, proof)


@cache
def _tls() -> ssl.SSLContext:
    """Certificates are checked; made once, for reading them takes longer than a request."""
    return httpx.create_ssl_context()


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


def _error_message(response: httpx.Response) -> str:
    """The message of vLLM's error object, or the body's beginning."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return response.text[:300]
