"""Getting a placement group: what is said while it is waited for, and where its bundles are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from vime.ray.group import Bundle, Node, PlacementError, RayCluster, place, shortage, strategy
from vime.ray.placement import PlacementLayout, placement_layout


def layout(actor: int = 2, rollout: int = 2, num: int = 4) -> PlacementLayout:
    return placement_layout(
        Namespace(actor_num_gpus_per_node=actor, rollout_num_gpus=rollout, eval_num_gpus=num)
    )


@dataclass
class FakeCluster:
    """Places a group after so many seconds of its own clock; its bundles are where it is told."""

    placed_after_s: float
    has: list[Node] = field(default_factory=list)
    where: list[tuple[str, str, str]] = field(default_factory=list)
    locating: Exception | BaseException | None = None
    now_s: float = 0.0
    said: list[str] = field(default_factory=list)
    asked: list[dict[str, float]] = field(default_factory=list)
    removed: list[Any] = field(default_factory=list)

    def create(self, bundles: list[dict[str, float]]) -> Any:
        self.asked = bundles
        return "group"

    def wait(self, group: Any, timeout_s: float) -> bool:
        left_s = self.placed_after_s - self.now_s
        self.now_s += min(timeout_s, max(left_s, 0.0))
        return self.now_s >= self.placed_after_s

    def nodes(self) -> list[Node]:
        return self.has

    def locate(self, group: Any, num_bundles: int, timeout_s: float) -> list[Bundle]:
        if self.locating is not None:
            raise self.locating
        where = self.where or [("n", "10.0.0.1", str(gpu)) for gpu in range(num_bundles)]
        return [Bundle(index, *place) for index, place in enumerate(where)]

    def remove(self, group: Any) -> None:
        self.removed.append(group)

    def place(self, wanted: PlacementLayout, **settings: Any) -> Any:
        return place(
            wanted, cluster=self, clock=lambda: self.now_s, say=self.said.append, **settings
        )


def test_a_bundle_is_one_gpu_and_one_cpu_and_there_is_one_for_each_gpu() -> None:
    cluster = FakeCluster(0)
    cluster.place(layout())
    assert cluster.asked == [{"GPU": 1.0, "CPU": 1.0}] * 8
    assert cluster.said == []


def test_what_is_missing_is_said_every_thirty_seconds() -> None:
    cluster = FakeCluster(100, [Node("10.0.0.1", 4, 8, 4, 8)])
    cluster.place(layout())
    need = "it needs 8 bundles of 1 GPU and 1 CPU (actor 2, rollout 2, eval 4)"
    has = "the cluster holds 4: 4 more must be added, or fewer asked for"
    node = "10.0.0.1: 4 of 4 GPUs and 8 of 8 CPUs free"
    assert cluster.said == [
        f"waiting for the placement group since {seconds} s: {need}; {has}; {node}"
        for seconds in (30, 60, 90)
    ]
    assert cluster.removed == []


def test_a_group_that_never_comes_fails_at_its_deadline_and_is_given_back() -> None:
    cluster = FakeCluster(1000, [Node("10.0.0.1", 4, 8, 4, 8)])
    with pytest.raises(PlacementError, match="no placement group after 70 s: it needs 8 bundles"):
        cluster.place(layout(), deadline_s=70)
    assert cluster.now_s == 70
    assert len(cluster.said) == 2
    assert cluster.removed == ["group"]


@pytest.mark.parametrize("error", [PlacementError("lost"), KeyboardInterrupt()])
def test_a_group_is_given_back_when_its_bundles_are_not_found(error: BaseException) -> None:
    cluster = FakeCluster(0, locating=error)
    with pytest.raises(type(error)):
        cluster.place(layout())
    assert cluster.removed == ["group"]


def test_an_empty_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="no flag asks for a GPU"):
        FakeCluster(0).place(layout(0, 0, 0))


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "8 more must be added, or fewer asked for; none of its 0 live nodes has a GPU"),
        ([Node("a", 0, 64, 0, 64)], "none of its 1 live nodes has a GPU"),
        ([Node("a", 8, 2, 8, 2)], "6 more must be added, or fewer asked for (it has the GPUs, but too few CPUs beside them); a: 8 of 8 GPUs and 2 of 2 CPUs free"),
        ([Node("a", 8, 8, 3, 8)], "of the cluster's 8, 3 are free: others hold 5 too many; a: 3 of 8 GPUs"),
        ([Node("a", 8, 8, 8, 8)], "8 are free, and Ray has not given them yet"),
        ([Node(f"10.0.0.{n}", 1, 1, 1, 1) for n in (10, 9, 8, 7, 6, 5, 4, 3, 2)], "10.0.0.9: 1 of 1 GPUs and 1 of 1 CPUs free, and 1 more nodes"),
    ],
)  # fmt: skip
def test_the_sentence_says_why_the_group_does_not_fit(nodes: list[Node], words: str) -> None:
    assert words in shortage(layout(), nodes)


def test_logical_bundles_follow_the_nodes_addresses_and_the_gpus_ids() -> None:
    where = [
        ("n1", "10.0.0.10", "0"), ("n2", "10.0.0.9", "10"), ("n2", "10.0.0.9", "9"),
        ("n3", "host-b", "GPU-b"), ("n3", "host-b", "GPU-a"), ("n5", "10.0.0.9", "1"),
        ("n1", "10.0.0.10", "1"), ("n4", "fd00::1", "0"),
    ]  # fmt: skip
    placement = FakeCluster(0, where=where).place(layout())
    assert [(b.node_id, b.gpu_id) for b in placement.bundles] == [
        ("n2", "9"), ("n2", "10"), ("n5", "1"), ("n1", "0"), ("n1", "1"), ("n4", "0"),
        ("n3", "GPU-a"), ("n3", "GPU-b"),
    ]  # fmt: skip
    assert [bundle.index for bundle in placement.bundles] == [2, 1, 5, 0, 6, 7, 4, 3]
    assert placement.region("eval") == placement.bundles[4:]
    assert placement.region("critic") == ()


def test_an_engine_has_its_gpus_on_one_node() -> None:
    where = [("n1", "10.0.0.1", str(gpu)) for gpu in range(5)]
    where += [("n2", "10.0.0.2", str(gpu)) for gpu in range(3)]
    placement = FakeCluster(0, where=where).place(layout(2, 2, 4))
    assert [len(engine) for engine in placement.engines("eval", 1)] == [1, 1, 1, 1]
    with pytest.raises(PlacementError, match=r"engine 0 .* nodes \(10\.0\.0\.1, 10\.0\.0\.2\)"):
        placement.engines("eval", 2)


# --- on a real cluster --------------------------------------------------------------------------


def free_gpus() -> float:
    return sum(node.free_gpus for node in RayCluster().nodes())


def until(holds: Callable[[], bool]) -> None:
    """Ray reports its free resources a moment late, and says nothing when it has."""
    import time

    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.real
@pytest.mark.usefixtures("machine")
def test_ray_gives_each_region_its_gpus_and_takes_them_back() -> None:
    import ray

    @ray.remote(num_cpus=1, num_gpus=1)
    def gpu() -> str:
        return str(ray.get_gpu_ids()[0])

    placement = place(layout(), deadline_s=60)
    assert [bundle.gpu_id for bundle in placement.bundles] == [str(n) for n in range(8)]
    (address,) = {bundle.address for bundle in placement.bundles}
    assert address == ray.util.get_node_ip_address()
    fleet = placement.region("eval")
    options = [{"scheduling_strategy": strategy(placement.group, b.index)} for b in fleet]
    assert ray.get([gpu.options(**o).remote() for o in options], timeout=60) == ["4", "5", "6", "7"]
    placement.remove()
    until(lambda: free_gpus() == 8)


@pytest.mark.real
@pytest.mark.usefixtures("machine")
def test_a_group_that_does_not_fit_ray_says_what_is_missing_and_leaves_nothing() -> None:
    said: list[str] = []
    with pytest.raises(PlacementError, match="the cluster holds 8: 1 more must be added"):
        place(layout(num=5), deadline_s=0.5, report_every_s=0.2, say=said.append)
    assert len(said) == 2
    place(layout(), deadline_s=60).remove()


@pytest.mark.real
@pytest.mark.usefixtures("machine")
def test_a_group_that_somebody_removes_while_it_is_waited_for_is_no_endless_wait() -> None:
    from ray.util.placement_group import remove_placement_group

    class Meddled(RayCluster):
        def create(self, bundles: list[dict[str, float]]) -> Any:
            self.group = super().create(bundles)
            return self.group

    cluster = Meddled()
    with pytest.raises(PlacementError, match="the placement group is gone"):
        place(
            layout(num=5),
            deadline_s=60,
            report_every_s=0.1,
            cluster=cluster,
            say=lambda _: remove_placement_group(cluster.group),
        )


@pytest.mark.real
@pytest.mark.usefixtures("machine")
def test_a_group_that_others_are_in_the_way_of_comes_when_they_have_gone() -> None:
    first = place(layout(num=1), deadline_s=60)
    until(lambda: free_gpus() == 3)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        first.remove()

    place(layout(), deadline_s=60, report_every_s=0.2, say=say).remove()
    assert "of the cluster's 8, 3 are free: others hold 5 too many" in said[0]
