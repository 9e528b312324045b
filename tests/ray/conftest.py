"""Ray clusters for the real tests: all that they write goes with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ray.clusters import Nodes


@contextmanager
def ray_settings() -> Iterator[dict[str, Any]]:
    """Arguments for ``ray.init``; nothing of Ray's is written anywhere else."""
    from ray._private.authentication import authentication_token_setup

    # Paths of Unix sockets may have 107 characters: pytest's own directories are too deep.
    directory = tempfile.mkdtemp(prefix="vr-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", directory)  # a Cluster writes there, whatever it is told
        Path(directory, "ray").mkdir()
        patch.setenv("RAY_AUTH_TOKEN", "of-these-tests")  # else Ray writes one into ~/.ray
        patch.setenv("RAY_AUTH_MODE", "")  # Ray sets it, and it goes with the other ones
        patch.delenv("RAY_AUTH_MODE")
        authentication_token_setup.enable_token_auth_by_default()  # a Cluster forgets to
        patch.setenv("RAY_health_check_period_ms", "500")  # five in a row tell of a dead node
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            yield {
                "include_dashboard": False,
                "log_to_driver": False,
                "_temp_dir": directory,
            }
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    assert not Path(directory).exists()


class OneAtATime:
    """The cluster whose driver this process is: one stays until another one is needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._kind: Any = None
        self._value: Any = None

    def use(self, kind: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The cluster that this function makes."""
        if self._kind is not kind:
            self.close()
            self._value = self._stack.enter_context(kind())
            self._kind = kind
        return self._value

    def close(self) -> None:
        self._kind = self._value = None
        self._stack.close()


@contextmanager
def machine_cluster() -> Iterator[None]:
    import ray

    with ray_settings() as settings:
        ray.init(num_cpus=8, num_gpus=8, **settings)
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[OneAtATime]:
    clusters = OneAtATime()
    yield clusters
    clusters.close()


@pytest.fixture(scope="module")
def machine(one_cluster: OneAtATime) -> None:
    """This machine as a Ray cluster of one node with eight logical GPUs."""
    one_cluster.use(machine_cluster)


@pytest.fixture(scope="module")
def cluster(one_cluster: OneAtATime) -> Nodes:
    """A head without GPUs, where this process is, and nodes with one each: at least three."""
    from tests.ray.clusters import nodes

    found: Nodes = one_cluster.use(nodes)
    found.fill_up(3)
    return found
