"""A fleet that outlives its driver (``--eval-detached``), and who owns it at present.

Everything that must survive is a detached Ray actor in the namespace :data:`NAMESPACE`, under a
name made of the fleet's settings: one *ledger*, which knows the run's tokens, the placement group
and the present owner, and one host an engine. A driver becomes the owner by claiming the ledger.
The claim is refused for as long as the owner before it lives: each owner leaves with the ledger an
actor of its own that dies with it, so that Ray's news of that death are what opens the door.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

import vime
from vime.eval.config import ConfigError, EvalConfig
from vime.eval.fleet.launch import Tokens
from vime.eval.fleet.settings import FleetSettings
from vime.ray.group import Bundle, Placement, RayCluster, place
from vime.ray.placement import PlacementLayout
from vime.ray.processes import on_node

NAMESPACE: Final = "vime"

#: How long the news of a driver's death may take to come, in seconds.
_NEWS_S: Final = 30.0
_POLL_S: Final = 0.5
_CALL_S: Final = 60.0

#: States of a placement group that has its bundles, or is getting them back.
_ALIVE: Final = ("CREATED", "RESCHEDULING")


class FleetOwnedError(ConfigError):
    """Another driver has the fleet, and is alive."""


@dataclass(frozen=True)
class Claim:
    """What the owner of a fleet is given.

    Attributes:
        tokens: of its engines.
        placed: the placement group and its bundles, once there are some.
        epoch: how many owners there have been.
    """

    tokens: Tokens = field(repr=False)
    placed: tuple[Any, tuple[Bundle, ...]] | None
    epoch: int


class Ledger:
    """Detached: who owns a fleet, and what the next owner has to know."""

    def __init__(self) -> None:
        self._tokens = Tokens()
        self._placed: Any = None
        self._owner = ""
        self._life: Any = None
        self._epoch = 0
        self._turn = asyncio.Lock()  # of two who claim at once, one is first

    async def claim(self, owner: str, sign: Any) -> Claim | str:
        """Become the owner.

        Args:
            owner: who, for people.
            sign: an actor that lives as long as the owner, in a list.

        Returns:
            What it has to know, or who has the fleet.
        """
        async with self._turn:
            if self._life is not None and not await _is_over(self._life):
                return self._owner
            self._owner, self._life = owner, sign[0].live.remote()
            self._epoch += 1
            return Claim(self._tokens, self._placed, self._epoch)

    async def note(self, epoch: int, placed: Any) -> bool:
        """Keep a placement group for the next owner; only the present one may say so."""
        if epoch == self._epoch:
            self._placed = placed
        return epoch == self._epoch


class SignOfLife:
    """Lives as long as the driver that made it."""

    async def live(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()


async def _is_over(life: Any) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_end_of(life), _POLL_S)
        return True
    return False


async def _end_of(life: Any) -> None:
    import ray

    try:
        await life
    except ray.exceptions.RayError:
        return


class Ownership:
    """A driver's hold on a fleet; made by :func:`claim_fleet`.

    Attributes:
        name: of the fleet.
        claim: what the ledger has given.
    """

    def __init__(self, name: str, claim: Claim, ledger: Any, sign: Any) -> None:
        self.name = name
        self.claim = claim
        self._ledger = ledger
        self._sign = sign

    def engine_name(self, index: int) -> str:
        """Of the actor that owns an engine."""
        return f"{self.name}-engine_{index}"

    def placement(self, layout: PlacementLayout, deadline_s: float) -> Placement:
        """The fleet's placement group: that of the owner before, or a new one.

        Raises:
            PlacementError: there is no room for a new one.
        """
        import ray
        from ray.util.placement_group import placement_group_table

        if self.claim.placed is not None:
            group, bundles = self.claim.placed
            if placement_group_table(group).get("state") in _ALIVE:
                return Placement(RayCluster(), group, layout, bundles)
        placement = place(layout, deadline_s=deadline_s, detached=True)
        placed = placement.group, placement.bundles
        kept = ray.get(self._ledger.note.remote(self.claim.epoch, placed), timeout=_CALL_S)
        assert kept, "nobody else can have claimed it meanwhile"
        return placement

    def release(self) -> None:
        """Let the next driver have the fleet."""
        import ray

        ray.kill(self._sign)


def fleet_name(settings: FleetSettings) -> str:
    """The same for every driver that wants the same engines."""
    wanted = {
        "vime": vime.__version__,
        "base": str(settings.base.absolute()),
        "engines": settings.num_engines,
        "gpus": settings.num_gpus_per_engine,
        "vllm": dict(settings.vllm),
    }
    text = json.dumps(wanted, sort_keys=True, default=str)
    return f"vime-{blake3(text.encode()).hexdigest()[:12]}"


def claim_fleet(settings: FleetSettings, owner: str, news_s: float = _NEWS_S) -> Ownership:
    """Become the owner of the detached fleet of these settings, which may not exist yet.

    Args:
        settings: the fleet.
        owner: this driver, for people.
        news_s: seconds to wait for the death of an owner before.

    Raises:
        FleetOwnedError: its owner is alive.
    """
    import ray

    name = fleet_name(settings)
    options = {**detached(f"{name}-ledger"), "num_cpus": 0, "num_gpus": 0, "get_if_exists": True}
    ledger = ray.remote(Ledger).options(**options).remote()
    home = on_node(ray.get_runtime_context().get_node_id())  # the loss of another node says nothing
    sign = ray.remote(SignOfLife).options(num_cpus=0, num_gpus=0, scheduling_strategy=home).remote()
    deadline = time.monotonic() + news_s
    while True:
        found = ray.get(ledger.claim.remote(owner, [sign]), timeout=_CALL_S)
        if isinstance(found, Claim):
            return Ownership(name, found, ledger, sign)
        if time.monotonic() > deadline:
            ray.kill(sign)
            raise FleetOwnedError(
                [
                    f"--eval-detached: the fleet {name} belongs to {found}, which is alive; wait "
                    "for it to end, or change a setting of the engines to get a fleet of its own"
                ]
            )
        time.sleep(_POLL_S)


def detached(name: str) -> Mapping[str, Any]:
    """Ray's options for an actor that outlives its driver."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


def end_detached_fleet(args: argparse.Namespace) -> bool:
    """End the detached fleet that these flags ask for: engines, placement group, ledger.

    Args:
        args: the flags of the runs that used it.

    Returns:
        Whether there was one.

    Raises:
        FleetOwnedError: a driver that is alive has it.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    settings = FleetSettings.from_config(EvalConfig.from_args(args), Path())
    name = fleet_name(settings)
    try:
        ray.get_actor(f"{name}-ledger", NAMESPACE)
    except ValueError:
        return False
    ownership = claim_fleet(settings, "whoever ends it")
    for index in range(settings.num_engines):
        _end_actor(ownership.engine_name(index))
    _end_actor(f"{name}-ledger")
    if ownership.claim.placed is not None:
        remove_placement_group(ownership.claim.placed[0])
    ownership.release()
    return True


def _end_actor(name: str) -> None:
    """Kill a named actor, and wait until its name is free; nothing if there is none."""
    import ray

    deadline = time.monotonic() + _CALL_S
    with contextlib.suppress(ValueError):  # what get_actor raises when there is none
        while time.monotonic() < deadline:
            ray.kill(ray.get_actor(name, NAMESPACE))
            time.sleep(0.1)
