"""The calls that the supervisor makes to one vLLM server, each with a deadline.

Every call either does what its name says or raises :class:`EngineFailure`; nothing is retried.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import httpx

from vime.eval.contracts import Snapshot
from vime.eval.fleet.launch import Tokens

Kind = Literal[
    "absent", "gone", "overdue", "refused", "stale", "not_finite", "cancelled", "undelivered"
]

#: The weight version of an engine that serves what it was started with.
FIRST_VERSION = "default"

#: vLLM writes a logarithm that is no number, or minus infinity, as this.
_NO_LOGPROB = -9999.0

_PROBE = (0, 1, 2, 3)
_HEALTH_TIMEOUT_S = 5.0
_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class EngineFailure(Exception):
    """An engine did not do what it was told, and is believed no more.

    Args:
        kind: ``absent`` (a pin found it dead or deaf, before it was told of any snapshot),
            ``gone`` (it does not answer), ``overdue``, ``refused`` (it answered with an error),
            ``stale`` (it answered, and has the wrong weights), ``not_finite`` (it has the right
            weights, and they generate no numbers), ``cancelled`` (nobody waited for its
            answer) or ``undelivered`` (the snapshot could not be brought to its node).
        detail: a sentence for people: what it did, and what was expected.

    Attributes:
        cause_seq: the trace record of the engine's doubt, once there is one.
    """

    cause_seq: int | None = None

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail

    @property
    def skip_reason(self) -> str:
        """The reason of an eval point whose pin this failure ended."""
        if self.kind in ("refused", "stale"):
            return "pin_violation"
        if self.kind == "undelivered":
            return "transfer_failed"
        return "timeout_pin" if self.kind == "overdue" else "unhealthy"


@dataclass(frozen=True)
class Token:
    """One greedy token.

    Attributes:
        id: which.
        logprob: the natural logarithm of its probability.
        weight_version: the weights that gave it.
        gap: by how much ``logprob`` exceeds that of the next likely token; 0 where there is none.
    """

    id: int
    logprob: float
    weight_version: str
    gap: float = 0.0


@dataclass(frozen=True)
class Loaded:
    """What one rank says that it put into its model.

    Attributes:
        digest: of the names, types, shapes and bytes of all tensors read.
        num_tensors, num_bytes: how much that was.
        unloaded: parameters of the model that received nothing.
        with_nan: tensors in which a NaN was found.
        tensors: name → digest; only where ``digest`` is not the expected one.
    """

    digest: str
    num_tensors: int
    num_bytes: int
    unloaded: tuple[str, ...]
    with_nan: tuple[str, ...]
    tensors: dict[str, str]


class Control:
    """One vLLM server, spoken to.

    Args:
        client: its base URL is the server's.
        tokens: of the run.
        model: the served model's name.
        call_timeout_s: deadline of every call that has none of its own.
    """

    def __init__(
        self, client: httpx.AsyncClient, tokens: Tokens, model: str, call_timeout_s: float
    ) -> None:
        self._client = client
        self._tokens = tokens
        self._model = model
        self._call_timeout_s = call_timeout_s

    async def answers(self) -> bool:
        """Whether it serves requests; an engine that starts does not listen yet."""
        try:
            await self._call("GET", "/health", timeout_s=_HEALTH_TIMEOUT_S)
        except EngineFailure:
            return False
        return True

    async def pause(self) -> None:
        """Abort what is being generated, forget what was computed, and take no new requests."""
        await self._call("POST", "/pause", params={"mode": "abort"})

    async def is_paused(self) -> bool:
        """Whether it takes no requests, as while a snapshot is being loaded."""
        return bool((await self._call("GET", "/is_paused")).get("is_paused"))

    async def resume(self) -> None:
        """Take requests again."""
        await self._call("POST", "/resume")

    async def load(self, snapshot: Snapshot, timeout_s: float) -> list[Loaded]:
        """Put a snapshot's weights into the engine; one answer a rank."""
        path, look_for_nan = str(snapshot.path.absolute()), snapshot.with_nan is None
        order = {
            "method": "vime_load",
            "args": [path, snapshot.digest, snapshot.verify, look_for_nan],
        }
        answer = await self._call("POST", "/collective_rpc", json=order, timeout_s=timeout_s)
        try:
            return [_loaded(rank) for rank in answer["results"]]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineFailure("refused", f"vime_load: no account of it: {error!r}") from error

    async def set_version(self, weight_version: str) -> None:
        """Name the weights: every token from now on carries the name."""
        await self._call("POST", "/update_weight_version", json={"new_version": weight_version})

    async def version(self) -> str:
        """The name of the weights."""
        return str((await self._call("GET", "/weight_info")).get("weight_version"))

    async def clear_prefix_cache(self) -> bool:
        """Forget the prompts that were computed; false when something still computes with them."""
        answer = await self._call("POST", "/reset_prefix_cache")
        return answer.get("success") is True

    async def token(self, timeout_s: float) -> Token:
        """Generate one greedy token; raises as :meth:`answer` does."""
        (token,) = await self.answer(_PROBE, 1, timeout_s)
        return token

    async def answer(
        self, prompt: Sequence[int], num_tokens: int, timeout_s: float
    ) -> tuple[Token, ...]:
        """Generate so many greedy tokens.

        Raises:
            EngineFailure: ``not_finite`` when a probability is no number; ``stale`` when one
                answer comes from several versions.
        """
        sampling = {
            "temperature": 0.0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "logprobs": 2,
        }
        order = {"model": self._model, "token_ids": list(prompt), "sampling_params": sampling}
        answer = await self._call("POST", "/inference/v1/generate", json=order, timeout_s=timeout_s)
        return _tokens(answer, num_tokens)

    async def tokens_so_far(self, timeout_s: float) -> float:
        """How many tokens it has read and generated since its start."""
        lines = (await self._send("GET", "/metrics", timeout_s)).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_COUNTERS))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Any
    ) -> dict[str, Any]:
        """Send one request; the JSON object of its answer, or an empty one without a body."""
        response = await self._send(method, path, timeout_s or self._call_timeout_s, **content)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineFailure("refused", f"{path} answered {_short(response.text)}")
        return answer

    async def _send(
        self, method: str, path: str, timeout_s: float, **content: Any
    ) -> httpx.Response:
        generation = path.startswith(("/inference", "/v1"))
        token = self._tokens.api_key if generation else self._tokens.control
        headers = {"Authorization": f"Bearer {token}"}
        try:
            with anyio.move_on_after(timeout_s) as deadline:
                response = await self._client.request(method, path, headers=headers, **content)
        except httpx.HTTPError as error:
            raise EngineFailure("gone", f"{path}: {type(error).__name__}: {error}") from error
        if deadline.cancelled_caught:
            raise EngineFailure("overdue", f"{path} has not answered after {timeout_s:.4g} s")
        if response.status_code != httpx.codes.OK:
            said = f"{path} answered {response.status_code}: {_short(response.text)}"
            raise EngineFailure("refused", said)
        return response


