"""Fixtures of the snapshots' tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.snapshots import checkpoints
from vime.eval.snapshot.base import BaseSpec

__all__ = ["checkpoints"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(checkpoints: Path) -> BaseSpec:
    return BaseSpec.read(checkpoints / "base")


@pytest.fixture
def whole(checkpoints: Path, tmp_path: Path) -> Path:
    """A whole checkpoint of one's own, to be spoilt."""
    return Path(shutil.copytree(checkpoints / "whole", tmp_path / "whole"))
