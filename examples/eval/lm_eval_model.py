"""A language model for lm-evaluation-harness that asks pinned engines, and proves every answer.

The harness calls it on a worker thread; its requests run on the event loop. Log-likelihoods come
from vLLM's ``prompt_logprobs``. Every answer generates at least one token, and the version of the
weights that generated it must be the snapshot's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.from_thread
import httpx

from vime.eval.contracts import PinProof
from vime.eval.runner.generate import GENERATE_PATH, version_problem
from vime.rollout.checkpoint_eval import EvalSkip

MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.25
REQUEST_TIMEOUT_S = 600.0
DEFAULT_MAX_TOKENS = 256


@dataclass
class Asker:
    """Sends generation requests to what a proof names.

    Attributes:
        client: of the router, or of the one server.
        proof: whose version every answer must carry.
        concurrency: requests in flight at once.
    """

    client: httpx.AsyncClient
    proof: PinProof
    concurrency: int

    async def ask_all(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer a body, in their order.

        Raises:
            EvalSkip: ``version_mixed`` or ``unhealthy``.
            ValueError: a request was refused, too long a prompt for instance.
        """
        answers: dict[int, dict[str, Any]] = {}
        failures: list[Exception] = []
        remaining = iter(enumerate(bodies))

        async def work() -> None:
            for index, body in remaining:
                try:
                    answers[index] = await self._ask(body)
                except (EvalSkip, ValueError) as error:
                    failures.append(error)
                    workers.cancel_scope.cancel()
                    return

        async with anyio.create_task_group() as workers:
            for _ in range(min(self.concurrency, len(bodies))):
                workers.start_soon(work)
        if failures:
            raise failures[0]
        return [answers[index] for index in range(len(bodies))]

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        problem = ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await anyio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                response = await self.client.post(GENERATE_PATH, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == httpx.codes.OK:
                return self._proven(response.json())
            problem = f"HTTP {response.status_code}: {response.text:.300}"
            if response.status_code in (400, 413, 422):
                raise ValueError(f"the engine refuses a request of the task: {problem}")
        raise EvalSkip("unhealthy", f"{self.proof.base_url}: {MAX_ATTEMPTS} attempts: {problem}")

    def _proven(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        spans = choice.get("weight_versions") or []
        problem = version_problem(spans, len(choice["token_ids"]), self.proof.weight_version)
        if problem:
            raise EvalSkip("version_mixed", problem)
        return answer


@asynccontextmanager
async def open_asker(proof: PinProof, concurrency: int) -> AsyncIterator[Asker]:
    """An :class:`Asker` whose connections are closed on leaving."""
    headers = {} if proof.api_key is None else {"Authorization": f"Bearer {proof.api_key}"}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=proof.base_url,
        headers=headers,
        timeout=REQUEST_TIMEOUT_S,
        limits=limits,
        trust_env=False,
    ) as client:
        yield Asker(client, proof, concurrency)


def make_lm(asker: Asker, tokenizer: Any, max_length: int | None) -> Any:
    """The harness's model; importing the harness takes seconds, so it happens here.

    Args:
        asker: where to ask.
        tokenizer: of ``transformers``, the snapshot's.
        max_length: of the engines, in tokens: longer contexts lose their beginning.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class PinnedLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
        """See the module."""

        @property
        def eot_token_id(self) -> int:
            """The token that ends a text."""
            return int(tokenizer.eos_token_id)

        @property
        def tokenizer_name(self) -> str:
            """Names the tokenizer in the harness's caches."""
            return str(tokenizer.name_or_path)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """Tokens of a text."""
            special = bool(add_special_tokens)
            return [int(t) for t in tokenizer.encode(string, add_special_tokens=special)]

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            cut = [
                (_kept(context, len(wanted), max_length), wanted) for _, context, wanted in requests
            ]
            bodies = [
                _body(asker, [*context, *wanted], max_tokens=1, prompt_logprobs=1)
                for context, wanted in cut
            ]
            answers = anyio.from_thread.run(asker.ask_all, bodies)
            return [
                _loglikelihood(answer["prompt_logprobs"], len(context), wanted)
                for answer, (context, wanted) in zip(answers, cut, strict=True)
            ]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            """Of whole texts, in windows with as much context as fits."""
            window = (max_length or 2048) - 1
            likelihoods = []
            for request in requests:
                windows = map(
                    make_disjoint_window,
                    get_rolling_token_windows(
                        token_list=self.tok_encode(request.args[0]),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=window,
                        context_len=1,
                    ),
                )
                parts = self._loglikelihood_tokens([(None, *pair) for pair in windows])
                likelihoods.append(sum(likelihood for likelihood, _ in parts))
            return likelihoods

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            """Texts, cut before the first of the strings that end them."""
            bodies, ends = [], []
            for context, wishes in (request.args for request in requests):
                until, sampling = _sampling(wishes)
                tokens = self.tok_encode(context)
                kept = _kept(tokens, sampling["max_tokens"], max_length)
                bodies.append(_body(asker, kept, **sampling))
                ends.append(until)
            answers = anyio.from_thread.run(asker.ask_all, bodies)
            return [
                _cut(_text(tokenizer, answer), until)
                for answer, until in zip(answers, ends, strict=True)
            ]

    return PinnedLM()


def _body(asker: Asker, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "seed": 0, **sampling}
    return {"model": asker.proof.model, "token_ids": [*token_ids], "sampling_params": params}


def _kept(context: list[int], wanted: int, max_length: int | None) -> list[int]:
    """The end of a context that leaves room for ``wanted`` tokens and the one that proves them."""
    if max_length is None:
        return context
    room = max_length - wanted - 1
    if room < 1:
        raise ValueError(
            f"{wanted} tokens are wanted, and the engines' context has {max_length}: enlarge "
            "--eval-vllm-max-model-len, or lower the task's max_gen_toks"
        )
    return context[-room:]


def _loglikelihood(
    logprobs: Sequence[dict[str, Any] | None], start: int, wanted: Sequence[int]
) -> tuple[float, bool]:
    """Natural logarithm of the probability of ``wanted``, and whether each is the likeliest."""
    entries = [(logprobs[start + offset] or {})[str(token)] for offset, token in enumerate(wanted)]
    total = sum(float(entry["logprob"]) for entry in entries)
    return total, all(entry["rank"] == 1 for entry in entries)


def _sampling(wishes: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The harness's generation arguments, as strings that end a text and as vLLM's parameters."""
    until = wishes.get("until") or []
    greedy = not wishes.get("do_sample", float(wishes.get("temperature", 0.0)) > 0)
    sampling = {
        "max_tokens": int(wishes.get("max_gen_toks", wishes.get("max_tokens", DEFAULT_MAX_TOKENS))),
        "temperature": 0.0 if greedy else float(wishes.get("temperature", 1.0)),
        "top_p": float(wishes.get("top_p", 1.0)),
    }
    return [until] if isinstance(until, str) else list(until), sampling


def _text(tokenizer: Any, answer: dict[str, Any]) -> str:
    token_ids = answer["choices"][0]["token_ids"]
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _cut(text: str, until: Sequence[str]) -> str:
    for end in filter(None, until):
        text = text.split(end, 1)[0]
    return text
