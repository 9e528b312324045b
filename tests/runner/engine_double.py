"""A server in memory that speaks the generation endpoint as vLLM 0.32 does, with faults on demand.

What it answers was copied from a real engine; ``test_real_engine.py`` runs the same code against
one, and ``test_generate.py`` asks the double over sockets, too.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import orjson

from vime.eval.contracts import PinProof
from vime.eval.runner.http import Post, Unreachable

EOS = 257
Fault = Callable[[dict[str, Any]], "tuple[int, Any] | Exception | None"]


class EngineDouble:
    """Answers are a deterministic function of the prompt and the seed.

    Attributes:
        version: the label of its weights.
        api_key: what requests must carry.
        max_model_len: longer prompts are refused.
        faults: asked in turn, one a request, before answering; ``None`` lets it answer.
        answer: prompt tokens, seed → output tokens; by default drawn at random from the seed.
        requests: the bodies that arrived.
        hold: when set, requests wait for it.
        busiest: the most requests that were there at once.
    """

    def __init__(self, version: str = "run:1:abc", api_key: str | None = None) -> None:
        self.version = version
        self.api_key = api_key
        self.max_model_len = 256
        self.faults: list[Fault] = []
        self.answer: Callable[[list[int], int], list[int]] = _random_answer
        self.requests: list[dict[str, Any]] = []
        self.hold: anyio.Event | None = None
        self.busiest = 0
        self._present = 0

    @asynccontextmanager
    async def connect(self, proof: PinProof) -> AsyncIterator[Post]:
        """The way to it without a network."""
        authorization = None if proof.api_key is None else f"Bearer {proof.api_key}"

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            return await self.respond("POST", path, authorization, body)

        yield post

    async def respond(
        self, method: str, path: str, authorization: str | None, body: bytes
    ) -> tuple[int, bytes]:
        """Answer one request; raises :class:`Unreachable` when there shall be no answer."""
        self._present += 1
        self.busiest = max(self.busiest, self._present)
        try:
            await anyio.lowlevel.checkpoint()  # a network always gives way
            if self.hold is not None:
                await self.hold.wait()
            status, content = self._answer(method, path, authorization, orjson.loads(body))
        finally:
            self._present -= 1
        return status, content if isinstance(content, bytes) else orjson.dumps(content)

    def _answer(
        self, method: str, path: str, authorization: str | None, request: dict[str, Any]
    ) -> tuple[int, Any]:
        self.requests.append(request)
        if (method, path) != ("POST", "/inference/v1/generate"):
            return 404, error(404, "Not Found")
        if self.api_key is not None and authorization != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        if self.faults:
            fault = self.faults.pop(0)(request)
            if isinstance(fault, Exception):
                raise fault
            if fault is not None:
                return fault
        return self._generate(request)

    def _generate(self, request: dict[str, Any]) -> tuple[int, Any]:
        tokens, sampling = request["token_ids"], request["sampling_params"]
        if len(tokens) > self.max_model_len:
            return 400, error(
                400,
                f"The decoder prompt (length {len(tokens)}) is longer than the maximum model "
                f"length of {self.max_model_len}.",
            )
        seed = 0 if sampling["temperature"] == 0 else sampling["seed"]
        output = self.answer(tokens, seed)[: sampling["max_tokens"]]
        stopped = bool(output) and output[-1] == EOS
        return 200, answer(output, self.version, "stop" if stopped else "length")


def answer(tokens: list[int], version: str | None, reason: str = "stop") -> dict[str, Any]:
    """A whole response body; one span of ``version``, or none."""
    spans = [] if version is None else [{"version": version, "start": 0, "end": len(tokens)}]
    choice = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens,
        "weight_versions": spans,
        "logprobs": None,
    }
    return {"request_id": "generate-tokens-0", "model": "m", "choices": [choice]}


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "param": None, "code": code}}


def status(code: int) -> Fault:
    """A fault: that status, once."""
    return lambda request: (code, error(code, f"fault {code}"))


def broken(request: dict[str, Any]) -> Unreachable:
    """A fault: the connection breaks."""
    return Unreachable("ReadError: gone")


def _random_answer(tokens: list[int], seed: int) -> list[int]:
    rng = random.Random(f"{tokens}{seed}")
    return [rng.randrange(256) for _ in range(rng.randrange(1, 12))] + [EOS]
