"""Evaluates snapshots by asking a scoring service over HTTP; nothing of it runs in this process.

    python examples/eval/scoring_service.py --port 8900 --texts texts.jsonl &
    PYTHONPATH=examples SCORING_URL=http://127.0.0.1:8900 python train.py --eval-interval 50 \
        --eval-hf-dir /dev/shm/snapshots \
        --eval-function-path eval.http_scoring_eval_fn.HttpScoringEvalFn

What the service does with a checkpoint is its own affair. What it says is believed only when it
names the SHA-256 of the weights that are in the directory. Attempts that fail for the moment are
repeated with growing pauses, all within one deadline; a 503 means that the service takes no work,
and skips the point as ``service_unavailable`` at once.

``SCORING_URL``, or ``args.scoring_url``: where the service is. ``args.scoring_timeout`` (600):
seconds for one evaluation. ``args.scoring_attempt_timeout`` (300): seconds for one attempt.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx

from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.25
#: The service, or what stands before it, may answer otherwise next time.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 504})


class TransientError(Exception):
    """One attempt failed; another one may not."""


class HttpScoringEvalFn(CheckpointEvalFn):
    """Sends the checkpoint's path to a scoring service, and reports the rewards that it answers.

    Raises:
        ValueError: nobody said where the service is, or a time limit is no positive number.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        super().__init__(input)
        url = getattr(self.args, "scoring_url", None) or os.environ.get("SCORING_URL")
        if not url or not url.startswith(("http://", "https://")):
            raise ValueError(f"SCORING_URL={url!r}: expected the service's http:// address")
        self._timeout_s = _seconds(self.args, "scoring_timeout", 600.0)
        self._attempt_timeout_s = _seconds(self.args, "scoring_attempt_timeout", 300.0)
        self._client = httpx.AsyncClient(base_url=url, timeout=self._attempt_timeout_s)

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        """Ask until there is an answer.

        Raises:
            EvalSkip: ``service_unavailable`` (it takes no work), ``service_timeout``,
                ``service_unreachable`` (every attempt failed) or ``wrong_weights``.
            ValueError: the service refuses the request, or answers something else than scores.
        """
        expected = await anyio.to_thread.run_sync(sha256_of_weights, checkpoint_dir)
        answer = await self._ask(checkpoint_dir)
        if answer.get("sha256") != expected:
            raise EvalSkip(
                "wrong_weights",
                f"the service scored weights with the SHA-256 {answer.get('sha256')}, expected "
                f"{expected} of {checkpoint_dir} (step {input.rollout_id})",
            )
        return _as_output(answer)

    async def dispose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, checkpoint_dir: Path) -> dict[str, Any]:
        problem = "no attempt was made"
        with anyio.move_on_after(self._timeout_s):
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    await anyio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    return await self._attempt(checkpoint_dir)
                except TransientError as error:
                    problem = str(error)
                    log.warning("attempt %d of %d: %s", attempt + 1, MAX_ATTEMPTS, problem)
            raise EvalSkip("service_unreachable", f"{MAX_ATTEMPTS} attempts failed; {problem}")
        raise EvalSkip("service_timeout", f"no score after {self._timeout_s:.4g} s; {problem}")

    async def _attempt(self, checkpoint_dir: Path) -> dict[str, Any]:
        body = {"checkpoint_dir": str(checkpoint_dir.absolute())}  # noqa: ASYNC240 -- no disk is asked
        try:
            response = await self._client.post("/score", json=body)
        except httpx.TimeoutException as error:
            late = f"no answer within {self._attempt_timeout_s:.4g} s"
            raise TransientError(late) from error
        except httpx.TransportError as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise EvalSkip("service_unavailable", f"the service answered 503: {_said(response)}")
        if response.status_code in TRANSIENT:
            raise TransientError(f"HTTP {response.status_code}: {_said(response)}")
        if response.status_code != httpx.codes.OK:
            raise ValueError(
                f"the scoring service refused {checkpoint_dir}: HTTP {response.status_code}: "
                f"{_said(response)}"
            )
        answer = response.json()
        if not isinstance(answer, dict):
            raise ValueError(f"the scoring service answered {response.text:.200}: no JSON object")
        return answer


def sha256_of_weights(directory: Path) -> str:
    """Of the weight files' bytes, in the order of their names, as the service says it."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _as_output(answer: dict[str, Any]) -> RolloutFnEvalOutput:
    """One reward a text; vime reports their mean and its standard error, and keeps the samples."""
    rewards, tokens = answer.get("rewards"), answer.get("tokens")
    if not isinstance(rewards, list) or not isinstance(tokens, list) or len(rewards) != len(tokens):
        raise ValueError(f"the scoring service answered {answer!r:.200}: expected rewards, tokens")
    samples = [
        {"index": index, "reward": reward, "num_tokens": count}
        for index, (reward, count) in enumerate(zip(rewards, tokens, strict=True))
    ]
    return RolloutFnEvalOutput(
        {"texts": {"rewards": rewards, "response_lengths": tokens, "samples": samples}}
    )


def _said(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]


def _seconds(args: Any, name: str, default: float) -> float:
    value = getattr(args, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"args.{name}={value!r}: expected a positive number of seconds")
    return float(value)
