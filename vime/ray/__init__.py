"""The collaborators of a run on a Ray cluster; nothing outside this package imports Ray.

Names are loaded when they are first asked for: workers on the nodes need few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.ray.detached import end_detached_fleet
    from vime.ray.dispatcher import RayEvalDispatcher
    from vime.ray.group import Placement, PlacementError, place
    from vime.ray.placement import PlacementLayout, placement_layout

_HOMES = {
    "Placement": "vime.ray.group",
    "PlacementError": "vime.ray.group",
    "PlacementLayout": "vime.ray.placement",
    "RayEvalDispatcher": "vime.ray.dispatcher",
    "end_detached_fleet": "vime.ray.detached",
    "place": "vime.ray.group",
    "placement_layout": "vime.ray.placement",
}

__all__ = [
    "Placement",
    "PlacementError",
    "PlacementLayout",
    "RayEvalDispatcher",
    "end_detached_fleet",
    "place",
    "placement_layout",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
