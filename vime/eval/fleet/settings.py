"""What a fleet is to be: its settings, and what this machine must have before one is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.eval.config import ConfigError, EvalConfig
from vime.eval.config.engines import command_line
from vime.eval.fleet.devices import allowed_cores, visible_gpus
from vime.eval.snapshot.base import read_config
from vime.eval.snapshot.files import open_regular
from vime.eval.snapshot.side_files import irregular_files

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- a file system, not a temporary file

SHARED_BYTES_PER_RANK = 64 << 20
"""Free shared memory that each rank needs.

A vLLM engine maps queues of some 400 MB there and touches little of them: 0.1 MB after 1000
requests. A container's default of 64 MB is too small for a fleet that is at work.
"""


@dataclass(frozen=True)
class FleetSettings:
    """Everything that a fleet is made from; times are in seconds.

    Attributes:
        num_engines: how many engines.
        base: the Hugging Face checkpoint that they start from.
        run_dir: the logs go to ``run_dir/logs``.
        num_gpus_per_engine: the tensor-parallel size of each engine.
        vllm: further arguments of vLLM's server, name → value; see
            :func:`vime.eval.config.engines.command_line`.
        start_timeout_s: from an engine's start to its first token.
        pin_timeout_s: from a pin's turn at the fleet to its proof.
        call_timeout_s: a control call other than loading.
        probe_interval_s: between two looks at an engine that should be alive.
        probe_timeout_s: one token, from an engine that has nothing else to do.
        end_timeout_s: ending one process tree.
        min_engines: how many engines must have proven themselves for a pin; all if absent.
        max_restarts: deaths of an engine, without a pin between them, before it stays down.
        backoff_s, max_backoff_s: the wait before the first restart; it doubles up to the latter.
        host: where everything listens.
        model: the name under which the engines serve.
    """

    num_engines: int
    base: Path
    run_dir: Path
    num_gpus_per_engine: int = 1
    vllm: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    pin_timeout_s: float = 600.0
    call_timeout_s: float = 60.0
    probe_interval_s: float = 10.0
    probe_timeout_s: float = 30.0
    end_timeout_s: float = 10.0
    min_engines: int | None = None
    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    host: str = "127.0.0.1"
    model: str = "eval"

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole fleet; on a machine without any, ranks."""
        return self.num_engines * self.num_gpus_per_engine

    @property
    def num_needed(self) -> int:
        """How many engines must have proven themselves for a pin."""
        return self.num_engines if self.min_engines is None else self.min_engines

    def backoff_after_s(self, strikes: int) -> float:
        """Seconds to wait before the next start, after so many deaths in a row."""
        doubled = self.backoff_s * 2.0 ** min(max(strikes - 1, 0), 30)
        return min(doubled, self.max_backoff_s)

    @classmethod
    def from_config(cls, config: EvalConfig, run_dir: Path) -> FleetSettings:
        """The fleet that the flags ask for.

        Raises:
            ConfigError: they ask for none.
        """
        if not config.num_engines or config.hf_checkpoint is None:
            raise ConfigError(
                [
                    f"--eval-num-gpus {config.num_gpus} and --hf-checkpoint "
                    f"{config.hf_checkpoint}: a fleet needs both"
                ]
            )
        return cls(
            num_engines=config.num_engines,
            base=config.hf_checkpoint,
            run_dir=run_dir,
            num_gpus_per_engine=config.num_gpus_per_engine,
            vllm=config.vllm,
            start_timeout_s=config.start_timeout_s,
            pin_timeout_s=config.pin_timeout_s,
            min_engines=config.min_engines,
            max_restarts=config.engine_max_restarts,
        )


def preflight(settings: FleetSettings) -> None:
    """Check that this machine can run the fleet, without importing or starting anything.

    Raises:
        ConfigError: with one sentence for everything that is missing.
    """
    problems = [*node_problems(settings), *argument_problems(settings), *_device_problems(settings)]
    if problems:
        raise ConfigError(problems)


def node_problems(settings: FleetSettings) -> list[str]:
    """What this machine lacks for the fleet, but for GPUs; one sentence each."""
    return [
        *_package_problems(),
        *_checkpoint_problems(settings.base),
        *_shared_memory_problems(settings),
    ]


def _package_problems() -> list[str]:
    remedy = "pip install 'vime[vllm]' (on a machine without GPUs 'vime[cpu]')"
    wanted = {"vllm": "vLLM", "vllm_router": "vllm-router"}
    return [
        f"--eval-num-gpus needs {name}, which is not installed here: {remedy}"
        for module, name in wanted.items()
        if importlib.util.find_spec(module) is None
    ]


def _checkpoint_problems(base: Path) -> list[str]:
    """An engine would say the same, half a minute later and in a hundred lines."""
    try:
        read_config(base)
        weights = sorted(base.glob("*.safetensors"))
        for path in weights:
            open_regular(path).close()
        irregular = irregular_files(base)
    except (OSError, ValueError) as error:
        return [f"--hf-checkpoint {base}: cannot be read: {error}"]
    if irregular:
        return [f"--hf-checkpoint {base}: cannot be read: {'; '.join(irregular)}"]
    if not weights:
        return [f"--hf-checkpoint {base}: no .safetensors file there; the engines start from one"]
    return []


def argument_problems(settings: FleetSettings) -> list[str]:
    """What is wrong with the settings of the engines."""
    try:
        command_line(settings.vllm)
    except ValueError as error:
        return [str(error)]
    return []


def _device_problems(settings: FleetSettings) -> list[str]:
    gpus = visible_gpus()
    if gpus is None:  # a machine without GPUs: each rank computes on cores of its own
        cores = len(allowed_cores())
        if settings.num_gpus_per_engine > 1 and cores < settings.num_gpus_per_engine:
            return [
                f"--eval-num-gpus-per-engine {settings.num_gpus_per_engine}: without GPUs every "
                f"rank needs a CPU core of its own, and this process may use {cores}"
            ]
        return []
    if len(gpus) < settings.num_gpus:
        return [
            f"--eval-num-gpus {settings.num_gpus}: only {len(gpus)} GPUs are visible here "
            f"({', '.join(gpus) or 'none'}); free some, or ask for fewer"
        ]
    return []


def _shared_memory_problems(settings: FleetSettings) -> list[str]:
    needed = settings.num_gpus * SHARED_BYTES_PER_RANK
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return [f"{SHARED_MEMORY}: {error.strerror}; vLLM's processes talk through it"]
    if free < needed or not os.access(SHARED_MEMORY, os.W_OK):
        return [
            f"{SHARED_MEMORY}: {free >> 20} MB free and writable, and {settings.num_engines} "
            f"engines need {needed >> 20} MB; enlarge it (docker run --shm-size=…)"
        ]
    return []
