from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.runner.conftest import VERSION, write_tokenizer
from tests.runner.engine_double import EngineDouble, answer, status
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.runner.stock import StockEvaluation
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio

MakeConfig = Callable[..., EvalConfig]


def encoded(text: str) -> list[int]:
    """The tokens of an ASCII text under the byte-level tokenizer of these tests."""
    return [ord(c) - 33 if c != " " else 220 for c in text]


def says(*texts: str) -> Callable[[list[int], int], list[int]]:
    """Answers by the prompt's last character, a digit: that one of ``texts``."""
    return lambda tokens, seed: [*encoded(texts[tokens[-1] + 33 - ord("0")]), 257]


def rows_of(output: EvalOutput) -> list[dict[str, Any]]:
    assert output.samples_path is not None
    return [json.loads(line) for line in output.samples_path.read_bytes().splitlines()]


async def test_a_set_is_asked_scored_and_every_sample_written(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble(api_key="secret")
    engine.answer = says("four", "five")
    config = make_config(
        [{"input": "q0", "label": "four"}, {"input": "q1", "label": "six"}],
        n_samples_per_prompt=2,
        temperature=1.0,
    )
    stock = StockEvaluation(config, tmp_path / "run", engine.connect)
    output = await stock.evaluate(point, snapshot, proof)

    assert output.metrics["eval/toy"] == 0.5
    assert output.metrics["eval/toy/stderr"] == 0.5
    assert output.metrics["eval/toy/pass@1"] == output.metrics["eval/toy/pass@2"] == 0.5
    assert output.metrics["eval/toy/response_len/mean"] == 5.0
    assert output.metrics["eval/toy/truncated_ratio"] == 0.0
    assert output.metrics["eval/toy/failed_ratio"] == 0.0
    assert output.metrics["eval/toy/weight_version/mixed_ratio"] == 0.0
    assert output.metrics["eval/toy/tokens_per_second"] > 0
    assert output.detail["num_samples"] == 4

    assert output.samples_path == tmp_path / "run" / "samples" / "step_1.jsonl"
    rows = rows_of(output)
    assert [(r["prompt_index"], r["sample_index"]) for r in rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    first = rows[0]
    assert (first["dataset"], first["prompt"], first["label"]) == ("toy", "q0", "four")
    assert (first["output"], first["reward"], first["finish_reason"]) == ("four", 1.0, "stop")
    assert first["output_token_ids"] == [*encoded("four"), 257]
    assert first["weight_version"] == VERSION
    assert first["failure"] is None
    seeds = [request["sampling_params"]["seed"] for request in engine.requests]
    assert sorted(seeds) == sorted(row["seed"] for row in rows)
    assert len(set(seeds)) == 4


async def test_the_same_evaluation_twice_gives_the_same_samples(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    config = make_config(
        [{"input": f"q{i}", "label": ""} for i in range(20)],
        n_samples_per_prompt=3,
        temperature=1.0,
        concurrency=7,
    )
    files = []
    for run in ("a", "b"):
        stock = StockEvaluation(config, tmp_path / run, EngineDouble().connect)
        output = await stock.evaluate(point, snapshot, proof)
        assert output.samples_path is not None
        files.append(output.samples_path.read_bytes())
    assert files[0] == files[1]


async def test_no_more_requests_than_allowed_are_in_flight(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.hold = anyio.Event()
    config = make_config([{"input": f"q{i}", "label": ""} for i in range(40)], concurrency=6)
    stock = StockEvaluation(config, tmp_path, engine.connect)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stock.evaluate, point, snapshot, proof)
        while engine.busiest < 6:
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        assert engine.busiest == 6
        engine.hold.set()
    assert len(engine.requests) == 40
    assert engine.busiest == 6


async def test_chat_messages_go_through_the_snapshots_template(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    messages = [{"role": "user", "content": "hi"}]
    config = make_config([{"input": messages, "label": ""}])
    output = await StockEvaluation(config, tmp_path, engine.connect).evaluate(
        point, snapshot, proof
    )
    assert engine.requests[0]["token_ids"] == [256, *encoded("user:hi;assistant:")]
    assert rows_of(output)[0]["prompt"] == messages


async def test_samples_that_fail_are_counted_named_and_score_zero(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.answer = says("yes", "raise")
    rows = [
        {"input": "q0", "label": "yes"},
        {"input": "q" * 300 + "0", "label": "yes"},
        {"input": "q1", "label": "yes"},
        {"input": [{"role": "user", "content": "q0"}], "label": "yes"},
    ]
    config = make_config(rows, custom_rm_path=f"{__name__}.picky", concurrency=1)
    bare = tmp_path / "bare"
    write_tokenizer(bare, chat=False)
    output = await StockEvaluation(config, tmp_path, engine.connect).evaluate(
        point, Snapshot(1, bare, VERSION, "abc", owned=True), proof
    )
    assert output.metrics["eval/toy"] == 0.25
    assert output.metrics["eval/toy/failed_ratio"] == 0.75
    assert output.metrics["eval/toy/response_len/mean"] == 5.0  # of the two that were answered
    assert output.detail["num_failed"] == 3
    long, raised, chat = output.detail["failures"]
    assert long.startswith("toy prompt 1 sample 0: HTTP 400: The decoder prompt (length 301)")
    assert raised == "toy prompt 2 sample 0: the reward raised ValueError: cannot score 'raise'"
    assert chat.startswith("toy prompt 3 sample 0: the prompt is chat messages, and")
    written = rows_of(output)
    assert [row["output"] for row in written] == ["yes", None, "raise", None]
    assert [row["reward"] for row in written] == [1.0, 0.0, 0.0, 0.0]


def picky(output: str, label: str) -> float:
    if output == "raise":
        raise ValueError(f"cannot score {output!r}")
    return float(output == label)


@pytest.mark.parametrize("batch_size", [1, 2])
async def test_a_reward_that_awaits_what_was_cancelled_fails_its_sample_and_no_other(
    make_config: MakeConfig,
    tmp_path: Path,
    point: EvalPoint,
    snapshot: Snapshot,
    proof: PinProof,
    batch_size: int,
) -> None:
    engine = EngineDouble()
    engine.answer = says("yes", "cancelled")
    config = make_config(
        [{"input": "q1", "label": "yes"}, {"input": "q0", "label": "yes"}],
        custom_rm_path=f"{__name__}.{'judge' if batch_size == 1 else 'judges'}",
        reward_batch_size=batch_size,
        concurrency=1,
    )
    stock = StockEvaluation(config, tmp_path, engine.connect)
    output = await stock.evaluate(point, snapshot, proof)
    assert (output.metrics["eval/toy"], output.metrics["eval/toy/failed_ratio"]) == (0.5, 0.5)
    (failure,) = output.detail["failures"]
    assert failure.endswith("the reward awaited something that was cancelled")


async def judge(output: str, label: str) -> float:
    if output == "cancelled":
        lost: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        lost.cancel()
        return await lost
    return float(output == label)


async def judges(outputs: list[str], labels: list[str]) -> list[float]:
    return [await judge(*pair) for pair in zip(outputs, labels, strict=True)]


async def test_samples_that_a_worker_gave_up_leave_no_score(
    make_config: MakeConfig,
    tmp_path: Path,
    point: EvalPoint,
    snapshot: Snapshot,
    proof: PinProof,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fill(self: Any, sample: Any) -> None:
        if sample.prompt_index == 1:
            raise asyncio.CancelledError

    monkeypatch.setattr("vime.eval.runner.stock._Asker.fill", fill)
    config = make_config([{"input": "q0", "label": "yes"}] * 3, concurrency=1)
    stock = StockEvaluation(config, tmp_path, EngineDouble().connect)
    with pytest.raises(RuntimeError, match="2 of 3 samples were given up half-way"):
        await stock.evaluate(point, snapshot, proof)


async def test_a_set_of_which_every_sample_failed_has_no_score(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    config = make_config(
        [{"input": "q0", "label": ""}] * 3, custom_rm_path=f"{__name__}.always_raises"
    )
    stock = StockEvaluation(config, tmp_path, EngineDouble().connect)
    with pytest.raises(EvalSkip) as caught:
        await stock.evaluate(point, snapshot, proof)
    assert caught.value.reason == "crashed"
    assert "every sample of toy failed" in caught.value.detail
    assert "the reward raised LookupError: always" in caught.value.detail
    assert (tmp_path / "samples" / "step_1.jsonl").is_file()


def always_raises(output: str, label: str) -> float:
    raise LookupError("always")


async def test_one_answer_of_other_weights_ends_the_evaluation_and_leaves_no_score(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.faults = [lambda request: None] * 5
    engine.faults.append(lambda request: (200, answer([5, 257], "default")))
    config = make_config([{"input": f"q{i}", "label": ""} for i in range(200)], concurrency=2)
    stock = StockEvaluation(config, tmp_path, engine.connect)
    with pytest.raises(EvalSkip) as caught:
        await stock.evaluate(point, snapshot, proof)
    assert caught.value.reason == "version_mixed"
    assert caught.value.detail.startswith("toy prompt ")
    assert "generated by weights 'default'; expected 'run:1:abc'" in caught.value.detail
    assert len(engine.requests) < 20
    assert not (tmp_path / "samples").exists()


async def test_a_fleet_that_is_gone_ends_the_evaluation(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.faults = [status(401)] * 10
    config = make_config([{"input": "q0", "label": ""}] * 5)
    with pytest.raises(EvalSkip, match=r"unhealthy: toy prompt .*HTTP 401"):
        await StockEvaluation(config, tmp_path, engine.connect).evaluate(point, snapshot, proof)


async def test_several_sets_are_asked_together_and_scored_apart(
    tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.answer = says("a", "b")
    for name, label in (("one", "a"), ("two", "b")):
        (tmp_path / name).write_text(json.dumps({"input": "q0", "label": label}))
    config = EvalConfig(prompt_data=(("one", tmp_path / "one"), ("two", tmp_path / "two")))
    output = await StockEvaluation(config, tmp_path, engine.connect).evaluate(
        point, snapshot, proof
    )
    assert (output.metrics["eval/one"], output.metrics["eval/two"]) == (1.0, 0.0)


async def test_a_base_evaluation_and_step_0_do_not_share_a_samples_file(
    make_config: MakeConfig, tmp_path: Path, snapshot: Snapshot, proof: PinProof
) -> None:
    config = make_config([{"input": "q0", "label": ""}])
    stock = StockEvaluation(config, tmp_path, EngineDouble().connect)
    for point in (EvalPoint(0, hf_dir=snapshot.path), EvalPoint(0)):
        await stock.evaluate(point, snapshot, proof)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == [f"step_0-{snapshot.digest[:12]}.jsonl", "step_0.jsonl"]


async def test_a_snapshot_without_a_tokenizer_uses_the_base_checkpoints(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    (tmp_path / "empty").mkdir()
    bare = Snapshot(1, tmp_path / "empty", VERSION, "abc", owned=True)
    rows = [{"input": "q0", "label": ""}]
    config = make_config(rows, hf_checkpoint=snapshot.path)
    output = await StockEvaluation(config, tmp_path, EngineDouble().connect).evaluate(
        point, bare, proof
    )
    assert output.metrics["eval/toy/failed_ratio"] == 0.0
    lone = StockEvaluation(make_config(rows), tmp_path, EngineDouble().connect)
    with pytest.raises(ValueError, match="empty: no tokenizer files in it, nor in --hf-check"):
        await lone.evaluate(point, bare, proof)


async def test_a_tokenizer_that_changes_between_snapshots_is_noticed_an_equal_one_is_kept(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    stock = StockEvaluation(
        make_config([{"input": [{"role": "user", "content": "q0"}], "label": ""}]),
        tmp_path,
        engine.connect,
    )
    same = shutil.copytree(snapshot.path, tmp_path / "same")
    other = shutil.copytree(snapshot.path, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    encoders = []
    for path in (snapshot.path, same, other):
        await stock.evaluate(point, Snapshot(1, path, VERSION, "abc", owned=True), proof)
        assert stock._prompts is not None
        encoders.append(stock._prompts.get(path))
    assert encoders[0] is encoders[1]
    assert engine.requests[0]["token_ids"] == engine.requests[1]["token_ids"]
    assert engine.requests[2]["token_ids"] == encoded("q0")


async def test_what_was_loaded_for_the_first_evaluation_is_not_looked_through_for_garbage(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    stock = StockEvaluation(
        make_config([{"input": "q0", "label": ""}]), tmp_path, EngineDouble().connect
    )
    gc.unfreeze()
    try:
        await stock.evaluate(point, snapshot, proof)
        assert gc.isenabled()
        assert not any(found is stock._prompts for found in gc.get_objects())
    finally:
        gc.freeze()  # as it is during all tests


async def test_a_broken_tokenizer_is_named(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, proof: PinProof
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    broken = Snapshot(1, tmp_path, VERSION, "abc", owned=True)
    config = make_config([{"input": "q0", "label": ""}])
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        await StockEvaluation(config, tmp_path, EngineDouble().connect).evaluate(
            point, broken, proof
        )


async def test_cancellation_ends_an_evaluation_and_leaves_no_samples_file(
    make_config: MakeConfig, tmp_path: Path, point: EvalPoint, snapshot: Snapshot, proof: PinProof
) -> None:
    engine = EngineDouble()
    engine.hold = anyio.Event()
    config = make_config([{"input": f"q{i}", "label": ""} for i in range(9)], concurrency=3)
    stock = StockEvaluation(config, tmp_path, engine.connect)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stock.evaluate, point, snapshot, proof)
        while engine.busiest < 3:
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert not (tmp_path / "samples").exists()
    engine.hold = None
    output = await stock.evaluate(point, snapshot, proof)
    assert len(rows_of(output)) == 9
