"""Deadlines that ranks keep while they wait for each other are looked at on every rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from vime.eval import ConfigError
from vime.eval.config.flags import value_of
from vime.eval.ranks.dispatcher import _check_deadlines


@pytest.mark.parametrize("value", [float("inf"), 1e20, "soon"])
def test_a_deadline_that_is_none_is_told_before_a_rank_waits(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_deadlines(value_of(Namespace(eval_start_timeout=value, eval_timeout=value)))
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"--eval-start-timeout {value!r}: expected a number of at least 0.001"
    )
    _check_deadlines(value_of(Namespace()))
