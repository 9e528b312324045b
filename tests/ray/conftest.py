"""Ray clusters for the real tests: all that they write goes with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


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


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """This machine as a Ray cluster of one node with eight logical GPUs."""
    import ray

    with ray_settings() as settings:
        ray.init(num_cpus=8, num_gpus=8, **settings)
        try:
            yield
        finally:
            ray.shutdown()
