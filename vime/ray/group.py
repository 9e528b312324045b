"""The placement group of a run: waits until Ray has it, and finds out where each GPU of it is."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vime.ray.placement import PlacementLayout

log = logging.getLogger("vime")

#: What one bundle holds: a GPU, and a CPU for the process that drives it.
BUNDLE = {"GPU": 1.0, "CPU": 1.0}


class PlacementError(RuntimeError):
    """The cluster has not given the placement group; the message says what is missing."""


@dataclass(frozen=True)
class Node:
    """One live node of the cluster, in GPUs and CPUs; the free ones are nobody's at present."""

    address: str
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float

    @property
    def num_bundles(self) -> int:
        """How many bundles fit on it when it is empty."""
        return int(min(self.gpus, self.cpus))

    @property
    def num_free(self) -> int:
        """How many bundles fit on it now."""
        return int(min(self.free_gpus, self.free_cpus))


@dataclass(frozen=True)
class Bundle:
    """One GPU of the group.

    Attributes:
        index: the bundle's own number in the group, which Ray's scheduling strategies want.
        node_id: of its node, hexadecimal.
        address: of its node.
        gpu_id: as ``CUDA_VISIBLE_DEVICES`` on that node would name it.
    """

    index: int
    node_id: str
    address: str
    gpu_id: str


class Cluster(Protocol):
    """What is asked of Ray: :class:`RayCluster`, or a fake."""

    def create(self, bundles: list[dict[str, float]]) -> Any:
        """Ask for a placement group; returns at once."""

    def wait(self, group: Any, timeout_s: float) -> bool:
        """Wait so many seconds for the group; returns whether it is there."""

    def nodes(self) -> list[Node]:
        """Every live node."""

    def locate(self, group: Any, num_bundles: int, timeout_s: float) -> list[Bundle]:
        """Where each bundle is, in the order of their indices."""

    def remove(self, group: Any) -> None:
        """Give the group back."""


class Placement:
    """A placement group that is there.

    Args:
        cluster: where it is.
        group: Ray's handle on it.
        layout: whose bundles are which.
        bundles: every bundle, in logical order.
    """

    def __init__(
        self, cluster: Cluster, group: Any, layout: PlacementLayout, bundles: tuple[Bundle, ...]
    ) -> None:
        self.group = group
        self.layout = layout
        self.bundles = bundles
        self._cluster = cluster

    def region(self, name: str) -> tuple[Bundle, ...]:
        """The bundles of ``actor``, ``critic``, ``rollout`` or ``eval``, in logical order."""
        return tuple(self.bundles[logical] for logical in self.layout.regions[name])

    def engines(self, name: str, num_gpus_per_engine: int) -> list[tuple[Bundle, ...]]:
        """The bundles of each engine of a region, one after the other.

        Raises:
            PlacementError: an engine's GPUs would lie on two nodes.
        """
        region = self.region(name)
        starts = range(0, len(region), num_gpus_per_engine)
        engines = [region[start : start + num_gpus_per_engine] for start in starts]
        for number, engine in enumerate(engines):
            addresses = list(dict.fromkeys(bundle.address for bundle in engine))
            if len({bundle.node_id for bundle in engine}) > 1:
                raise PlacementError(
                    f"engine {number} of the {name} region would have its {len(engine)} GPUs on "
                    f"several nodes ({', '.join(addresses)}): choose numbers of trainer and "
                    f"rollout GPUs that are multiples of {num_gpus_per_engine}, or smaller engines"
                )
        return engines

    def remove(self) -> None:
        """Give the group back; whatever still runs in it is ended by Ray."""
        self._cluster.remove(self.group)


def place(
    layout: PlacementLayout,
    *,
    deadline_s: float = 1800.0,
    detached: bool = False,
    report_every_s: float = 30.0,
    cluster: Cluster | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = log.warning,
) -> Placement:
    """Get one placement group for the whole run, and order its bundles.

    One bundle a GPU, packed onto as few nodes as possible, ordered by node address and GPU id,
    so that neighbouring numbers are neighbouring GPUs. Call it on the driver, after
    ``ray.init()``; it blocks until the group is there.

    Args:
        layout: see :func:`vime.ray.placement.placement_layout`.
        deadline_s: seconds until the group must be there and located; a cluster that grows by
            itself may need many.
        detached: it outlives this driver, until somebody removes it.
        report_every_s: seconds between two sentences on what is missing.
        cluster, clock, say: the ways to the world outside; fakes may replace them.

    Raises:
        PlacementError: the deadline has passed; the group has been given back.
        ValueError: the layout is empty.
    """
    if not layout.num_bundles:
        raise ValueError("the layout has no bundle: no flag asks for a GPU; see placement_layout")
    cluster = RayCluster("detached" if detached else None) if cluster is None else cluster
    deadline = clock() + deadline_s
    group = cluster.create([dict(BUNDLE) for _ in range(layout.num_bundles)])
    try:
        _wait(cluster, group, layout, deadline_s, report_every_s, clock, say)
        found = cluster.locate(group, layout.num_bundles, max(deadline - clock(), 1.0))
    except BaseException:
        cluster.remove(group)
        raise
    return Placement(cluster, group, layout, tuple(sorted(found, key=_position)))


