"""The docs' page of promises names tests that are really there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/\S+?\.py)::(\w+)`", PAGE)))


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_a_promise_names_is_there(path: str, name: str) -> None:
    assert name in names_in(path)


def test_every_row_names_a_test() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| Promise")
    ]
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row] == []
