"""The command lines and environments of the fleet's processes, and the run's two tokens."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from vime.eval.config.engines import command_line
from vime.eval.fleet import api_server
from vime.eval.fleet.devices import allowed_cores, device_environment
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.vllm_plugin import CONTROL_TOKEN_VARIABLE, ControlGuard, VerifiedLoad

_PLUGIN = ControlGuard.__module__

#: What a launcher of distributed training sets for its own ranks, and vLLM's must not believe.
_FOREIGN_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOREIGN_RANK_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")

_DAY_S = 86400


class ProcessLost(Exception):
    """What owned a process elsewhere is gone, and the process with it; the message says how."""


class Process(Protocol):
    """What the fleet asks of a process.

    Real ones are :class:`vime.eval.processes.process.KeptProcess`.
    """

    @property
    def pid(self) -> int:
        """Of the process itself."""

    async def wait(self) -> int:
        """Wait until it has exited and nothing of its tree is left; returns its status.

        Raises:
            TimeoutError: it was killed, and something of it lives on.
            ProcessLost: nobody can say any more.
        """

    async def end(self, timeout_s: float = ...) -> None:
        """End the whole tree, shielded; raises ``TimeoutError`` when some of it lives on."""

    def log_tail(self, lines: int = ...) -> str:
        """The last lines of its log."""


class Spawn(Protocol):
    """Starts a process: :func:`vime.eval.processes.process.spawn`, or a fake."""

    async def __call__(
        self, argv: Sequence[str], *, name: str, env: Mapping[str, str], log_path: Path
    ) -> Process:
        """Raises ``OSError`` or ``RuntimeError`` when it cannot be started."""


class MakeClient(Protocol):
    """Makes the HTTP client of one server: :func:`loopback_client`, or a fake."""

    def __call__(self, base_url: str) -> httpx.AsyncClient:
        """Whoever asks for a client closes it."""


def loopback_client(base_url: str) -> httpx.AsyncClient:
    """A client without time limits of its own, and deaf to proxies in the environment."""
    # Every call has a deadline of the caller's, which covers all of it.
    return httpx.AsyncClient(base_url=base_url, timeout=None, trust_env=False)  # noqa: S113


@dataclass(frozen=True)
class Tokens:
    """The secrets of one run; in no command line, log, trace or ``repr``.

    Attributes:
        api_key: for generation, known to the evaluator.
        control: for everything else, known to the supervisor alone.
    """

    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    control: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


def engine_argv(settings: FleetSettings, port: int, gpus: list[str] | None) -> list[str]:
    """The command that starts one engine's API server.

    Sampling defaults of the checkpoint are left out (``--generation-config vllm``): what the
    evaluation asks for is all there is.

    Args:
        settings: the fleet.
        port: where it listens.
        gpus: from :func:`vime.eval.fleet.devices.visible_gpus`.
    """
    argv = [sys.executable, "-m", api_server.__name__]
    argv += ["--model", str(settings.base.absolute()), "--served-model-name", settings.model]
    argv += ["--host", settings.host, "--port", str(port)]
    argv += ["--tensor-parallel-size", str(settings.num_gpus_per_engine)]
    argv += ["--generation-config", "vllm", "--enable-scale-out"]
    argv += ["--middleware", f"{_PLUGIN}.{ControlGuard.__name__}"]
    argv += ["--worker-extension-cls", f"{_PLUGIN}.{VerifiedLoad.__name__}"]
    argv += ["--disable-fastapi-docs", "--disable-uvicorn-access-log"]
    arguments = dict(settings.vllm)
    if gpus is None:  # compiling a model for a CPU takes longer than it saves
        arguments.setdefault("enforce_eager", True)
    return argv + command_line(arguments)


def engine_environment(
    settings: FleetSettings,
    index: int,
    tokens: Tokens,
    gpus: list[str] | None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of one engine.

    Args:
        settings: the fleet.
        index: which engine, from 0.
        tokens: of the run.
        gpus: from :func:`vime.eval.fleet.devices.visible_gpus`.
        environ: what to start from; this process's environment if absent.
    """
    environ = os.environ if environ is None else environ
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _FOREIGN_RANKS and not name.startswith(_FOREIGN_RANK_PREFIXES)
    }
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without GPUs, several engines share the memory
        # torch keeps that header among its temporary files, where no other engine would find it.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        **kept,
        **device_environment(
            index,
            settings.num_engines,
            settings.num_gpus_per_engine,
            gpus,
            allowed_cores(),
        ),
        "VLLM_SERVER_DEV_MODE": "1",  # the control routes exist only then
        "VLLM_API_KEY": tokens.api_key,
        CONTROL_TOKEN_VARIABLE: tokens.control,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def router_argv(settings: FleetSettings, port: int, metrics_port: int) -> list[str]:
    """The command that starts the router, with no engine behind it yet.

    Which engines are alive is the supervisor's to say. The router's own health checks are the
    second line: a dead engine is out after 4 s, a hung one after 14 s. Its circuit breaker is
    off, because requests that fail for their own sake would take a sound engine out.
    """
    argv = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "round_robin"]
    argv += ["--host", settings.host, "--port", str(port)]
    argv += ["--prometheus-host", settings.host, "--prometheus-port", str(metrics_port)]
    argv += ["--health-check-interval-secs", "2", "--health-check-timeout-secs", "5"]
    argv += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
    argv += ["--worker-startup-timeout-secs", "10", "--worker-startup-check-interval", "1"]
    argv += ["--request-timeout-secs", str(_DAY_S), "--disable-circuit-breaker"]
    argv += ["--log-level", "warning"]
    return argv


def router_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the router: this process's, without proxies between it and the engines."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if not name.lower().endswith("_proxy")}
