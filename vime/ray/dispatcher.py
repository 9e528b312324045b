"""``RayEvalDispatcher``: the dispatcher of a training loop whose driver is on a Ray cluster."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from vime.eval.config import ConfigError, EvalConfig
from vime.eval.dispatcher import EvalDispatcher, SharedEval
from vime.eval.fleet.settings import FleetSettings
from vime.ray.detached import Ownership, claim_fleet
from vime.ray.group import Placement, place
from vime.ray.placement import eval_layout
from vime.ray.site import RaySite, home_node


class RayEvalDispatcher(EvalDispatcher):
    """An :class:`~vime.eval.dispatcher.EvalDispatcher` whose fleet is anywhere on the cluster.

    Made by :meth:`from_args`, on the driver, after ``ray.init()``. Everything else is as on one
    machine; the driver's death ends all of it, unless ``--eval-detached`` keeps the engines.
    """

    _given_back: ExitStack | None = None

    @classmethod
    def from_args(  # type: ignore[override] # a placement in place of a site
        cls,
        args: argparse.Namespace,
        *,
        placement: Placement | None = None,
        exporter: Any = None,
        shared_eval: SharedEval | None = None,
        trackers: Iterable[Any] = (),
        runner_options: Mapping[str, Any] | None = None,
        router_options: Mapping[str, Any] | None = None,
        placement_timeout: float = 1800.0,
    ) -> Self:
        """Validate ``args``, and start what evaluation needs on the cluster.

        Args:
            args: see :meth:`vime.eval.dispatcher.EvalDispatcher.from_args`.
            placement: what :func:`vime.ray.group.place` has returned for the same ``args``: the
                engines take its eval region. If absent, they get a placement group of their own,
                which is given back in the end, but for ``--eval-detached``.
            exporter: also: the handle of a Ray actor with a method
                ``export_hf(rollout_id, directory)``, or a list of such, one a rank; see
                :class:`vime.ray.exporters.RayExporter`.
            shared_eval, trackers: as there.
            runner_options, router_options: what eval runner and router ask Ray for
                (``{"num_cpus": 1}``, say); nothing if absent.
            placement_timeout: seconds to wait for a placement group of their own.

        Raises:
            ConfigError: flags are wrong, or the cluster cannot do what they ask.
            PlacementError: the cluster had no room in time.
        """
        config = EvalConfig.from_args(args)
        if not config.uses_snapshots:
            return super().from_args(
                args, exporter=exporter, shared_eval=shared_eval, trackers=trackers
            )
        home_node()
        with ExitStack() as undo:
            ownership: Ownership | None = None
            if config.detached:
                ownership = _claimed(config, placement)
                undo.callback(ownership.release)
                placement = ownership.placement(eval_layout(config.num_gpus), placement_timeout)
            elif placement is None and config.num_gpus:
                placement = place(eval_layout(config.num_gpus), deadline_s=placement_timeout)
                undo.callback(placement.remove)
            site = RaySite(
                placement,
                ownership=ownership,
                runner_options=runner_options,
                router_options=router_options,
            )
            dispatcher = super().from_args(
                args, exporter=exporter, shared_eval=shared_eval, trackers=trackers, site=site
            )
            dispatcher._given_back = undo.pop_all()
        return dispatcher

    def close(self) -> None:
        """See :meth:`vime.eval.dispatcher.EvalDispatcher.close`.

        With ``--eval-detached`` the engines stay, and the next driver may have them.
        """
        super().close()
        if self._given_back is not None:
            self._given_back.close()


def _claimed(config: EvalConfig, placement: Placement | None) -> Ownership:
    """Become the owner of the detached fleet."""
    if placement is not None and placement.region("eval"):
        raise ConfigError(
            [
                "--eval-detached: the fleet has a placement group of its own, which outlives this "
                "driver; make yours from the same arguments (vime.ray.placement_layout), so that "
                "it has no eval region"
            ]
        )
    settings = FleetSettings.from_config(config, Path())
    return claim_fleet(settings, f"pid {os.getpid()} on {socket.gethostname()}")
