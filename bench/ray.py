"""``ray``: what a Ray cluster adds: dispatch, a snapshot to one node and to four, big layouts.

The cluster is five nodes on this machine. Snapshots travel between the nodes' object stores and
staging directories exactly as between machines, but all of it on the cores and the memory of one:
what four machines do at once takes turns here. How much of the cost is due to that, bare copies
say: one process that writes and digests its own copy of the snapshot, and four at once.

Machines have a link each, which is what they wait for. So the same is measured once more on five
nodes at the end of a link of a stated rate, low enough that the cores have time to spare
(:mod:`bench.linked`); there, nothing can take less time than the size of the snapshot by the rate.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from bench import bare_copies, linked, links
from bench.cli import UsageError, positive, positive_number
from bench.dispatch import holds_of
from bench.figures import Report, paired_ratio, percentile
from bench.models import FromShelf, write_tiny_checkpoint
from bench.scratch import Scratch, scratch
from bench.stand_ins import WAITING_EVAL
from bench.transfers import make_snapshot, transfer

_NUM_NODES = linked.NUM_NODES
_MBIT = 400.0
_WARM_GIGABYTES = 0.05
_START_S = 150.0


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
    over = parser.add_mutually_exclusive_group()
    over.add_argument(
        "--links", type=positive_number, metavar="MBIT",
        help="rate of the link that each node has in the second cluster, in 10^6 bits a second "
        f"(default: {_MBIT:g} where this system allows it)",
    )  # fmt: skip
    over.add_argument("--no-links", action="store_true", help="leave the second cluster out")
    parser.add_argument(
        "--links-repeat", type=positive, default=1, metavar="N",
        help="transfers over links (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    try:
        import ray.cluster_utils  # noqa: F401 -- the extra
    except ImportError:
        raise UsageError("this benchmark needs Ray: pip install 'vime[ray]'") from None
    mbit, reason = _rate(args)
    report = Report("ray")
    report.add("layout", "10000_gpus", "ms", _layouts())
    needed = int(args.gigabytes * 1e9 * (_NUM_NODES + 2) + 5e8)
    with scratch(needed) as places:
        path, size = make_snapshot(places.memory / "home", 0, args.gigabytes)
        with _cluster(places) as nodes:
            report.add("vime", "hold", "ms", _holds(places, args.points))
            _add_plain(report, places, path, nodes, args.repeat)
        report.notes.append(
            f"a snapshot of {size / 1e9:.2f} GB; four nodes share {os.cpu_count()} cores here, "
            "where four bare copies cost more than one as well"
        )
        if mbit is None:
            report.notes.append(f"not measured over links of a stated rate: {reason}")
        else:
            _add_linked(report, places, path, size, mbit, args.links_repeat)
    return report


def _rate(args: argparse.Namespace) -> tuple[float | None, str]:
    """Of the links, in Mbit/s, or why there are none.

    Raises:
        UsageError: they were asked for, and cannot be.
    """
    if args.no_links:
        return None, "--no-links"
    problem = links.problem()
    if problem is None:
        return args.links or _MBIT, ""
    if args.links:
        raise UsageError(f"--links {args.links:g}: {problem}, or leave this flag out")
    return None, problem


def _add_plain(report: Report, places: Scratch, path: Path, nodes: list[str], repeat: int) -> None:
    """A snapshot to one node and to four, on the cores that they share, beside bare copies."""
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(repeat + 1):  # the first warms up: workers and object stores start
        for subject, chosen in (("one_node", nodes[:1]), ("four_nodes", nodes)):
            targets = [places.memory / f"bare_{index}" for index in range(len(chosen))]
            bare_s = bare_copies.measure(path, targets)
            seconds = anyio.run(transfer, path, places.disk, chosen, backend="asyncio")
            if number:
                samples.setdefault((subject, "transfer"), []).append(seconds)
                samples.setdefault((subject, "bare_copy"), []).append(bare_s)
    for subject, what in samples:
        report.add(subject, what, "s", samples[subject, what])
    over_one, bare = (
        paired_ratio(samples["four_nodes", what], samples["one_node", what])
        for what in ("transfer", "bare_copy")
    )
    report.ratios["transfer_to_four_over_one"] = over_one
    report.ratios["bare_copy_to_four_over_one"] = bare
    report.ratios["transfer_over_bare_copy"] = over_one / bare


def _add_linked(
    report: Report, places: Scratch, path: Path, size: int, mbit: float, repeat: int
) -> None:
    """The same over links of a stated rate, beside the least that one link allows."""
    warm_path, _ = make_snapshot(path.parent, 1, _WARM_GIGABYTES)
    least_s = size * 8 / (mbit * 1e6)
    order = linked.Order(
        mbit=mbit,
        path=str(path),
        warm_path=str(warm_path),
        run_dir=str(places.disk),
        result=str(places.disk / "linked.json"),
        repeat=repeat,
    )
    passages = linked.measure(order, _START_S + repeat * least_s * 2 * (1 + _NUM_NODES))
    one, four = ([p for p in passages if p.num_nodes == count] for count in (1, _NUM_NODES))
    for subject, found in (("one_node", one), ("four_nodes", four)):
        report.add(subject, "linked_transfer", "s", [passage.seconds for passage in found])
        report.add(subject, "linked_cores", "cores", [passage.cores for passage in found])
    report.ratios["transfer_to_four_over_one_linked"] = paired_ratio(
        [passage.seconds for passage in four], [passage.seconds for passage in one]
    )
    report.ratios["linked_transfer_over_least"] = percentile(
        [p.seconds / least_s for p in four], 0.5
    )
    report.ratios["linked_bytes_from_home"] = percentile([p.home_sent / size for p in four], 0.5)
    report.notes.append(
        f"over links of {mbit:g} Mbit/s, {least_s:.1f} s is the least that a transfer can take"
    )


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
