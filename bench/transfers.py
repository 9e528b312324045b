"""One snapshot to some nodes of a Ray cluster, by vime, measured until an engine on each has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from bench.models import make_model_of, num_bytes

_RUN = "bench"


def make_snapshot(staging: Path, step: int, gigabytes: float) -> tuple[Path, int]:
    """Write a snapshot into the driver's staging directory; returns its path and its bytes."""
    from vime.eval.snapshot.staging import room_of

    room_of(staging, _RUN).mkdir(parents=True, exist_ok=True)
    path = staging / f"step_{step}"
    model = make_model_of(gigabytes)
    model.save_pretrained(path)
    return path, num_bytes(model)


async def transfer(path: Path, run_dir: Path, nodes: Sequence[str]) -> float:
    """Seconds until one engine on each of these nodes has the snapshot.

    Args:
        path: from :func:`make_snapshot`.
        run_dir: for the nodes' traces.
        nodes: Ray's ids; none of them sees the driver's staging directory.
    """
    from vime.eval.contracts import Snapshot
    from vime.eval.snapshot.manifest import Manifest
    from vime.ray.delivery import Deliveries
    from vime.ray.site import home_node

    engines = dict(enumerate(nodes))
    deliveries = Deliveries(
        run_id=_RUN,
        staging=path.parent,
        keep=0,
        run_dir=run_dir,
        home=home_node(),
        nodes=lambda: engines,
    )
    manifest = Manifest.of_directory(path, _RUN, 0)
    snapshot = Snapshot(0, path, manifest.weight_version, manifest.digest, owned=True)
    async with deliveries.running():
        await _open(deliveries, nodes)
        return await _deliver(deliveries, snapshot, len(nodes))


async def _open(deliveries: Any, nodes: Sequence[str]) -> None:
    """Have the actors started: they are there before the first snapshot of a run, too."""
    async with anyio.create_task_group() as tasks:
        for node in nodes:
            tasks.start_soon(deliveries.open_depot, node)


async def _deliver(deliveries: Any, snapshot: Any, num_engines: int) -> float:
    async def one(index: int) -> None:
        async with deliveries(snapshot, index):
            pass

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(num_engines):
            tasks.start_soon(one, index)
    return time.perf_counter() - began
