"""Which GPU of a Ray cluster is whose: the layout as numbers, and the placement group behind it.

A *logical bundle* is one GPU of the placement group, numbered in the order of the nodes'
addresses and the GPUs' ids. The layout gives each role a range of these numbers; the eval
fleet's comes after all others, so that it shifts none of them::

    separate   | actor | critic | rollout | eval |
    colocate   | actor | critic |         | eval |       (the wider of the two decides
               | rollout          |       | eval |        where the fleet begins)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vime.eval.config import ConfigError
from vime.eval.config.gpu_counts import GpuCounts, gpu_counts

REGIONS = ("actor", "critic", "rollout", "eval")


@dataclass(frozen=True)
class PlacementLayout:
    """Who has which logical bundles of one placement group.

    Attributes:
        num_bundles: the size of the group, in GPUs.
        regions: each of :data:`REGIONS` → its logical bundles, empty for a role that has none.
            With ``--colocate``, actor and critic share theirs with rollout.
    """

    num_bundles: int
    regions: Mapping[str, range]


def placement_layout(args: argparse.Namespace) -> PlacementLayout:
    """Lay out one placement group, from flags alone.

    Reads ``actor_num_nodes`` (1 if missing), ``actor_num_gpus_per_node`` (8),
    ``critic_num_nodes`` and ``critic_num_gpus_per_node`` (the actor's), ``use_critic``,
    ``colocate``, ``rollout_num_gpus`` (with ``colocate``, the trainers' number),
    ``debug_train_only``, ``debug_rollout_only``, ``rollout_external``,
    ``rollout_external_engine_addrs``, ``eval_num_gpus`` (0) and ``eval_detached``, with which the
    fleet has a group of its own and no region here.

    It only computes: combinations that vime refuses (a fleet beside external rollout engines)
    are refused by :func:`vime.eval.validate_eval_args`.

    Returns:
        The layout. The eval region is the last ``eval_num_gpus`` bundles; all others are what
        they are without a fleet.

    Raises:
        ConfigError: a flag is no whole number, the two debug modes are asked for together, or
            ``rollout_num_gpus`` is missing where nothing else decides it.
    """
    counts = gpu_counts(args)
    actor, critic, rollout = _present(args, counts)
    colocate = bool(getattr(args, "colocate", False))
    trainers = actor + critic
    first_rollout = 0 if colocate else trainers
    end = max(trainers, first_rollout + rollout)
    # A fleet that outlives the group's driver cannot be in the group.
    num_eval = 0 if getattr(args, "eval_detached", False) else counts.eval
    regions = {
        "actor": range(actor),
        "critic": range(actor, trainers),
        "rollout": range(first_rollout, first_rollout + rollout),
        "eval": range(end, end + num_eval),
    }
    return PlacementLayout(end + num_eval, MappingProxyType(regions))


def eval_layout(num_gpus: int) -> PlacementLayout:
    """A placement group of the eval fleet's own, beside whatever else is on the cluster."""
    regions = {name: range(num_gpus) if name == "eval" else range(0) for name in REGIONS}
    return PlacementLayout(num_gpus, MappingProxyType(regions))


def _present(args: argparse.Namespace, counts: GpuCounts) -> tuple[int, int, int]:
    """GPUs of actor, critic and rollout that the group holds, in the mode that is asked for."""
    train_only = getattr(args, "debug_train_only", False)
    rollout_only = getattr(args, "debug_rollout_only", False)
    if train_only and rollout_only:
        raise ConfigError(
            ["--debug-train-only together with --debug-rollout-only: nothing is left; drop one"]
        )
    external = getattr(args, "rollout_external", False) or getattr(
        args, "rollout_external_engine_addrs", None
    )
    if train_only or (external and not rollout_only):
        return counts.actor, counts.critic, 0
    if external:
        return 0, 0, 0
    if counts.rollout is None:
        raise ConfigError(
            ["--rollout-num-gpus is missing: without --colocate nothing else says how many GPUs "
             "the rollout engines get"]
        )  # fmt: skip
    return (0, 0, counts.rollout) if rollout_only else (counts.actor, counts.critic, counts.rollout)
