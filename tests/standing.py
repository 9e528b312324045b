"""A plain vLLM server that the tests of several folders ask, because a start takes half a minute."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from anyio.from_thread import BlockingPortal

from bench.plain_engine import PlainEngine, plain_engine
from tests.snapshots import TIED, write_checkpoint

API_KEY = "secret"
MODEL = "eval"
NUM_BLOCKS = 512
"""Of an engine's cache: three workers start seven engines at once, and a whole GiB for each is more
memory than some machines have."""

_WORDS = ("--served-model-name", MODEL, "--max-model-len", "256")
_WORDS += ("--num-gpu-blocks-override", str(NUM_BLOCKS))
_ENV = {"VLLM_API_KEY": API_KEY, "VLLM_SERVER_DEV_MODE": "1"}


class StandingEngine:
    """A server on ``checkpoint``; starts when it is first asked for, and again if it has died.

    Attributes:
        checkpoint: the tied model of seed 1.
    """

    def __init__(self, root: Path, portal: BlockingPortal) -> None:
        self.checkpoint = write_checkpoint(root / "whole", seed=1, **TIED)
        self._log_path = root / "engine.log"
        self._portal = portal
        self._stack = ExitStack()
        self._engine: PlainEngine | None = None

    def running(self) -> PlainEngine:
        if self._engine is None or self._engine.process.has_ended():
            self.close()
            manager = plain_engine(self.checkpoint, self._log_path, *_WORDS, env=_ENV)
            self._engine = self._stack.enter_context(
                self._portal.wrap_async_context_manager(manager)
            )
        return self._engine

    def wait(self) -> int:
        """Wait for its end, and that of its whole tree; returns the status."""
        assert self._engine is not None
        return self._portal.call(self._engine.process.wait)

    def close(self) -> None:
        self._stack.close()
