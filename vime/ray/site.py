"""A Ray cluster as the place where a run's engines, their router and its eval runner live."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vime.eval.config import ConfigError, EvalConfig
from vime.eval.fleet.settings import FleetSettings, argument_problems, node_problems
from vime.fsm.trace import Trace
from vime.ray.actors import RayActor
from vime.ray.delivery import Deliveries
from vime.ray.detached import Ownership
from vime.ray.engines import RayLaunch
from vime.ray.group import Placement, PlacementError
from vime.ray.hosting import described
from vime.ray.processes import NodeSpawn, on_node

if TYPE_CHECKING:
    from vime.eval.actor import Actor, ActorRef
    from vime.eval.contracts import Exporter
    from vime.eval.fleet.supervisor import FleetSupervisor

#: A node must be able to start a Python worker within this, in seconds.
_CHECK_S: Final = 120.0

_RUNNER: Final = "vime.ray.site:make_runner"


class RaySite:
    """See :class:`vime.eval.site.Site`.

    Engines are in the eval region, each on the node of its bundles. Router and eval runner are on
    the driver's node, where data, user code and the run's directory are; the router listens on
    that node's loopback address only.

    Args:
        placement: whose region ``eval`` the engines take; ``None`` where there are none.
        ownership: of a fleet that outlives its driver.
        runner_options, router_options: Ray's own, for these two: the resources that they need;
            none if absent, as a driver's node may offer none.

    Raises:
        ConfigError: this process is no driver of a Ray cluster.
    """

    def __init__(
        self,
        placement: Placement | None,
        *,
        ownership: Ownership | None = None,
        runner_options: Mapping[str, Any] | None = None,
        router_options: Mapping[str, Any] | None = None,
    ) -> None:
        nothing = {"num_cpus": 0, "num_gpus": 0}
        self._placement = placement
        self._ownership = ownership
        self._runner_options = nothing | dict(runner_options or {})
        self._router_options = nothing | dict(router_options or {})
        self._home = home_node()
        self._deliveries: Deliveries | None = None

    def check(self, config: EvalConfig) -> None:
        """See :class:`vime.eval.site.Site`; asks every node of the eval region."""
        settings = FleetSettings.from_config(config, Path())
        problems = argument_problems(settings)
        assert self._placement is not None, "a fleet has one"
        try:
            engines = self._placement.engines("eval", settings.num_gpus_per_engine)
        except PlacementError as error:
            raise ConfigError([*problems, str(error)]) from error
        if len(engines) != settings.num_engines:
            found = len(self._placement.region("eval"))
            problems.append(
                f"--eval-num-gpus {settings.num_gpus}: the placement has {found} GPUs in its eval "
                "region; make it from the same arguments (vime.ray.placement_layout)"
            )
        problems += _problems_of({engine[0].node_id for engine in engines}, settings)
        if problems:
            raise ConfigError(problems)

    def make_exporter(self, exporter: Any) -> Exporter:
        """See :class:`vime.eval.site.Site`; handles of Ray actors are exporters as well."""
        from vime.eval.snapshot.export import as_exporter
        from vime.ray.exporters import RayExporter, handles_of

        handles = handles_of(exporter)
        return as_exporter(exporter) if handles is None else RayExporter(handles)

    def make_fleet(self, config: EvalConfig, run_dir: Path, trace: Trace) -> FleetSupervisor:
        """See :class:`vime.eval.site.Site`."""
        from vime.eval.fleet.supervisor import FleetSupervisor

        settings = FleetSettings.from_config(config, run_dir)
        assert self._placement is not None, "a fleet has one"
        engines = self._placement.engines("eval", settings.num_gpus_per_engine)
        launch = RayLaunch(settings, self._placement.group, engines, self._ownership)
        assert config.hf_dir is not None, "validated with the flags"
        self._deliveries = Deliveries(
            run_id=trace.run_id,
            staging=config.hf_dir,
            keep=config.keep_snapshots,
            verify=config.verify,
            run_dir=run_dir,
            home=self._home,
            nodes=lambda: launch.nodes,
        )
        return FleetSupervisor(
            settings,
            trace,
            launch=launch,
            localize=self._deliveries,
            tokens=None if self._ownership is None else self._ownership.claim.tokens,
            spawn=NodeSpawn(self._home, self._router_options),
        )

    def make_runner(self, factory_path: str, args: tuple[Any, ...], log_path: Path) -> ActorRef:
        """See :class:`vime.eval.site.Site`."""
        return RayActor(
            _RUNNER,
            (str(Path.cwd()), factory_path, *args),
            name=log_path.stem,
            log_path=log_path,
            options={**self._runner_options, "scheduling_strategy": on_node(self._home)},
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See :class:`vime.eval.site.Site`."""
        if self._deliveries is None:
            yield
            return
        async with self._deliveries.running():
            yield


def make_runner(directory: str, factory_path: str, *args: Any) -> Actor:
    """In the runner's process: work where the driver does, so that relative paths mean the same."""
    os.chdir(directory)
    module_name, _, name = factory_path.partition(":")
    runner: Actor = getattr(importlib.import_module(module_name), name)(*args)
    return runner


def home_node() -> str:
    """The driver's node, hexadecimal.

    Raises:
        ConfigError: there is no cluster, or it is reached through Ray's client.
    """
    import ray

    if ray.util.client.ray.is_connected():
        raise ConfigError(
            ["ray.init(address='ray://…'): vime's driver must run on a node of the cluster; submit "
             "it as a Ray job, or start it on the head node with ray.init(address='auto')"]
        )  # fmt: skip
    if not ray.is_initialized():
        raise ConfigError(["no Ray cluster: call ray.init() (or ray.init(address=…)) before"])
    return str(ray.get_runtime_context().get_node_id())


def _problems_of(node_ids: set[str], settings: FleetSettings) -> list[str]:
    """What each node lacks, one sentence each."""
    import ray

    look = ray.remote(num_cpus=0, num_gpus=0, max_retries=1)(_look)
    refs = [
        look.options(scheduling_strategy=on_node(node_id)).remote(settings) for node_id in node_ids
    ]
    try:
        found: list[list[str]] = ray.get(refs, timeout=_CHECK_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        return [f"a node of the eval region cannot run Python with vime: {described(error)}"]
    return [problem for problems in found for problem in problems]


def _look(settings: FleetSettings) -> list[str]:
    import ray

    address = ray.util.get_node_ip_address()
    return [f"node {address}: {problem}" for problem in node_problems(settings)]