def _wait(
    cluster: Cluster,
    group: Any,
    layout: PlacementLayout,
    deadline_s: float,
    report_every_s: float,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    began = clock()
    while True:
        left_s = began + deadline_s - clock()
        if cluster.wait(group, max(min(left_s, report_every_s), 0.0)):
            return
        missing = shortage(layout, cluster.nodes())
        waited_s = clock() - began
        if waited_s >= deadline_s:
            raise PlacementError(f"no placement group after {waited_s:.4g} s: {missing}")
        say(f"waiting for the placement group since {waited_s:.4g} s: {missing}")


def shortage(layout: PlacementLayout, nodes: Sequence[Node]) -> str:
    """One sentence: what a group needs, what the cluster has, and what is missing."""
    needed = layout.num_bundles
    parts = ", ".join(f"{name} {len(region)}" for name, region in layout.regions.items() if region)
    text = f"it needs {needed} bundles of 1 GPU and 1 CPU ({parts}); "
    fit, free = sum(n.num_bundles for n in nodes), sum(n.num_free for n in nodes)
    if fit < needed:
        text += f"the cluster holds {fit}: {needed - fit} more must be added, or fewer asked for"
        if sum(node.gpus for node in nodes) >= needed:
            text += " (it has the GPUs, but too few CPUs beside them)"
    elif free < needed:
        text += f"of the cluster's {fit}, {free} are free: others hold {needed - free} too many"
    else:
        text += f"{free} are free, and Ray has not given them yet"
    return f"{text}; {_described(nodes)}"


def _described(nodes: Sequence[Node], most: int = 8) -> str:
    """The nodes with a GPU; of many, the first."""
    with_gpus = [node for node in nodes if node.gpus]
    if not with_gpus:
        return f"none of its {len(nodes)} live nodes has a GPU"
    shown = ", ".join(
        f"{node.address}: {node.free_gpus:g} of {node.gpus:g} GPUs and {node.free_cpus:g} of "
        f"{node.cpus:g} CPUs free"
        for node in sorted(with_gpus, key=lambda node: _address_key(node.address))[:most]
    )
    left = len(with_gpus) - most
    return shown + (f", and {left} more nodes" if left > 0 else "")


def _position(bundle: Bundle) -> tuple[Any, ...]:
    """By address, then node (several may share one address), then GPU, numbers as numbers."""
    gpu = (0, int(bundle.gpu_id), "") if bundle.gpu_id.isdigit() else (1, 0, bundle.gpu_id)
    return (_address_key(bundle.address), bundle.node_id, gpu, bundle.index)


def _address_key(address: str) -> tuple[int, int, str]:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a host name
        return (9, 0, address)
    return (found.version, int(found), "")


class RayCluster:
    """The cluster that this driver is connected to.

    Args:
        lifetime: of its groups: ``None`` is as long as that of the driver; or ``detached``.
    """

    def __init__(self, lifetime: str | None = None) -> None:
        self._lifetime = lifetime

    def create(self, bundles: list[dict[str, float]]) -> Any:
        """See :class:`Cluster`.

        Raises:
            RuntimeError: the driver is not connected.
        """
        import ray
        from ray.util.placement_group import placement_group

        if not ray.is_initialized():
            raise RuntimeError("no Ray cluster: call ray.init() (or ray.init(address=...)) before")
        return placement_group(bundles, strategy="PACK", lifetime=self._lifetime)

    def wait(self, group: Any, timeout_s: float) -> bool:
        """See :class:`Cluster`.

        Raises:
            PlacementError: somebody else has removed the group.
        """
        import ray

        ready = group.ready()  # group.wait() knows whole seconds only
        done, _ = ray.wait([ready], timeout=timeout_s)
        if not done:
            return False
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            raise PlacementError(f"the placement group is gone: {error}") from error
        return True

    def nodes(self) -> list[Node]:
        """See :class:`Cluster`."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            Node(
                node["NodeManagerAddress"],
                node["Resources"].get("GPU", 0.0),
                node["Resources"].get("CPU", 0.0),
                free.get(node["NodeID"], {}).get("GPU", 0.0),
                free.get(node["NodeID"], {}).get("CPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def locate(self, group: Any, num_bundles: int, timeout_s: float) -> list[Bundle]:
        """See :class:`Cluster`; asks a task in each bundle.

        Raises:
            PlacementError: not all have answered in time.
        """
        import ray

        refs = [look_into(group, index) for index in range(num_bundles)]
        try:
            found = ray.get(refs, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            done, _ = ray.wait(refs, num_returns=num_bundles, timeout=0)
            raise PlacementError(
                f"only {len(done)} of {num_bundles} bundles have said where they are after "
                f"{timeout_s:.4g} s: can the nodes start Python workers?"
            ) from error
        return [Bundle(index, *where) for index, where in enumerate(found)]

    def remove(self, group: Any) -> None:
        """See :class:`Cluster`."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def strategy(group: Any, index: int) -> Any:
    """Ray's scheduling strategy that puts a task or an actor into one bundle of the group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def look_into(group: Any, index: int) -> Any:
    """Start a task in a bundle whose whole GPU is free.

    Returns:
        Ray's reference to the node's id and address and the GPU's id there, now.
    """
    import ray

    look = ray.remote(num_cpus=0, num_gpus=1, max_retries=3)(_look)
    return look.options(scheduling_strategy=strategy(group, index)).remote()


def _look() -> tuple[str, str, str]:
    """In a bundle: the node's id and address, and the GPU that Ray gives out there."""
    import ray

    context = ray.get_runtime_context()
    (gpu_id,) = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), ray.util.get_node_ip_address(), str(gpu_id)
