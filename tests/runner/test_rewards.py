from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import numpy as np
import pytest

from vime.eval.config import EvalConfig
from vime.eval.runner import math_reward
from vime.eval.runner.rewards import RewardFailed, load_reward, load_rewards
from vime.eval.runner.scoring import exact_match
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


def returns_many(answer: str, label: Any) -> Any:
    return {"score": 0.25, "right": True, "why": "because"}


@pytest.mark.parametrize(("key", "worth"), [("score", 0.25), ("right", 1.0)])
async def test_one_number_of_a_mapping_counts(key: str, worth: float) -> None:
    path = f"{__name__}.returns_many"
    assert await load_reward(EvalConfig(custom_rm_path=path, reward_key=key))("", 1) == worth


@pytest.mark.parametrize("key", [None, "scores", "why"])
async def test_a_mapping_without_a_number_under_the_key_fails(key: str | None) -> None:
    path = f"{__name__}.returns_many"
    with pytest.raises(RewardFailed, match="expected a finite number"):
        await load_reward(EvalConfig(custom_rm_path=path, reward_key=key))("", 1)


@pytest.mark.parametrize(
    ("name", "answer", "label", "worth"),
    [
        ("exact", " 4 ", 4, 1.0),
        ("choice", "The answer is (B)", 1, 1.0),
        ("numeric", "so 4.0", "4", 1.0),
        ("f1", "the cat", "cat", 1.0),
        ("regex", "a4b", r"\d", 1.0),
        ("math", r"hence $x = \frac{1}{2}$", "0.5", 1.0),
        ("math", r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        ("math", "I do not know", "7", 0.0),
    ],
)
async def test_each_stock_reward_has_its_name(
    name: str, answer: str, label: Any, worth: float
) -> None:
    assert await load_reward(EvalConfig(reward=name))(answer, label) == worth


@pytest.mark.parametrize(("name", "label"), [("choice", "?"), ("numeric", "x"), ("math", "")])
async def test_a_label_that_cannot_be_compared_with_is_a_failed_reward(
    name: str, label: Any
) -> None:
    with pytest.raises(RewardFailed, match="the label"):
        await load_reward(EvalConfig(reward=name))("4", label)


async def test_math_that_takes_too_long_is_ended_with_its_process_and_worth_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(math_reward, "TIMEOUT_S", 0.05)
    assert await load_reward(EvalConfig(reward="math"))("$1$", "1") == 0.0


async def test_a_missing_package_of_math_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vime\[math\]'"):
        load_reward(EvalConfig(reward="math"))


class Batches:
    """Scores by length; the first call waits until it is let go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = anyio.Event()

    async def __call__(self, answers: list[str], labels: list[Any]) -> list[float]:
        self.sizes.append(len(answers))
        await self.gate.wait()
        assert all(
            label == f"label of {answer}" for answer, label in zip(answers, labels, strict=True)
        )
        return [float(len(answer)) for answer in answers]


batches = Batches()


def batch_reward_of(name: str, size: int) -> Any:
    return load_reward(EvalConfig(custom_rm_path=f"{__name__}.{name}"), batch_size=size)


async def test_a_batched_function_gets_what_has_gathered_meanwhile_and_each_answer_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Batches()
    monkeypatch.setitem(globals(), "batches", own)
    reward, worth = batch_reward_of("batches", 4), {}

    async def one(answer: str) -> None:
        worth[answer] = await reward(answer, f"label of {answer}")

    answers = ["x" * n for n in range(10)]
    async with anyio.create_task_group() as tasks:
        for answer in answers:
            tasks.start_soon(one, answer)
        await anyio.wait_all_tasks_blocked()
        own.gate.set()
    assert worth == {answer: float(len(answer)) for answer in answers}
    assert sum(own.sizes) == len(answers)
    assert max(own.sizes) == 4
    assert len(own.sizes) == 3


def sync_batch(answers: list[str], labels: list[Any]) -> Any:
    return np.array([len(answer) for answer in answers])


def too_few(answers: list[str], labels: list[Any]) -> Any:
    return [1.0] * (len(answers) + 1)


def no_list(answers: list[str], labels: list[Any]) -> Any:
    return 1.0


async def test_a_plain_batched_function_may_return_an_array() -> None:
    assert await batch_reward_of("sync_batch", 8)("four", 0) == 4.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", "returned 2 numbers for a batch of 1 answers"),
        ("no_list", "returned 1.0: expected a list of 1 numbers"),
        ("raises", "raised KeyError"),
    ],
)
async def test_what_a_batch_does_wrong_fails_its_answers(name: str, said: str) -> None:
    with pytest.raises(RewardFailed, match=said):
        await batch_reward_of(name, 2)("", 0)


async def test_sets_that_share_a_function_share_its_turns_and_others_have_their_own(
    tmp_path: Path,
) -> None:
    config = EvalConfig(
        prompt_data=(("a", tmp_path), ("b", tmp_path), ("c", tmp_path)),
        custom_rm_path=f"{__name__}.length",
        dataset_overrides={"c": {"reward": "f1"}},
    )
    rewards = load_rewards(config)
    assert rewards["a"] is rewards["b"]
    assert await rewards["a"]("four", 0) == 4.0
    assert await rewards["c"]("four", "four") == 1.0
