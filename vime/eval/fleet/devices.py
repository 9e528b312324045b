"""Which GPUs or CPU cores an engine gets; found out without importing torch or a driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from vime.eval.fleet import quiet_wait

_GPU = re.compile(r"nvidia\d+")
_DEVICES = Path("/dev")

#: The environment variable that tells an engine's loader which cores may read for it: numbers with
#: commas, or nothing where no core is left that nobody computes on.
READER_CORES_VARIABLE = "VIME_READER_CORES"


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
    the first, never shift. Without GPUs, engines share the cores out: vLLM, which knows of no
    other engine, would put each of them on the same ones. A single engine of a single rank
    decides by itself. And what waits then must not compute: :mod:`vime.eval.fleet.quiet_wait`.

    Args:
        index: which engine, from 0.
        num_engines, num_ranks: the size of the fleet, and of each engine.
        gpus: from :func:`visible_gpus`.
        cores: from :func:`allowed_cores`.
    """
    if gpus is not None:
        region = gpus[len(gpus) - num_engines * num_ranks :]
        visible = region[index * num_ranks : (index + 1) * num_ranks]
        assert len(visible) == num_ranks, "preflight has counted the GPUs"
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
    return {quiet_wait.VARIABLE: "1"} | _cores_of(index, num_engines, num_ranks, cores)


def _cores_of(index: int, num_engines: int, num_ranks: int, cores: list[int]) -> dict[str, str]:
    """Has one engine compute on its share of the cores."""
    share = len(cores) // num_engines
    if num_engines == 1 or share < num_ranks:  # too few to share them out
        return {} if num_ranks == 1 else _bound(cores, num_ranks)
    mine = cores[index * share : (index + 1) * share]
    # One is left to the server, the scheduler and the reader, if each rank has one anyway.
    own, others = (mine[:-1], mine[-1:]) if share > num_ranks else (mine, [])
    return _bound(own, num_ranks) | {READER_CORES_VARIABLE: ",".join(map(str, others))}


def _bound(cores: list[int], num_ranks: int) -> dict[str, str]:
    """Has each rank compute on its part of the cores."""
    share = len(cores) // num_ranks
    assert share, "preflight has counted the cores"
    groups = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, g)) for g in groups)}
