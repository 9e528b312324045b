"""A real engine loads what two ranks have written together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import run


@pytest.mark.real
def test_an_engine_serves_the_weights_of_both_ranks_and_proves_it(tmp_path: Path) -> None:
    first, second = run("engine", tmp_path)
    assert first == second
    assert [row[:2] for row in first] == [["done", None], ["done", None]]
    assert len({row[2] for row in first}) == 2
