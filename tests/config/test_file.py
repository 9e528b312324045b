"""The YAML file of ``--eval-config``: any flag, settings for each set; the command line wins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vime.eval import ConfigError, EvalConfig, add_eval_arguments, validate_eval_args
from vime.eval.config.file import ConfigFile, read_config_file
from vime.eval.config.flags import FLAGS

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        (tmp_path / "eval.yaml").write_text(text)
        return str(tmp_path / "eval.yaml")

    return write


def parser() -> argparse.ArgumentParser:
    return add_eval_arguments(argparse.ArgumentParser())


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args(list(words))


def problems_of(args: argparse.Namespace) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(args)
    return caught.value.problems


def test_the_file_gives_what_the_command_line_does_not_and_never_more(write: Write) -> None:
    path = write("eval-num-gpus: 4\neval_max_in_flight: 7\neval_timeout: 1e-1\nci_test: true\n")
    args = parse("--eval-max-in-flight", "2", "--eval-config", path, "--no-ci-test")
    assert (args.eval_num_gpus, args.eval_timeout) == (4, 0.1)
    assert args.eval_max_in_flight == 2, "said on the command line, though it is the default"
    assert args.ci_test is False


def test_a_parse_without_the_file_knows_nothing_of_one_before(write: Write) -> None:
    both = parser()
    path = write("eval_num_gpus: 4\neval_vllm_quantization: fp8\n")
    assert both.parse_args(["--eval-config", path]).eval_vllm_quantization == "fp8"
    args = both.parse_args([])
    assert args.eval_num_gpus == 0
    assert getattr(args, "eval_vllm_quantization", None) is None


def test_a_frameworks_own_flags_and_namespaces_are_filled_from_the_file(write: Write) -> None:
    path = write("hf_checkpoint: ours\neval_seed: 3\n")
    theirs = argparse.ArgumentParser()
    theirs.add_argument("--hf-checkpoint", default="theirs")
    args = add_eval_arguments(theirs).parse_args(["--eval-config", path])
    assert args.hf_checkpoint == "ours"
    bare = argparse.Namespace(eval_config=path, hf_checkpoint="theirs")
    assert EvalConfig.from_args(bare).seed == 3
    assert bare.hf_checkpoint == "theirs"


def test_every_flag_can_be_said_in_the_file(write: Write) -> None:
    values: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.dest == "eval_config":
            continue
        plain: dict[Any, Any] = {int: 3, float: 0.5, bool: True, str: "word"}
        value = flag.choices[-1] if flag.choices else plain[flag.parse]
        values[flag.dest] = ["a", "b"] if flag.many else value
    args = parse("--eval-config", write(yaml.safe_dump(values)))
    assert {dest: getattr(args, dest) for dest in values} == values


def test_each_set_can_have_settings_of_its_own(write: Write, tmp_path: Path) -> None:
    for name in ("math", "trivia", "more"):
        (tmp_path / name).write_text("")
    path = write(
        f"""
        eval_temperature: 0.5
        custom_rm_path: my.reward
        datasets:
          - {{name: math@500, path: {tmp_path}/math, reward: math, n-samples-per-prompt: 8}}
          - {{name: trivia, path: {tmp_path}/trivia, temperature: 1, top_p: 0.9, reward_key: acc}}
        """
    )
    math, trivia = EvalConfig.from_args(parse("--eval-config", path)).datasets
    assert (math.name, math.take, math.path) == ("math", 500, tmp_path / "math")
    assert (math.reward, math.custom_rm_path) == ("math", None)
    assert (math.n_samples_per_prompt, math.temperature) == (8, 0.5)
    assert (trivia.take, trivia.temperature, trivia.top_p) == (None, 1, 0.9)
    assert (trivia.custom_rm_path, trivia.reward_key) == ("my.reward", "acc")

    words = ["--eval-config", path, "--eval-prompt-data", "math@3", f"{tmp_path}/more"]
    (only,) = EvalConfig.from_args(parse(*words)).datasets
    assert (only.path, only.take, only.reward) == (tmp_path / "more", 3, "math")


def test_sets_without_settings_may_be_a_mapping_or_pairs(write: Write, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for text in (
        f"eval_prompt_data: {{a: {tmp_path}/a}}",
        f"eval_prompt_data: [[a, {tmp_path}/a]]",
        f"eval_prompt_data: [a, {tmp_path}/a]",
    ):
        config = EvalConfig.from_args(parse("--eval-config", write(text)))
        assert config.prompt_data == (("a", tmp_path / "a"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval_num_gpu: 2", "unknown 'eval_num_gpu': did you mean 'eval_num_gpus'?"),
        ("eval_config: other.yaml", "unknown 'eval_config'"),
        ("eval_num_gpus: two", "eval_num_gpus 'two': expected a whole number of at least 0"),
        ("eval_num_gpus: 1.5", "eval_num_gpus 1.5: expected a whole number"),
        ("eval_overflow_policy: drop", "eval_overflow_policy 'drop': expected one of"),
        ("ci_test: maybe", "ci_test 'maybe': expected true or false"),
        ("eval_hf_dir: [a]", "eval_hf_dir ['a']: expected a value"),
        ("{eval-seed: 1, eval_seed: 2}", "'eval_seed' is given twice"),
        ("eval_seed: 1\neval_seed: 2", "'eval_seed' is given twice"),
        ("datasets: [{name: a, path: b, top_p: 1, top_p: 0.5}]", "'top_p' is given twice"),
        ("datasets: [{name: null, path: b}]", "name and path cannot be empty"),
        ("- 1", "expected a mapping of flags to values"),
        ("a: [", "cannot be read"),
        ("datasets: {a: b}", "expected a list of mappings"),
        ("datasets: [{name: a}]", "datasets[0]: {'name': 'a'}: expected a mapping with name and path"),
        ("datasets: [{name: a, path: b, reward: best}]", "datasets[0]: reward 'best': expected one of exact"),
        ("datasets: [{name: a, path: b, temprature: 1}]", "did you mean 'temperature'?"),
        ("datasets: [{name: a, path: b, top_p: 2}]", "--eval-top-p 2 (set a): expected above 0"),
        ("datasets: [{name: a, path: b, overlong_prompt: cut}]", "--eval-overlong-prompt cut (set a) needs"),
    ],
)  # fmt: skip
def test_each_mistake_in_the_file_is_named_with_the_file(
    write: Write, text: str, message: str
) -> None:
    path = write(text)
    said = "\n".join(problems_of(parse("--eval-config", path)))
    assert message in said
    assert path in said or "(set a)" in said


def test_the_files_mistakes_and_the_command_lines_come_together(write: Write) -> None:
    path = write("eval_sead: 1\neval_keep_snapshots: -1\n")
    said = problems_of(parse("--eval-config", path, "--eval-max-in-flight", "two"))
    assert len(said) == 3
    wanted = (
        "--eval-max-in-flight 'two': expected a whole number of at least 1 and at most 2147483647"
    )
    assert wanted in said


def test_a_file_that_is_empty_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_config_file(tmp_path / "empty.yaml") == ConfigFile()
    (said,) = problems_of(parse("--eval-config", str(tmp_path / "gone.yaml")))
    assert "gone.yaml: cannot be read: " in said
    gone = parse("--eval-config", str(tmp_path / "gone.yaml"), "--eval-num-gpus", "2")
    (said,) = problems_of(gone)  # what is missing may stand in the file
    assert "gone.yaml: cannot be read: " in said