async def together(*calls: Callable[[], Awaitable[object]]) -> None:
    """Make calls that do not depend on each other at the same time.

    Raises:
        EngineFailure: of the first one that failed; the others are given up.
    """
    failures: list[EngineFailure] = []
    first, *others = calls

    async def make(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except EngineFailure as failure:
            failures.append(failure)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for call in others:
            tasks.start_soon(make, call)
        await make(first)
    if failures:
        raise failures[0]


def _tokens(answer: dict[str, Any], num_tokens: int) -> tuple[Token, ...]:
    """The tokens of an answer.

    A greedy token's probability is at least 1 / vocabulary, its logarithm hence a small number;
    a NaN is answered as token 0 with the logarithm -9999.
    """
    try:
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        spans = choice["weight_versions"]
        versions = ", ".join(dict.fromkeys(str(span["version"]) for span in spans))
        extent = (spans[0]["start"], spans[-1]["end"])
        pairs = list(zip(map(int, choice["token_ids"]), entries, strict=True))
        found = tuple(Token(n, float(e["logprob"]), versions, _gap(e)) for n, e in pairs)
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFailure("refused", f"no tokens in {_short(str(answer))}") from error
    if len(found) != num_tokens:
        raise EngineFailure("refused", f"{len(found)} tokens, expected {num_tokens}")
    if len(spans) != 1 or extent != (0, num_tokens):
        said = f"the versions {versions} span tokens {extent}, and not one all of {num_tokens}"
        raise EngineFailure("stale", said)
    for token in found:
        if not math.isfinite(token.logprob) or token.logprob <= _NO_LOGPROB:
            said = f"the probability of the token {token.id} is no number"
            raise EngineFailure("not_finite", said)
    return found


def _gap(entry: dict[str, Any]) -> float:
    """How far ahead of the others a token is; vLLM lists itself first, then by rank."""
    others = [
        float(other["logprob"])
        for other in entry.get("top_logprobs") or ()
        if other["token_id"] != entry.get("token_id")
    ]
    return max(float(entry["logprob"]) - max(others), 0.0) if others else 0.0


def _loaded(rank: dict[str, Any]) -> Loaded:
    return Loaded(
        digest=str(rank["digest"]),
        num_tensors=int(rank["num_tensors"]),
        num_bytes=int(rank["num_bytes"]),
        unloaded=tuple(map(str, rank["unloaded"])),
        with_nan=tuple(map(str, rank["with_nan"])),
        tensors=dict(rank.get("tensors", {})),
    )


def _short(text: str, length: int = 400) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
