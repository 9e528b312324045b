"""Evaluates snapshots on a vLLM server of your own, with the same proof as vime's fleet.

    PYTHONPATH=examples python train.py --eval-interval 50 --eval-hf-dir /dev/shm/snapshots \
        --eval-function-path eval.external_vllm_eval_fn.ExternalVllmEvalFn \
        --eval-prompt-data gsm8k gsm8k.jsonl --hf-checkpoint BASE

It starts a server at the first evaluation and keeps it; ``EXTERNAL_VLLM_GPUS=6,7`` says which
GPUs it gets, and ``--eval-num-gpus-per-engine`` how many of them are one tensor-parallel group.
With ``EXTERNAL_VLLM_URL=http://127.0.0.1:8000`` (or ``args.external_vllm_url``) it attaches to a
server that runs already, whose keys it takes from ``VLLM_API_KEY`` and ``VIME_CONTROL_TOKEN``;
:mod:`eval.vllm_server` says how such a server is started.

Every answer must carry the version of the snapshot's weights; the datasets, sampling and rewards
are those of ``--eval-prompt-data`` and its flags.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from eval.vllm_server import VllmServer, describe

from vime.eval.config import EvalConfig
from vime.eval.config.engines import own_settings
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.launch import Tokens
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.vllm_plugin import CONTROL_TOKEN_VARIABLE
from vime.eval.runner.stock import StockEvaluation
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

URL_VARIABLE = "EXTERNAL_VLLM_URL"
GPUS_VARIABLE = "EXTERNAL_VLLM_GPUS"


class ExternalVllmEvalFn(CheckpointEvalFn):
    """Pins one vLLM server to each checkpoint, and runs the stock datasets on it.

    Attributes:
        server: the server, from the first evaluation on.

    Raises:
        ValueError: an attached server's keys are missing, or a GPU list is empty.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        super().__init__(input)
        self.server: VllmServer | None = None
        self.config = EvalConfig.from_args(self.args)
        self._url = getattr(self.args, "external_vllm_url", None) or os.environ.get(URL_VARIABLE)
        self._tokens = None if self._url is None else _tokens_of(self._url)

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        """Pin, then generate and score.

        Raises:
            EvalSkip: ``pin_violation``, ``unhealthy``, ``timeout_pin`` or ``version_mixed``, as
                the fleet would.
        """
        snapshot = await anyio.to_thread.run_sync(describe, checkpoint_dir, input.rollout_id)
        try:
            async with self._pinned(snapshot) as proof:
                return await self.evaluate_pinned(input.rollout_id, snapshot, proof)
        except EngineFailure as failure:
            raise EvalSkip(failure.skip_reason, f"external vLLM server: {failure}") from failure

    async def evaluate_pinned(
        self, rollout_id: int, snapshot: Snapshot, proof: PinProof
    ) -> RolloutFnEvalOutput:
        """Score a snapshot that the server has proven to serve; override it for another score."""
        if not self.config.prompt_data:
            raise ValueError("--eval-prompt-data is missing: there is nothing to ask the server")
        with tempfile.TemporaryDirectory(prefix="vime-external-") as directory:
            stock = StockEvaluation(self.config, Path(directory))
            output = await stock.evaluate(EvalPoint(rollout_id), snapshot, proof)
            return await anyio.to_thread.run_sync(_as_returned, output)

    @asynccontextmanager
    async def _pinned(self, snapshot: Snapshot) -> AsyncIterator[PinProof]:
        """A server is believed after its proof only, and never after a failure."""
        try:
            if self.server is None:
                self.server = await self._make_server(snapshot.path)
            proof = await self.server.pin(snapshot)
        except BaseException:
            await self._let_go()
            raise
        yield proof

    async def _make_server(self, checkpoint_dir: Path) -> VllmServer:
        settings = FleetSettings(
            num_engines=1,
            base=self.config.hf_checkpoint or checkpoint_dir,
            run_dir=self.config.run_dir or Path("runs"),
            num_gpus_per_engine=self.config.num_gpus_per_engine,
            vllm=own_settings(self.args),
            start_timeout_s=self.config.start_timeout_s,
            pin_timeout_s=self.config.pin_timeout_s,
        )
        if self._url is not None:
            assert self._tokens is not None, "read when this was made"
            return await VllmServer.attach(self._url, self._tokens, settings)
        return await VllmServer.launch(settings, _named_gpus(settings.num_gpus_per_engine))

    async def dispose(self) -> None:
        """End the server, if it was started here."""
        await self._let_go()

    async def _let_go(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            await server.close()


def _tokens_of(url: str) -> Tokens:
    """The keys of a server that somebody else has started."""
    missing = [
        name for name in ("VLLM_API_KEY", CONTROL_TOKEN_VARIABLE) if not os.environ.get(name)
    ]
    if missing:
        raise ValueError(
            f"{URL_VARIABLE}={url}: {' and '.join(missing)} must be set to what that server was "
            "started with, so that its weights can be loaded and checked"
        )
    return Tokens(os.environ["VLLM_API_KEY"], os.environ[CONTROL_TOKEN_VARIABLE])


def _named_gpus(needed: int) -> list[str] | None:
    """The GPUs that the environment names; ``None`` leaves the choice to the machine."""
    value = os.environ.get(GPUS_VARIABLE)
    if value is None:
        return None
    gpus = [name.strip() for name in value.split(",") if name.strip()]
    if len(gpus) < needed:
        raise ValueError(
            f"{GPUS_VARIABLE}={value!r}: expected at least {needed} GPUs, separated by commas "
            "(--eval-num-gpus-per-engine)"
        )
    return gpus


def _as_returned(output: EvalOutput) -> RolloutFnEvalOutput:
    """The stock evaluation's metrics and samples, as an eval function returns them."""
    assert output.samples_path is not None, "the stock evaluation writes its samples"
    data: dict[str, dict[str, Any]] = {}
    with output.samples_path.open("rb") as lines:
        for line in lines:
            sample = json.loads(line)
            found = data.setdefault(sample["dataset"], {"rewards": [], "samples": []})
            found["rewards"].append(sample["reward"])
            found["samples"].append(sample)
    return RolloutFnEvalOutput(data, dict(output.metrics))
