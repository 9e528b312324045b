"""What ends the server that these tests share; this file's name makes it the last of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval.external_vllm_eval_fn import ExternalVllmEvalFn
from eval.vllm_server import VllmServer

from vime.rollout.base_types import RolloutFnEvalInput
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_a_server_that_fails_a_load_is_ended_and_the_point_skipped(
    external: ExternalVllmEvalFn, server: VllmServer, checkpoints: Path
) -> None:
    assert server.process is not None
    with pytest.raises(EvalSkip) as caught:
        await external.evaluate_checkpoint(checkpoints / "missing_layer", RolloutFnEvalInput(7))
    assert caught.value.reason == "pin_violation"
    assert "kept old weights in" in caught.value.detail
    assert external.server is None
    assert server.process.has_ended()
