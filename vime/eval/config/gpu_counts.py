"""How many GPUs the training framework's own flags give to each role."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from vime.eval.config.errors import ConfigError

#: What a framework's flag means where it is missing.
DEFAULTS = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "critic_num_nodes": None,  # as many as the actor
    "critic_num_gpus_per_node": None,  # as many as the actor
    "rollout_num_gpus": None,
    "rollout_num_gpus_per_engine": 1,
    "eval_num_gpus": 0,
    "eval_num_gpus_per_engine": 1,
}


@dataclass(frozen=True)
class GpuCounts:
    """GPUs of each role, before any mode (debugging, external engines) leaves one out.

    Attributes:
        actor, critic: the trainers; the critic has none without ``use_critic``.
        rollout: the rollout engines; ``None`` where the flags do not say. Engines that share
            the trainers' GPUs have as many as these unless they are given a number.
        eval: the dedicated eval fleet.
        rollout_per_engine, eval_per_engine: GPUs of one engine.
    """

    actor: int
    critic: int
    rollout: int | None
    eval: int
    rollout_per_engine: int
    eval_per_engine: int


def gpu_counts(args: argparse.Namespace) -> GpuCounts:
    """Read the counts from any namespace; what is missing, or ``None``, has its default.

    Raises:
        ConfigError: naming every flag that is no whole number, or too small.
    """
    found = {name: getattr(args, name, None) for name in DEFAULTS}
    problems = [
        f"--{name.replace('_', '-')} {value!r}: expected a whole number of at least {_least(name)}"
        for name, value in found.items()
        if value is not None and not _is_count(value, _least(name))
    ]
    if problems:
        raise ConfigError(problems)
    count: dict[str, Any] = {
        name: DEFAULTS[name] if value is None else value for name, value in found.items()
    }
    actor = count["actor_num_nodes"] * count["actor_num_gpus_per_node"]
    critic = _critic(count) if getattr(args, "use_critic", False) else 0
    rollout = count["rollout_num_gpus"]
    if rollout is None and getattr(args, "colocate", False):
        rollout = actor + critic
    return GpuCounts(
        actor=actor,
        critic=critic,
        rollout=rollout,
        eval=count["eval_num_gpus"],
        rollout_per_engine=count["rollout_num_gpus_per_engine"],
        eval_per_engine=count["eval_num_gpus_per_engine"],
    )


def _critic(count: dict[str, Any]) -> int:
    sizes = [
        count[f"actor_{name}"] if count[f"critic_{name}"] is None else count[f"critic_{name}"]
        for name in ("num_nodes", "num_gpus_per_node")
    ]
    return int(sizes[0] * sizes[1])


def _least(name: str) -> int:
    return 1 if name.endswith("_per_engine") else 0


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
