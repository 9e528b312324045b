"""trio's virtual clock, without the rest of ``trio.testing``: that loads pytest where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio.testing import MockClock, wait_all_tasks_blocked
else:
    try:
        from trio._core import MockClock, wait_all_tasks_blocked
    except ImportError:  # another trio: only the public names are promised
        from trio.testing import MockClock, wait_all_tasks_blocked

__all__ = ["MockClock", "wait_all_tasks_blocked"]
