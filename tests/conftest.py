"""What all tests share: the machine, and what they inherit from whoever started them."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("vime", deadline=None)  # a busy machine is no failure
settings.load_profile("vime")

# A shell ignores Ctrl-C for what it starts in the background, and children inherit that: the
# programs that are interrupted here would rightly go on for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: The longest ones begin first, so that neither of two workers is left with one at the end.
LONGEST_FIRST = ("fleet", "test_example_training", "chaos", "bench", "examples", "ray", "processes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of one folder, which share engines, to one worker."""
    real = [item for item in items if item.get_closest_marker("real")]
    for item in real:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_order)


def _group(item: pytest.Item) -> str:
    folder = item.path.parent.name
    return item.path.stem if folder == "tests" else folder


def _order(item: pytest.Item) -> int:
    if not item.get_closest_marker("real") or _group(item) not in LONGEST_FIRST:
        return len(LONGEST_FIRST)
    return LONGEST_FIRST.index(_group(item))
