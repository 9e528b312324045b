"""Rewards: what an answer is worth, by exact match or by the user's own function."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread

from vime.eval.config import EvalConfig
from vime.eval.loading import load_object
from vime.rollout.checkpoint_eval import EvalSkip

#: ``await reward(answer, label)`` → a finite number, or :class:`RewardFailed`.
Reward = Callable[[str, Any], Awaitable[float]]


class RewardFailed(Exception):
    """A reward function raised, or returned something that is no finite number."""


def load_reward(config: EvalConfig) -> Reward:
    """The reward that ``config`` names: ``--custom-rm-path``, or exact match without it.

    A user's plain function is called on a worker thread, one call at a time, so that it may
    take its time and need not be thread-safe; a coroutine function is awaited, and several
    of its calls may be under way at once.

    Make a new one for each evaluation: a call that an earlier one abandoned at its deadline
    then holds nobody up.

    Raises:
        ValueError: the path cannot be imported, or is no callable.
    """
    if config.custom_rm_path is None:
        return _exact_match
    function = load_object("--custom-rm-path", config.custom_rm_path)
    if not callable(function):
        raise ValueError(
            f"--custom-rm-path {config.custom_rm_path}: a {type(function).__name__}; expected a "
            "function (answer, label) -> number"
        )
    return _custom(function)


def exact_match(answer: str, label: Any) -> float:
    """1.0 when both are the same text once white space around them is dropped, else 0.0.

    A label that is no text is compared by ``str(label)``.
    """
    return float(answer.strip() == str(label).strip())


async def _exact_match(answer: str, label: Any) -> float:
    return exact_match(answer, label)


def _custom(function: Callable[[str, Any], Any]) -> Reward:
    one_at_a_time = anyio.CapacityLimiter(1)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 -- asks what kind of call it is
    )

    async def reward(answer: str, label: Any) -> float:
        try:
            if is_async:
                value = await function(answer, label)
            else:
                value = await anyio.to_thread.run_sync(
                    functools.partial(function, answer, label),
                    abandon_on_cancel=True,
                    limiter=one_at_a_time,
                )
                if inspect.isawaitable(value):
                    value = await value
        except EvalSkip:  # the function's way to say that nothing here can be scored
            raise
        except Exception as error:
            raise RewardFailed(f"the reward raised {type(error).__name__}: {error}") from error
        return _number(value)

    return reward


def _number(value: Any) -> float:
    """``value`` as a float; numbers of numpy and torch count."""
    if hasattr(value, "__float__") or hasattr(value, "__index__"):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RewardFailed(f"the reward returned {value!r:.200}: expected a finite number")
