"""Where a run's engines and its eval runner live: on this machine, unless a cluster is given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vime.eval.config import ConfigError, EvalConfig
from vime.fsm.trace import Trace

if TYPE_CHECKING:
    from vime.eval.actor import ActorRef
    from vime.eval.contracts import Exporter
    from vime.eval.fleet.supervisor import FleetSupervisor


class Site(Protocol):
    """Makes what a run has in other processes; nothing is started before :meth:`running`."""

    def check(self, config: EvalConfig) -> None:
        """See that the fleet can run there.

        Raises:
            ConfigError: with one sentence for everything that is missing.
        """

    def make_exporter(self, exporter: Any) -> Exporter:
        """Make an exporter of what the caller gave; raises ``ValueError``."""

    def make_fleet(self, config: EvalConfig, run_dir: Path, trace: Trace) -> FleetSupervisor:
        """The engines and their router."""

    def make_runner(self, factory_path: str, args: tuple[Any, ...], log_path: Path) -> ActorRef:
        """The eval runner; it starts with the first message.

        Args:
            factory_path: of the runner.
            args: of the factory; the first one is the config.
            log_path: what the runner prints.
        """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Entered before the fleet and left after it: what the site needs for itself."""


class ThisMachine:
    """Everything in child processes here."""

    def check(self, config: EvalConfig) -> None:
        """See :class:`Site`."""
        from vime.eval.fleet.settings import FleetSettings, preflight

        if config.detached:
            raise ConfigError(
                [
                    "--eval-detached: engines outlive their driver on a Ray cluster only; use "
                    "vime.ray.RayEvalDispatcher, or drop it"
                ]
            )
        preflight(FleetSettings.from_config(config, Path()))

    def make_exporter(self, exporter: Any) -> Exporter:
        """See :class:`Site`."""
        from vime.eval.snapshot.export import as_exporter

        return as_exporter(exporter)

    def make_fleet(self, config: EvalConfig, run_dir: Path, trace: Trace) -> FleetSupervisor:
        """See :class:`Site`."""
        from vime.eval.fleet.settings import FleetSettings
        from vime.eval.fleet.supervisor import FleetSupervisor

        return FleetSupervisor(FleetSettings.from_config(config, run_dir), trace)

    def make_runner(self, factory_path: str, args: tuple[Any, ...], log_path: Path) -> ActorRef:
        """See :class:`Site`."""
        from vime.eval.actor import ProcessActor

        config: EvalConfig = args[0]
        # What does not stop is killed, with time left to close all that comes after the runner.
        return ProcessActor(
            factory_path,
            args,
            name=log_path.stem,
            log_path=log_path,
            stop_timeout_s=min(10.0, config.dispose_timeout_s / 2),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It needs nothing."""
        yield


def check_machine(config: EvalConfig, site: Site) -> None:
    """See that data, rewards and machine fit the flags.

    Raises:
        ConfigError: they do not; all that is wrong with any of them.
    """
    from vime.eval.runner.datasets import check_datasets
    from vime.eval.runner.rewards import load_rewards

    checks: tuple[Callable[[EvalConfig], Any], ...] = (check_datasets, load_rewards, site.check)
    problems: list[str] = []
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
