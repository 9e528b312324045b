"""What all tests share: the machine, and what they inherit from whoever started them."""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("vime", deadline=None)  # a busy machine is no failure
settings.load_profile("vime")

# A shell ignores Ctrl-C for what it starts in the background, and children inherit that: the
# programs that are interrupted here would rightly go on for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: The longest ones begin first, so that neither of two workers is left with one at the end.
LONGEST_FIRST = ("fleet", "test_example_training", "chaos", "bench", "examples", "ray", "processes")


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it is untyped
    """One worker runs all tests of a folder: they share engines."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FolderScheduling | None:
    """``--dist loadscope`` means folders here."""
    return FolderScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest groups of real tests first."""
    items.sort(key=_order)


def _group(nodeid: str) -> str:
    """``fleet`` for a test in ``tests/fleet``, the module's name for one in ``tests`` itself."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.stem if path.parent.name == "tests" else path.parent.name


def _order(item: pytest.Item) -> int:
    group = _group(item.nodeid)
    if not item.get_closest_marker("real") or group not in LONGEST_FIRST:
        return len(LONGEST_FIRST)
    return LONGEST_FIRST.index(group)
