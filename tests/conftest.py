"""What all tests share: the machine, what they inherit from whoever started them, and an engine."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from tests.standing import StandingEngine

settings.register_profile("vime", deadline=None)  # a busy machine is no failure
settings.load_profile("vime")

# A shell ignores Ctrl-C for what it starts in the background, and children inherit that: the
# programs that are interrupted here would rightly go on for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Folder or module → the group of its real tests, where that is not its folder: those of `fleet`
#: and `runner` share an engine, those of `ray` one of two clusters or none.
GROUPS = {
    "runner": "fleet",
    "test_cluster": "nodes",
    "test_driver_dies": "nodes",
    "test_lost_depots": "nodes",
    "test_example": "ray_example",
}

#: Groups whose real tests share nothing: any worker may take any of them.
APART = ("bench", "test_example_training")

#: The longest ones begin first, so that no worker is left with one at the end: the groups of real
#: tests, and the modules of slow ones.
LONGEST_FIRST = (
    *("fleet", "nodes", "test_example_training", "chaos", "examples", "ray_example", "processes"),
    *("ray", "bench"),
    *("test_demo_kills", "test_kills", "test_runs", "test_whole_runs", "test_benchmarks"),
    *("test_eval", "test_whole_run", "test_exports"),
)

# Collecting imports and rewrites hundreds of modules, and hardly anything of it is garbage.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage again, but never look through what is there by now."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def standing_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingEngine]:
    """A plain vLLM server; whoever asks for it ``running()`` may label it and end it."""
    from anyio.from_thread import start_blocking_portal

    from tests.standing import StandingEngine

    with start_blocking_portal() as portal:
        engine = StandingEngine(tmp_path_factory.mktemp("standing"), portal)
        yield engine
        engine.close()


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it is untyped
    """One worker runs all tests of a group: they share engines, or what a module has made."""

    def _split_scope(self, nodeid: str) -> str:
        real = self.config.option.markexpr == "real"
        group = _group(nodeid, real=real)
        return nodeid if real and group in APART else group


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """``--dist loadscope`` means these groups here."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest groups of real and slow tests first."""
    items.sort(key=_order)


def _group(nodeid: str, *, real: bool) -> str:
    """That of a real test is its folder, or where it goes instead; any other's is its module."""
    path = PurePosixPath(nodeid.partition("::")[0])
    folder = path.parent.name
    if not real or folder == "tests":
        return path.stem
    return GROUPS.get(path.stem) or GROUPS.get(folder, folder)


def _order(item: pytest.Item) -> int:
    real = item.get_closest_marker("real") is not None
    group = _group(item.nodeid, real=real)
    if not (real or item.get_closest_marker("slow")) or group not in LONGEST_FIRST:
        return len(LONGEST_FIRST)
    return LONGEST_FIRST.index(group)
