"""`docs/coverage.md`: every test that it names exists, and nothing that is promised is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from vime.eval.config.flags import FLAGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Pr")]
PROOF = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

#: The flags whose names and defaults are fixed, and those of a framework that vime reads.
PROMISED = {
    "--eval-num-gpus", "--eval-num-gpus-per-engine", "--eval-hf-dir", "--eval-max-in-flight",
    "--eval-overflow-policy", "--eval-keep-snapshots", "--eval-interval", "--eval-function-path",
    "--eval-prompt-data", "--vllm-config", "--prefill-num-servers",
    "--rollout-external-engine-addrs", "--save-hf", "--hf-checkpoint", "--colocate", "--ci-test",
}  # fmt: skip


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("row", ROWS)
def test_each_promise_names_a_test_that_exists(row: str) -> None:
    proofs = PROOF.findall(row)
    assert proofs, "a promise without a proof"
    for path, name in proofs:
        assert name.startswith("test_")
        assert name in names_in(path), f"{path} has no {name}"


def test_every_promised_flag_has_a_row_and_is_a_flag() -> None:
    assert len(ROWS) > 60
    assert {flag.name for flag in FLAGS} >= PROMISED
    told = {
        word for row in ROWS for word in re.findall(r"--[a-z][a-z-]+", row.split(" | `tests/")[0])
    }
    assert told >= PROMISED


def test_every_reason_that_vime_gives_has_a_row() -> None:
    for reason in ("busy", "superseded", "pin_violation", "unhealthy", "timeout_pin", "version_mixed", "crashed"):  # fmt: skip
        assert f"`{reason}`" in PAGE
