"""A run on a cluster of several nodes: snapshots travel, engines come back, nothing is left.

The tests are one run, told in its order: it goes on after each fault.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray.clusters import Nodes, arguments, make_exporter, problems, processes_of
from tests.watch import watching
from vime.fsm.record import Record

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

PATIENCE_S = 200


@dataclass
class Run:
    """A dispatcher with two engines on two nodes, which see nothing of the driver's staging."""

    cluster: Nodes
    dispatcher: Any
    records: list[Record] = field(default_factory=list)

    def node_of(self, engine: int) -> str:
        """The name of the node where an engine is."""
        return self.cluster.name_of(self.server(engine).facts.node_id)

    def server(self, engine: int) -> Any:
        return self.dispatcher._parts.fleet._engines[engine]._process

    def in_the_middle_of(self, point: int) -> Any:
        """Dispatch a point, and return its handle in the moment in which it begins to run."""
        running = threading.Event()

        def listen(record: Record) -> None:
            if (record.machine, record.id, record.dest) == ("point", str(point), "running"):
                running.set()

        self.dispatcher.trace.subscribe(listen)
        handle = self.dispatcher.dispatch(point, force=True)
        assert running.wait(PATIENCE_S)
        return handle

    def restarted(self) -> set[str]:
        """The engines that were started again since the last call."""
        records, self.records[:] = list(self.records), []
        return {record.id for record in records if record.trigger == "restart"}


@pytest.fixture(scope="module")
def run(cluster: Nodes) -> Iterator[Run]:
    from vime.ray import RayEvalDispatcher

    root = cluster.root
    args = arguments(root, "run", eval_prompt_data=["sums", str(root / "sums.jsonl")])
    dispatcher = RayEvalDispatcher.from_args(args, exporter=make_exporter(1))
    try:
        run = Run(cluster, dispatcher)
        dispatcher.trace.subscribe(run.records.append)
        dispatcher.wait_until_ready()
        yield run
    finally:
        dispatcher.close()


def goes_on(run: Run, point: int) -> Any:
    outcome = run.dispatcher.dispatch(point, force=True).result(PATIENCE_S)
    assert outcome.state == "done", outcome.detail
    return outcome


def costs_one_point_at_most(outcome: Any) -> None:
    lost = ("unhealthy", "crashed", "timeout_eval", "transfer_failed")
    assert outcome.state == "done" or outcome.reason in lost, (outcome.reason, outcome.detail)


def test_the_engines_are_on_two_nodes_and_each_is_reached_at_its_nodes_address(run: Run) -> None:
    import ray

    assert run.node_of(0) != run.node_of(1)
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    for engine in (0, 1):
        host = run.server(engine).url.removeprefix("http://").rpartition(":")[0]
        assert host in addresses


@pytest.mark.parametrize(
    "route", ["/pause", "/resume", "/collective_rpc", "/inference/v1/generate", "/v1/completions"]
)
def test_control_and_generation_routes_of_engines_are_shut_to_strangers(
    run: Run, route: str
) -> None:
    import httpx

    for engine in (0, 1):
        url = run.server(engine).url
        assert httpx.post(url + route, json={}, trust_env=False).status_code == 401
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_a_baseline_that_every_node_sees_does_not_travel(run: Run) -> None:
    outcome = run.dispatcher.dispatch(0, hf_dir=run.cluster.root / "base").result(PATIENCE_S)
    assert outcome.state == "done", outcome.detail
    assert "eval/transfer_bytes" not in outcome.metrics


def test_a_snapshot_travels_to_both_nodes_and_is_scored_there(run: Run) -> None:
    outcome = goes_on(run, 1)
    snapshot = run.cluster.root / "driver" / "step_1"
    size = sum(p.stat().st_size for p in snapshot.iterdir() if p.name != ".complete")
    assert outcome.metrics["eval/transfer_bytes"] == 2 * size
    assert outcome.metrics["eval/transfer_seconds"] > 0
    for engine in (0, 1):
        assert run.cluster.snapshots(run.node_of(engine)) == ["step_1"]
    assert run.restarted() == set()


def test_an_engine_actor_killed_in_the_middle_of_an_eval_costs_one_point_at_most(
    run: Run,
) -> None:
    handle = run.in_the_middle_of(2)
    server, node = run.server(0), run.node_of(0)
    with watching([server.pid]) as watch:
        os.kill(server.facts.pid, signal.SIGKILL)
        watch.assert_gone()
    costs_one_point_at_most(handle.result(PATIENCE_S))
    goes_on(run, 3)
    assert run.restarted() == {"engine_0"}
    assert run.node_of(0) == node


def test_a_node_removed_in_the_middle_of_an_eval_costs_one_point_at_most(run: Run) -> None:
    handle = run.in_the_middle_of(4)
    server, lost = run.server(1), run.node_of(1)
    (spare,) = run.cluster.nodes.keys() - {run.node_of(0), lost}
    with watching([server.pid]) as watch:
        run.cluster.take_away(lost)
        watch.assert_gone()
    costs_one_point_at_most(handle.result(PATIENCE_S))
    goes_on(run, 5)
    assert run.restarted() == {"engine_1"}
    assert run.node_of(1) == spare, "Ray moves the bundle to the node that has room"
    assert run.cluster.snapshots(spare)[-1] == "step_5"


def test_the_merged_traces_of_all_nodes_keep_the_invariants_and_nothing_is_left(run: Run) -> None:
    run_dir: Path = run.dispatcher.run_dir
    run.dispatcher.close()
    assert len(list(run_dir.glob("trace.*.jsonl"))) == 3, "one of each node that had an engine"
    assert problems(run_dir) == []
    _, alive = psutil.wait_procs(processes_of(run.cluster.root), timeout=20)
    assert not alive
    assert not any(run.cluster.snapshots(name) for name in run.cluster.nodes)
