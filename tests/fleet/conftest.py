"""Fixtures of the fleet's tests: both event loops, virtual time, and a loop that must not block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio.testing
from blockbuster import blockbuster_ctx


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "asyncio":
        return "asyncio"
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("vime") as detector:
        for function in detector.functions.values():
            # A listing of /dev, when a supervisor is made: in production before its loop runs.
            function.can_block_in("vime/eval/fleet/devices.py", "visible_gpus")
        yield
