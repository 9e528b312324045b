"""Training actors as exporters: which objects count as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vime.ray.exporters import RayExporter, handles_of


class Method:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *args: Any) -> str:
        self.calls.append(args)
        return f"ref {len(self.calls)}"


class Handle:
    def __init__(self) -> None:
        self.export_hf = Method()


class Group:
    """As groups of training actors in RL frameworks look."""

    def __init__(self, handles: list[Handle]) -> None:
        self._actor_handlers = handles


def test_an_actors_handle_a_list_of_ranks_and_a_group_of_them_are_exporters() -> None:
    ranks = [Handle(), Handle()]
    assert handles_of(ranks[0]) == ranks[:1]
    assert handles_of(ranks) == handles_of(tuple(ranks)) == handles_of(Group(ranks)) == ranks


@pytest.mark.parametrize("other", [(object(), object()), [], [Handle(), object()], print, None])
def test_anything_else_is_none(other: Any) -> None:
    assert handles_of(other) is None


def test_every_rank_is_asked_at_once_and_nobody_waits() -> None:
    ranks = [Handle(), Handle()]
    RayExporter(ranks).capture(7, Path("/staging/step_7.0"))
    assert [rank.export_hf.calls for rank in ranks] == [[(7, "/staging/step_7.0")]] * 2
