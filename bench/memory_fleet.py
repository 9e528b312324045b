"""Engines and a router in memory: the supervisor's own code is real, and waits for nobody."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import anyio
import httpx

from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.fleet.launch import Process
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.supervisor import FleetSupervisor
from vime.fsm.trace import Trace


def memory_fleet(settings: FleetSettings, trace: Trace) -> FleetSupervisor:
    """A fleet of engines that answer at once."""
    label = Label()
    return FleetSupervisor(
        settings,
        trace,
        spawn=_spawn,
        make_client=lambda base_url: cast(httpx.AsyncClient, MemoryServer(label)),  # noqa: ARG005
    )


class Label:
    """The weight version that the engines were told last."""

    def __init__(self) -> None:
        self.version = "default"


class MemoryServer:
    """What is asked of a client, answered as an engine or a router would.

    Args:
        label: shared by all servers of a fleet.
    """

    def __init__(self, label: Label) -> None:
        self._label = label
        self._version = "default"
        self._urls: dict[str, None] = {}

    async def request(self, method: str, path: str, **content: Any) -> MemoryResponse:
        """Answer one request."""
        await anyio.lowlevel.checkpoint()  # a network always gives way
        return MemoryResponse(self._answer(method, path, content.get("json")))

    def _answer(self, method: str, path: str, body: Any) -> dict[str, Any]:
        match path:
            case "/collective_rpc":
                facts = {"num_tensors": 1, "num_bytes": 1, "unloaded": [], "with_nan": []}
                return {"results": [{"digest": body["args"][1], **facts}]}
            case "/update_weight_version":
                self._version = self._label.version = body["new_version"]
            case "/weight_info":
                return {"weight_version": self._version}
            case "/inference/v1/generate":
                return self._tokens(body["sampling_params"]["max_tokens"])
            case _ if path.startswith("/workers"):
                return self._workers(method, path, body)
        return {"success": True, "is_paused": True}

    def _tokens(self, count: int) -> dict[str, Any]:
        version = self._label.version if self._urls else self._version  # a router, or an engine
        choice = {
            "token_ids": [7] * count,
            "logprobs": {"content": [{"logprob": _logprob(version)}] * count},
            "weight_versions": [{"version": version, "start": 0, "end": count}],
        }
        return {"choices": [choice]}

    def _workers(self, method: str, path: str, body: Any) -> dict[str, Any]:
        if method == "POST":
            self._urls[body["url"]] = None
        elif method == "DELETE":
            self._urls.pop(unquote(path.removeprefix("/workers/")), None)
        return {"workers": [{"url": url} for url in self._urls]}

    async def aclose(self) -> None:
        """Nothing is open."""


def _logprob(version: str) -> float:
    """Other weights answer otherwise, and the same ones alike: a version ends with their digest."""
    return -1.0 - zlib.crc32(version.rpartition(":")[2].encode()) / 2**32


class MemoryResponse:
    """A response with an object as its body."""

    status_code = 200
    content = b"{}"
    text = "vllm:generation_tokens_total 1"

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def json(self) -> dict[str, Any]:
        """The body."""
        return self._body


class _MemoryProcess:
    """A process that lives until it is ended."""

    pid = os.getpid()

    def __init__(self) -> None:
        self._ended = anyio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    async def end(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002 -- the protocol
        self._ended.set()

    def log_tail(self, lines: int = 0) -> str:  # noqa: ARG002 -- the protocol
        return ""


async def _spawn(
    argv: Sequence[str],  # noqa: ARG001 -- the protocol
    *,
    name: str,  # noqa: ARG001
    env: Mapping[str, str],  # noqa: ARG001
    log_path: Path,  # noqa: ARG001
) -> Process:
    return _MemoryProcess()


class InstantEvaluator:
    """Scores every snapshot at once."""

    async def evaluate(
        self,
        point: EvalPoint,
        snapshot: Snapshot,  # noqa: ARG002 -- the protocol
        proof: PinProof | None,  # noqa: ARG002
    ) -> EvalOutput:
        """The score is the step."""
        await anyio.lowlevel.checkpoint()
        return EvalOutput({"eval/instant": float(point.rollout_id)})
