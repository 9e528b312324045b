"""The death of a driver: everything ends with it, or is kept and taken over by the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray.clusters import Nodes, arguments, make_exporter, problems, processes_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

PATIENCE_S = 200


class Driver:
    """One driver in a process of its own, and all that it has said."""

    def __init__(self, cluster: Nodes, run: str, **flags: Any) -> None:
        command = [sys.executable, "-m", "tests.ray.driver"]
        command += [cluster.cluster.address, str(cluster.root), run, json.dumps(flags)]
        path = os.pathsep.join(["examples", *sys.path])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until it says something."""
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                facts: dict[str, Any] = json.loads(line)
                if wanted(facts):
                    return facts
        finally:
            timer.cancel()
        raise AssertionError(f"it ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def driver(cluster: Nodes, run: str, **flags: Any) -> Iterator[Driver]:
    started = Driver(cluster, run, eval_num_gpus=1, **flags)
    try:
        yield started
    finally:
        started.kill()


def servers(root: Path) -> list[psutil.Process]:
    """The API servers of engines, and their keepers."""
    return [p for p in processes_of(root) if any("api_server" in w for w in p.info["cmdline"])]


def until(holds: Callable[[], Any]) -> Any:
    """What other processes do is polled for: nobody tells."""
    import time

    deadline = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_nothing_is_left_of_a_fleet_whose_driver_was_killed(cluster: Nodes) -> None:
    with driver(cluster, "first") as first:
        until(lambda: servers(cluster.root))
        first.kill()
    _, alive = psutil.wait_procs(processes_of(cluster.root), timeout=30)
    assert not alive


def test_a_detached_fleet_outlives_its_driver_and_only_then_the_next_one_has_it(
    cluster: Nodes,
) -> None:
    import ray

    from vime.eval.config import EvalConfig
    from vime.eval.fleet.settings import FleetSettings
    from vime.ray import RayEvalDispatcher, end_detached_fleet
    from vime.ray.detached import FleetOwnedError, claim_fleet

    args = arguments(cluster.root, "third", eval_num_gpus=1, eval_detached=True)
    settings = FleetSettings.from_config(EvalConfig.from_args(args), Path())
    with driver(cluster, "second", eval_detached=True) as second:
        ready = second.until(lambda said: said["dest"] == "ready")
        second.until(lambda said: (said["id"], said["dest"]) == ("1", "done"))
        with pytest.raises(FleetOwnedError, match=f"belongs to pid {second.process.pid} on "):
            claim_fleet(settings, "this test", news_s=0.0)
        second.kill()
    with RayEvalDispatcher.from_args(args, exporter=make_exporter(1)) as dispatcher:
        dispatcher.wait_until_ready()
        outcome = dispatcher.dispatch(2).result(PATIENCE_S)
        assert outcome.state == "done", outcome.detail
        engine = dispatcher._parts.fleet._engines[0]  # type: ignore[union-attr]
        assert engine._process is not None
        assert engine._process.pid == ready["detail"]["pid"]
    assert psutil.pid_exists(ready["detail"]["pid"]), "an orderly end leaves it as well"
    assert problems(cluster.root / "third") == []
    assert end_detached_fleet(args)
    assert not end_detached_fleet(args)
    _, alive = psutil.wait_procs(processes_of(cluster.root), timeout=30)
    assert not alive
    assert ray.is_initialized()
