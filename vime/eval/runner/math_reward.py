"""The reward ``math``: whether two mathematical expressions mean the same, by math-verify."""

from __future__ import annotations

import importlib.util
from typing import Any

import anyio
import anyio.to_process

from vime.eval.runner.scoring import LabelError

#: Reading one expression, and comparing two, may each take so long; simplifying can take for ever.
STEP_TIMEOUT_S = 5

#: The whole of one answer; its process is ended then. The first one imports sympy.
TIMEOUT_S = 60.0


def require_math_verify() -> None:
    """Raises ``ValueError``: the package is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "--eval-reward math needs the package math-verify: pip install 'vime[math]'"
        )


class MathReward:
    """Compares in a process of its own: math-verify keeps its deadlines by signals, which only a
    main thread gets, and only a process can be ended for certain.
    """

    def __init__(self) -> None:
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def __call__(self, answer: str, label: Any) -> float:
        """1.0 when the answer's expression equals the label's, else 0.0.

        An answer that takes too long to compare is not taken for right.

        Raises:
            LabelError: there is no expression in the label.
        """
        async with self._one_at_a_time:
            with anyio.move_on_after(TIMEOUT_S):
                return await anyio.to_process.run_sync(equal, answer, str(label), cancellable=True)
        return 0.0


def equal(answer: str, label: str) -> float:
    """See :meth:`MathReward.__call__`; for a main thread only."""
    from math_verify import parse, verify

    gold = parse(_as_latex(label), parsing_timeout=STEP_TIMEOUT_S)
    if not gold:
        raise LabelError(f"the label {label!r:.100} holds no mathematical expression")
    mine = parse(answer, parsing_timeout=STEP_TIMEOUT_S)
    return float(verify(gold, mine, timeout_seconds=STEP_TIMEOUT_S))


def _as_latex(label: str) -> str:
    """math-verify reads LaTeX between dollars only, and labels are mostly bare."""
    marked = any(mark in label for mark in ("$", "\\boxed", "\\(", "\\["))
    return label if marked else f"${label}$"
