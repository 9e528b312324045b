"""The example's training: its task, its tokenizer, its updates, and its command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import arithmetic
import grpo
import pytest
import torch
import train

from vime.eval.runner.rewards import exact_match

pytestmark = pytest.mark.slow

EXAMPLE = Path(train.__file__)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return arithmetic.build_tokenizer()


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the task ----------------------------------------------------------------------------------


def test_no_held_out_prompt_is_trained_on() -> None:
    training, held_out = arithmetic.training_and_held_out()
    assert not {s.prompt for s in training} & {s.prompt for s in held_out}
    assert len({s.prompt for s in [*training, *held_out]}) == 900
    assert len(held_out) == arithmetic.NUM_HELD_OUT


def test_every_answer_is_the_sum() -> None:
    training, held_out = arithmetic.training_and_held_out()
    for prompt, answer in [*training, *held_out]:
        a, b = prompt.removesuffix("=").split("+")
        assert int(answer) == int(a) + int(b)


def test_the_split_is_the_same_every_time() -> None:
    assert arithmetic.training_and_held_out() == arithmetic.training_and_held_out()


def test_the_eval_set_has_the_keys_that_vime_reads_by_default(tmp_path: Path) -> None:
    path = tmp_path / "addition.jsonl"
    arithmetic.write_eval_set(path, [arithmetic.Sum("47+8=", "55")])
    assert json.loads(path.read_text()) == {"input": "47+8=", "label": "55"}


# -- tokenizer and model -----------------------------------------------------------------------


def test_a_saved_tokenizer_encodes_and_decodes_as_the_one_that_was_made(
    tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in ("47+8=", "55", "107"):
        tokens = tokenizer(text).input_ids
        assert len(tokens) == len(text)
        assert loaded(text).input_ids == tokens
        assert loaded.decode([*tokens, loaded.eos_token_id], skip_special_tokens=True) == text


def test_the_same_seed_makes_the_same_model_and_another_seed_another(tokenizer: Any) -> None:
    first, same, other = (arithmetic.build_model(tokenizer, seed) for seed in (1, 1, 2))
    name = "model.embed_tokens.weight"
    assert torch.equal(first.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_a_saved_model_can_be_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    model = arithmetic.build_model(tokenizer, 1)
    model.save_pretrained(tmp_path)
    loaded = arithmetic.load_model(str(tmp_path), tokenizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_checkpoint_that_cannot_be_trained_on_is_refused_with_its_path(
    tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*nowhere"):
        arithmetic.load_model(str(tmp_path / "nowhere"), tokenizer)
    model = arithmetic.build_model(tokenizer, 1)
    model.resize_token_embeddings(20)
    model.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"a vocabulary of 20; expected .* 14 tokens"):
        arithmetic.load_model(str(tmp_path / "foreign"), tokenizer)


# -- generating and training -------------------------------------------------------------------


def test_greedy_answers_are_those_of_transformers_own_generate(tokenizer: Any) -> None:
    model = arithmetic.build_model(tokenizer, 0)
    sums, _ = arithmetic.training_and_held_out()
    prompts = grpo.encode_prompts(tokenizer, sums[:32])
    mine = grpo.generate(model, prompts, 4, greedy=True)
    theirs = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False
    )
    assert torch.equal(mine, theirs[:, prompts.shape[1] :])


def test_after_its_end_an_answer_is_padded(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = arithmetic.build_model(tokenizer, 0)
    prompts = grpo.encode_prompts(tokenizer, [arithmetic.Sum("47+8=", "55")] * 256)
    answers = grpo.generate(model, prompts, 4, greedy=False)
    ended = (answers == tokenizer.eos_token_id).cumsum(dim=1) > 0
    after = torch.cat([torch.zeros(256, 1, dtype=torch.bool), ended[:, :-1]], dim=1)
    assert after.any()
    assert (answers[after] == tokenizer.pad_token_id).all()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("55", 1.0), ("54", 1 / 3), ("5", 1 / 6), ("555", 1 / 3), ("98", 1 / 6), ("555=", 1 / 3)],
)
def test_the_reward_is_1_for_the_right_answer_and_credits_right_characters(
    tokenizer: Any, answer: str, expected: float
) -> None:
    sums = [arithmetic.Sum("47+8=", "55")]
    trainer = grpo.Trainer(
        arithmetic.build_model(tokenizer, 0), tokenizer, sums, grpo.Settings(), seed=0
    )
    right = grpo.encode_answers(tokenizer, sums)
    (row,) = grpo.encode_answers(tokenizer, [arithmetic.Sum("47+8=", answer)]).tolist()
    reward = trainer._reward(torch.tensor([row[:4]]), right)
    assert reward.item() == pytest.approx(expected)


def test_training_raises_the_reward_and_moves_every_weight(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = arithmetic.build_model(tokenizer, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    few = arithmetic.training_and_held_out()[0][:8]
    trainer = grpo.Trainer(model, tokenizer, few, grpo.Settings(prompts_per_step=8), seed=0)
    rewards = [trainer.step() for _ in range(60)]
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:5]) / 5
    for name, tensor in model.state_dict().items():
        assert not torch.equal(tensor, before[name]), name


def test_training_with_one_seed_is_repeatable(tokenizer: Any) -> None:
    def rewards() -> list[float]:
        torch.manual_seed(3)
        model = arithmetic.build_model(tokenizer, 3)
        sums, _ = arithmetic.training_and_held_out()
        trainer = grpo.Trainer(model, tokenizer, sums, grpo.Settings(), seed=3)
        return [trainer.step() for _ in range(3)]

    assert rewards() == rewards()


def test_the_accuracy_counts_what_an_exact_match_of_the_texts_counts(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = arithmetic.build_model(tokenizer, 0)
    one = [arithmetic.Sum("47+8=", "55")]
    trainer = grpo.Trainer(model, tokenizer, one, grpo.Settings(prompts_per_step=1), seed=0)
    while grpo.accuracy(model, tokenizer, one) < 1.0:  # learns this one by heart
        trainer.step()
    _, held_out = arithmetic.training_and_held_out()
    sums = [*one, *held_out[:20]]
    answers = grpo.generate(model, grpo.encode_prompts(tokenizer, sums), 4, greedy=True)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    matches = [exact_match(text, s.answer) for text, s in zip(texts, sums, strict=True)]
    assert grpo.accuracy(model, tokenizer, sums) == pytest.approx(sum(matches) / len(matches))


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A working directory of its own, and the signal handlers as they were, afterwards."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def test_the_shared_demo_reports_each_eval_point_and_its_stall(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--demo", "shared", "--steps", "5", "--eval-interval", "2"]
    assert train.main(argv) == 0
    summary = json.loads((elsewhere / "runs" / "latest" / "summary.json").read_text())
    assert [point["rollout_id"] for point in summary["points"]] == [0, 2, 4, 5]
    assert {point["state"] for point in summary["points"]} == {"done"}
    assert all(0 <= point["metrics"]["eval/addition"] <= 1 for point in summary["points"])
    assert summary["train_steps"] == 5
    assert 0 < summary["stall_share"] < 1
    assert f"for {summary['stall_share']:.2%} of its wall time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-max-in-flight", "0"], "--eval-max-in-flight 0: expected"),
        (["--eval-num-gpus", "1"], "--eval-hf-dir is missing"),
        (["--hf-checkpoint", "nowhere"], "--hf-checkpoint nowhere: cannot be loaded"),
        (["--eval-run-dir", "file/below"], "--eval-run-dir file/below: Not a directory"),
    ],
)
def test_a_wrong_flag_is_one_message_and_leaves_no_run_behind(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (elsewhere / "file").touch()
    assert train.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(elsewhere.glob("runs/*")) == []


def test_a_directory_with_a_run_in_it_is_refused_and_not_touched(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "trace.jsonl").write_text("precious")
    assert train.main(["--eval-run-dir", "mine"]) == 2
    assert "another run wrote there already" in capsys.readouterr().err
    assert [path.name for path in (elsewhere / "mine").iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps", "0"],
        ["--lr", "nan"],
        ["--lr", "0"],
        ["--demo", "shared", "--eval-num-gpus", "1"],
    ],
)
def test_what_the_example_cannot_do_is_refused_by_its_parser(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train.parse_args(flags)
    assert stop.value.code == 2
    assert flags[-2] in capsys.readouterr().err


def test_the_fleet_demo_stages_in_a_private_directory_and_removes_it() -> None:
    args = train.parse_args(["--demo", "fleet"])
    assert args.eval_num_gpus == 2
    with train.staging(args):
        directory = Path(args.eval_hf_dir)
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "step_1").mkdir()
    assert not directory.exists()


def test_what_a_killed_demo_left_is_removed_and_what_a_live_one_has_is_not() -> None:
    with train.staging(first := train.parse_args(["--demo", "fleet"])):
        root = Path(first.eval_hf_dir).parent
        dead = root / f"vime-demo-{os.getuid()}-{os.getpid()}dead"
        dead.mkdir()
        try:
            with train.staging(train.parse_args(["--demo", "fleet"])):
                assert not dead.exists()
                assert Path(first.eval_hf_dir).exists()
        finally:
            shutil.rmtree(dead, ignore_errors=True)


def test_a_staging_directory_that_was_named_is_used_and_kept(tmp_path: Path) -> None:
    args = train.parse_args(["--demo", "fleet", "--eval-hf-dir", str(tmp_path)])
    with train.staging(args):
        assert args.eval_hf_dir == str(tmp_path)
    assert tmp_path.exists()


@pytest.mark.real
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, train.INTERRUPTED), (signal.SIGTERM, train.TERMINATED)]
)
def test_an_interrupted_run_ends_with_its_status_and_without_a_traceback(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-u", str(EXAMPLE), "--demo", "shared", "--eval-interval", "3"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("point 3 done" in line for line in process.stdout)  # it trains
        process.send_signal(sent)
        _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in error


@pytest.mark.usefixtures("elsewhere")
def test_a_second_signal_does_not_cut_the_end_short() -> None:
    signal.signal(signal.SIGTERM, train.stop)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.real
def test_a_reader_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(EXAMPLE), "--demo", "shared"]
    command += ["--steps", "5", "--eval-interval", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert (tmp_path / "runs" / "latest" / "summary.json").exists()


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_fleet_demo_scores_every_point_with_its_own_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--demo", "fleet", "--ci-test"]
    command += ["--steps", "40", "--eval-interval", "10"]
    command += ["--eval-max-in-flight", "8"]  # so close together, two would hold training up
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "latest"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [point["rollout_id"] for point in summary["points"]] == [0, 10, 20, 30, 40]
    versions = [point["weight_version"] for point in summary["points"]]
    assert [version.split(":")[1] for version in versions] == ["0", "10", "20", "30", "40"]
    assert len(set(versions)) == 5
    assert summary["stall_share"] < 0.05
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    check = [sys.executable, "-m", "vime.cli", "trace", "check", "--ended", str(run_dir)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    staging = Path(json.loads((run_dir / "flags.json").read_text())["eval_hf_dir"])
    assert staging.name.startswith("vime-demo-")
    assert not staging.exists()
