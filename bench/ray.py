"""``ray``: what a Ray cluster adds: dispatch, a snapshot to one node and to four, big layouts.

The cluster is five nodes on this machine. Snapshots travel between the nodes' object stores and
staging directories exactly as between machines, but all of it on the cores and the memory of one:
what four machines do at once takes turns here. How much of the cost is due to that, bare copies
say: one process that writes and digests its own copy of the snapshot, and four at once.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from bench import bare_copies
from bench.cli import UsageError, positive, positive_number
from bench.dispatch import holds_of
from bench.figures import Report, paired_ratio
from bench.models import FromShelf, make_model_of, num_bytes, write_tiny_checkpoint
from bench.scratch import Scratch, scratch
from bench.stand_ins import WAITING_EVAL

_NUM_NODES = 4
_RUN = "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--gigabytes", type=positive_number, default=2.0, metavar="GB",
        help="size of the snapshot (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="transfers (default: %(default)s)"
    )
    parser.add_argument(
        "--points", type=positive, default=200, metavar="N", help="points (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    try:
        import ray.cluster_utils  # noqa: F401 -- the extra
    except ImportError:
        raise UsageError("this benchmark needs Ray: pip install 'vime[ray]'") from None
    report = Report("ray")
    report.add("layout", "10000_gpus", "ms", _layouts())
    needed = int(args.gigabytes * 1e9 * (_NUM_NODES + 2) + 5e8)
    with scratch(needed) as places, _cluster(places) as nodes:
        report.add("vime", "hold", "ms", _holds(places, args.points))
        samples, size = anyio.run(_transfers, places, nodes, args, backend="asyncio")
        for subject, what in samples:
            report.add(subject, what, "s", samples[subject, what])
    transfer, bare = (
        paired_ratio(samples["four_nodes", what], samples["one_node", what])
        for what in ("transfer", "bare_copy")
    )
    report.ratios["transfer_to_four_over_one"] = transfer
    report.ratios["bare_copy_to_four_over_one"] = bare
    report.ratios["transfer_over_bare_copy"] = transfer / bare
    report.notes.append(
        f"a snapshot of {size / 1e9:.2f} GB; four nodes share {os.cpu_count()} cores here, where "
        "four bare copies cost more than one as well"
    )
    return report


def _layouts() -> list[float]:
    """Milliseconds of computing the placement of 10,000 GPUs."""
    from vime.ray.placement import placement_layout

    args = argparse.Namespace(
        actor_num_nodes=500,
        actor_num_gpus_per_node=8,
        use_critic=True,
        rollout_num_gpus=1600,
        eval_num_gpus=400,
    )
    assert placement_layout(args).num_bundles == 10_000
    return holds_of(lambda: placement_layout(args), 100)


def _holds(places: Scratch, num_points: int) -> list[float]:
    """Milliseconds of each call of ``dispatch``, one point at a time."""
    from vime.ray import RayEvalDispatcher

    disk, memory = places.subject("dispatch")
    checkpoint = write_tiny_checkpoint(memory / "checkpoint")
    args = argparse.Namespace(
        eval_run_dir=str(disk / "run"),
        eval_hf_dir=str(memory / "staging"),
        eval_interval=1,
        hf_checkpoint=str(checkpoint),
        eval_function_path=WAITING_EVAL,
        bench_eval_seconds=0.0,
    )
    holds = []
    with RayEvalDispatcher.from_args(args, exporter=FromShelf(checkpoint)) as dispatcher:
        dispatcher.wait_until_ready()
        for rollout_id in range(num_points + 20):
            began = time.perf_counter_ns()
            dispatcher.dispatch(rollout_id)
            holds.append((time.perf_counter_ns() - began) / 1e6)
            dispatcher.drain()
    return holds[20:]


async def _transfers(
    places: Scratch, nodes: list[str], args: argparse.Namespace
) -> tuple[dict[tuple[str, str], list[float]], int]:
    """Seconds to one node and to four, by vime and by bare copies; the snapshot's bytes."""
    from vime.eval.snapshot.staging import room_of

    staging = places.memory / "home"
    room_of(staging, _RUN).mkdir(parents=True)
    path = staging / "step_0"
    model = make_model_of(args.gigabytes)
    size = num_bytes(model)
    model.save_pretrained(path)
    del model
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(args.repeat + 1):  # the first warms up: workers and object stores start
        for subject, chosen in (("one_node", nodes[:1]), ("four_nodes", nodes)):
            targets = [places.memory / f"bare_{index}" for index in range(len(chosen))]
            bare_s = bare_copies.measure(path, targets)
            seconds = await _transfer(places, path, chosen)
            if number:
                samples.setdefault((subject, "transfer"), []).append(seconds)
                samples.setdefault((subject, "bare_copy"), []).append(bare_s)
    return samples, size


async def _transfer(places: Scratch, path: Path, chosen: list[str]) -> float:
    """Seconds until one engine on each of these nodes has the snapshot."""
    from vime.eval.contracts import Snapshot
    from vime.eval.snapshot.manifest import Manifest
    from vime.ray.delivery import Deliveries
    from vime.ray.site import home_node

    engines = dict(enumerate(chosen))
    deliveries = Deliveries(
        run_id=_RUN,
        staging=path.parent,
        keep=0,
        run_dir=places.disk,
        home=home_node(),
        nodes=lambda: engines,
    )
    manifest = Manifest.of_directory(path, _RUN, 0)
    snapshot = Snapshot(0, path, manifest.weight_version, manifest.digest, owned=True)
    async with deliveries.running():
        await _open(deliveries, chosen)
        return await _deliver(deliveries, snapshot, len(chosen))


async def _open(deliveries: Any, nodes: list[str]) -> None:
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


@contextmanager
def _cluster(places: Scratch) -> Iterator[list[str]]:
    """Five nodes; yields the ids of the four that do not see the driver's staging directory."""
    import socket
    import tempfile

    import ray
    from ray.cluster_utils import Cluster

    from vime.ray.depot import STAGING_VARIABLE

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="vr-", dir="/tmp", ignore_cleanup_errors=True) as short:
        os.environ |= {
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": "of-this-benchmark",
        }
        Path(short, "ray").mkdir()
        store = {"object_store_memory": 300 << 20}
        head = {"num_cpus": 1, "num_gpus": 0, "dashboard_port": port, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head | store)
        try:
            for number in range(_NUM_NODES):
                own = {STAGING_VARIABLE: str(places.memory / f"node_{number}")}
                cluster.add_node(num_cpus=1, env_vars=own, **store)
            ray.init(address=cluster.address, log_to_driver=False)
            home = ray.get_runtime_context().get_node_id()
            yield [node["NodeID"] for node in ray.nodes() if node["NodeID"] != home]
        finally:
            ray.shutdown()
            cluster.shutdown()
