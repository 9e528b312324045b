"""Which GPUs or CPU cores an engine gets; found out without importing torch or a driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")
_DEVICES = Path("/dev")


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would name them.

    Returns:
        Their names in order; ``None`` on a machine that has no NVIDIA GPU at all.
    """
    environ = os.environ if environ is None else environ
    count = sum(1 for entry in os.scandir(_DEVICES) if _GPU.fullmatch(entry.name))
    if not count:
        return None
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in named.split(",") if name.strip()]


def allowed_cores() -> list[int]:
    """The CPU cores that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def device_environment(
    index: int, num_engines: int, num_ranks: int, gpus: list[str] | None, cores: list[int]
) -> dict[str, str]:
    """The environment variables that put one engine on its own devices.

    The fleet takes the last of the visible GPUs: trainer and rollout engines, which count from
    the first, never shift. Without GPUs, an engine of several ranks has its cores shared out
    among them, which vLLM wants to be told; one of a single rank decides by itself.

    Args:
        index: which engine, from 0.
        num_engines, num_ranks: the size of the fleet, and of each engine.
        gpus: from :func:`visible_gpus`.
        cores: from :func:`allowed_cores`.
    """
    if gpus is not None:
        region = gpus[len(gpus) - num_engines * num_ranks :]
        mine = region[index * num_ranks : (index + 1) * num_ranks]
        assert len(mine) == num_ranks, "preflight has counted the GPUs"
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
    if num_ranks == 1:
        return {}
    share = len(cores) // num_ranks
    assert share, "preflight has counted the cores"
    groups = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, g)) for g in groups)}
