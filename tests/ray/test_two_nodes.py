"""What holds on a cluster of two nodes, which share one address here."""

from __future__ import annotations

from argparse import Namespace

import pytest

from vime.ray.group import place
from vime.ray.placement import placement_layout

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("two_nodes")]


def test_the_bundles_of_one_node_are_neighbours() -> None:
    flags = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "eval_num_gpus": 4}
    placement = place(placement_layout(Namespace(**flags)), deadline_s=60)
    assert [bundle.gpu_id for bundle in placement.bundles] == ["0", "1", "2", "3"] * 2
    assert [len({b.node_id for b in engine}) for engine in placement.engines("eval", 4)] == [1]
    assert len({bundle.node_id for bundle in placement.bundles}) == 2
    placement.remove()
