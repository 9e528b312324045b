"""Rewards: what an answer is worth, by a stock formula or by the user's own function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread

from vime.eval.config import EvalConfig
from vime.eval.config.datasets import DatasetSettings
from vime.eval.loading import load_object
from vime.eval.runner.scoring import LabelError, choice, exact_match, f1, numeric, regex
from vime.rollout.checkpoint_eval import EvalSkip

#: ``await reward(answer, label)`` → a finite number, or :class:`RewardFailed`.
Reward = Callable[[str, Any], Awaitable[float]]

_STOCK: Mapping[str, Callable[[str, Any], float]] = {
    "exact": exact_match,
    "choice": choice,
    "numeric": numeric,
    "f1": f1,
    "regex": regex,
}


class RewardFailed(Exception):
    """A reward function raised, or returned something that is no finite number."""


def load_rewards(config: EvalConfig) -> dict[str, Reward]:
    """The reward of each eval set: ``--custom-rm-path``, or the one that ``--eval-reward`` names.

    A user's plain function is called on a worker thread, one call at a time, so that it may
    take its time and need not be thread-safe, also where several sets have it; a coroutine
    function is awaited, and several of its calls may be under way at once.

    Make new ones for each evaluation: a call that an earlier one abandoned at its deadline
    then holds nobody up.

    Raises:
        ValueError: a path cannot be imported, or is no callable; a package is missing.
    """
    made: dict[tuple[str | None, str, str | None], Reward] = {}
    rewards = {}
    for settings in config.datasets:
        key = (settings.custom_rm_path, settings.reward, settings.reward_key)
        if key not in made:
            made[key] = load_reward(settings, config.reward_batch_size)
        rewards[settings.name] = made[key]
    return rewards


def load_reward(settings: EvalConfig | DatasetSettings, batch_size: int = 1) -> Reward:
    """One reward; see :func:`load_rewards`.

    Args:
        settings: ``custom_rm_path``, ``reward`` and ``reward_key`` say which.
        batch_size: above 1 the user's function takes lists of up to so many.

    Raises:
        ValueError: the path cannot be imported, or is no callable; a package is missing.
    """
    path = settings.custom_rm_path
    if path is None:
        return _stock(settings.reward)
    function = load_object("--custom-rm-path", path)
    if not callable(function):
        raise ValueError(
            f"--custom-rm-path {path}: a {type(function).__name__}; expected a "
            "function (answer, label) -> number"
        )
    call = _off_the_loop(function)
    number = functools.partial(_number, key=settings.reward_key)
    return _custom(call, number) if batch_size == 1 else Batched(call, number, batch_size)


def _stock(name: str) -> Reward:
    if name == "math":
        from vime.eval.runner.math_reward import MathReward, require_math_verify

        require_math_verify()
        return _checked(MathReward())
    formula = _STOCK[name]

    async def compare(answer: str, label: Any) -> float:
        return formula(answer, label)

    return _checked(compare)


def _checked(compare: Reward) -> Reward:
    async def reward(answer: str, label: Any) -> float:
        try:
            return await compare(answer, label)
        except (LabelError, anyio.BrokenWorkerProcess) as error:
            raise RewardFailed(str(error) or type(error).__name__) from error

    return reward


_Call = Callable[[Any, Any], Awaitable[Any]]


def _off_the_loop(function: Callable[[Any, Any], Any]) -> _Call:
    """Awaits a coroutine function; calls a plain one on a thread, one call at a time."""
    one_at_a_time = anyio.CapacityLimiter(1)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 -- asks what kind of call it is
    )

    async def call(answer: Any, label: Any) -> Any:
        if is_async:
            return await function(answer, label)
        value = await anyio.to_thread.run_sync(
            functools.partial(function, answer, label),
            abandon_on_cancel=True,
            limiter=one_at_a_time,
        )
        return await value if inspect.isawaitable(value) else value

    async def named(answer: Any, label: Any) -> Any:
        try:
            return await call(answer, label)
        except EvalSkip:  # the function's way to say that nothing here can be scored
            raise
        except Exception as error:
            raise RewardFailed(f"the reward raised {type(error).__name__}: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody has cancelled this evaluation: passed on, it would end a worker unseen.
            raise RewardFailed("the reward awaited something that was cancelled") from error

    return named


def _custom(call: _Call, number: Callable[[Any], float]) -> Reward:
    async def reward(answer: str, label: Any) -> float:
        return number(await call(answer, label))

    return reward


class _Waiting:
    """One answer of a batch, and what became of it."""

    def __init__(self, answer: str, label: Any) -> None:
        self.answer = answer
        self.label = label
        self.value: Any = None
        self.failure: RewardFailed | None = None
        self.is_done = False


class Batched:
    """A reward whose function takes lists: ``(answers, labels) -> one number for each``.

    While one call is under way the next batch gathers; whoever's turn it is takes it along.
    What such a call raises fails every answer of its batch.

    Args:
        call: the function.
        number: makes the reward of one of its values.
        size: most answers of a batch.
    """

    def __init__(self, call: _Call, number: Callable[[Any], float], size: int) -> None:
        self._call = call
        self._number = number
        self._size = size
        self._waiting: list[_Waiting] = []
        self._turn = anyio.Lock()

    async def __call__(self, answer: str, label: Any) -> float:
        """The reward of one answer."""
        mine = _Waiting(answer, label)
        self._waiting.append(mine)
        async with self._turn:
            if not mine.is_done:
                await self._score(mine)
        if mine.failure is not None:
            raise RewardFailed(str(mine.failure))
        return self._number(mine.value)

    async def _score(self, first: _Waiting) -> None:
        """One call, for ``first`` and those that wait behind it."""
        start = self._waiting.index(first)
        batch = self._waiting[start : start + self._size]
        del self._waiting[start : start + self._size]
        for item in batch:
            item.is_done = True
        try:
            values = await self._call([i.answer for i in batch], [i.label for i in batch])
            for item, value in zip(batch, _as_list(values, len(batch)), strict=True):
                item.value = value
        except RewardFailed as failure:
            for item in batch:
                item.failure = failure


def _as_list(values: Any, expected: int) -> list[Any]:
    try:
        found = list(values)
    except TypeError:
        raise RewardFailed(
            f"the reward returned {values!r:.200}: expected a list of {expected} numbers"
        ) from None
    if len(found) != expected:
        raise RewardFailed(
            f"the reward returned {len(found)} numbers for a batch of {expected} answers"
        )
    return found


def _number(value: Any, key: str | None) -> float:
    """``value`` as a float; numbers of numpy and torch count, and those under ``key``."""
    if isinstance(value, Mapping):
        if key not in value:
            raise RewardFailed(
                f"the reward returned {value!r:.200}: expected a finite number, or one under a key "
                f"that --eval-reward-key names (it is {key})"
            )
        value = value[key]
    if hasattr(value, "__float__") or hasattr(value, "__index__"):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RewardFailed(f"the reward returned {value!r:.200}: expected a finite number")
