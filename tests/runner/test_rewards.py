from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import numpy as np
import pytest

from vime.eval.config import EvalConfig
from vime.eval.runner.rewards import RewardFailed, exact_match, load_reward
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio


def length(answer: str, label: Any) -> int:
    return len(answer) - label


async def later(answer: str, label: Any) -> bool:
    await anyio.lowlevel.checkpoint()
    return answer == label


class Judge:
    async def __call__(self, answer: str, label: Any) -> float:
        return 0.5


judge = Judge()
not_callable = 3


def returns_its_label(answer: str, label: Any) -> Any:
    return label


def returns_an_awaitable(answer: str, label: Any) -> Any:
    return later(answer, label)


def raises(answer: str, label: Any) -> float:
    raise KeyError("unparsable")


def skips(answer: str, label: Any) -> float:
    raise EvalSkip("judge_down", "no judge today")


class Gate:
    """Holds calls of `waits` until it is opened, and tells who came."""

    def __init__(self) -> None:
        self.entered = anyio.Event()
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []


def waits(answer: str, gate: Gate) -> float:
    gate.threads.append(threading.current_thread())
    anyio.from_thread.run_sync(gate.entered.set)
    gate.opened.wait()
    return 1


def reward_of(name: str) -> Any:
    return load_reward(EvalConfig(custom_rm_path=f"{__name__}.{name}"))


@pytest.mark.parametrize(
    ("answer", "label", "worth"),
    [(" 4\n", "4", 1), ("4", 4, 1), ("4", " 4 ", 1), ("4.0", 4, 0), ("", "4", 0), ("a", "A", 0)],
)
async def test_exact_match_compares_texts_without_the_space_around_them(
    answer: str, label: Any, worth: float
) -> None:
    assert exact_match(answer, label) == worth
    assert await load_reward(EvalConfig())(answer, label) == worth


async def test_a_function_a_coroutine_and_a_callable_object_are_called_alike() -> None:
    assert await reward_of("length")("four", 1) == 3.0
    assert await reward_of("later")("a", "a") == 1.0
    assert await reward_of("judge")("a", "a") == 0.5
    assert await reward_of("returns_an_awaitable")("a", "b") == 0.0


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(3), np.bool_(True)])
async def test_any_finite_number_is_a_reward(value: Any) -> None:
    worth = await reward_of("returns_its_label")("", value)
    assert type(worth) is float
    assert worth == float(value)


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1], {}, 10**400])
async def test_what_is_no_finite_number_fails_and_is_shown(value: Any) -> None:
    with pytest.raises(RewardFailed, match="expected a finite number"):
        await reward_of("returns_its_label")("", value)


async def test_an_exception_of_the_reward_is_named() -> None:
    with pytest.raises(RewardFailed, match="raised KeyError: 'unparsable'"):
        await reward_of("raises")("", 1)


async def test_a_reward_may_skip_the_point() -> None:
    with pytest.raises(EvalSkip, match="judge_down: no judge today"):
        await reward_of("skips")("", 1)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no.such.module.f", "importing 'no.such.module' failed"),
        (f"{__name__}.missing", "has no 'missing'"),
        (f"{__name__}.not_callable", "a int; expected a function"),
        ("nodots", "expected a dotted path"),
    ],
)
async def test_a_path_that_names_no_function_is_a_clear_error(path: str, said: str) -> None:
    with pytest.raises(ValueError, match="--custom-rm-path") as caught:
        load_reward(EvalConfig(custom_rm_path=path))
    assert said in str(caught.value)


async def test_a_plain_function_runs_off_the_loop_and_one_call_at_a_time() -> None:
    reward, gate = reward_of("waits"), Gate()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(reward, "", gate)
        await gate.entered.wait()
        await anyio.wait_all_tasks_blocked()
        assert len(gate.threads) == 1
        gate.opened.set()
    assert len(gate.threads) == 4
    assert threading.main_thread() not in gate.threads


async def test_a_blocking_reward_gives_way_to_a_deadline_and_the_next_evaluation_is_free() -> None:
    gate = Gate()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reward_of("waits"), "", gate)
            await gate.entered.wait()
            tasks.cancel_scope.cancel()
        assert await reward_of("length")("four", 0) == 4.0
    finally:
        gate.opened.set()
