"""The flags: their defaults, and every refusal with its message."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from vime.eval import ConfigError, EvalConfig, add_eval_arguments, validate_eval_args
from vime.eval.site import ThisMachine, check_machine
from vime.rollout.checkpoint_eval import CheckpointEvalFn


class Backend(CheckpointEvalFn):
    """A backend that is never called here."""

    async def evaluate_checkpoint(self, checkpoint_dir, input):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def plain_function() -> None:
    """No CheckpointEvalFn."""


BACKEND = f"{__name__}.Backend"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "eval.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return tmp_path


def parse(*words: str) -> argparse.Namespace:
    return add_eval_arguments(argparse.ArgumentParser()).parse_args(list(words))


def fleet_words(base: Path) -> list[str]:
    return [
        "--eval-num-gpus", "2", "--eval-interval", "10", "--eval-hf-dir", str(base / "staging"),
        "--hf-checkpoint", str(base / "base"), "--eval-prompt-data", "sums", str(base / "eval.jsonl"),
    ]  # fmt: skip


def test_the_defaults_are_those_of_the_documentation() -> None:
    args = parse()
    assert args.eval_num_gpus == 0
    assert args.eval_num_gpus_per_engine == 1
    assert args.eval_hf_dir is None
    assert args.eval_max_in_flight == 2
    assert args.eval_overflow_policy == "backpressure"
    assert args.eval_keep_snapshots == 2


def test_the_config_of_a_bare_namespace_equals_the_one_of_the_parsers_defaults() -> None:
    assert EvalConfig.from_args(argparse.Namespace()) == EvalConfig.from_args(parse())


def test_the_dataclass_and_the_flags_agree_on_every_default() -> None:
    assert EvalConfig() == EvalConfig.from_args(argparse.Namespace())


def test_a_fleet_or_a_backend_uses_snapshots_and_nothing_else_does(base: Path) -> None:
    for words, uses in (
        ([], False),
        (fleet_words(base), True),
        (["--eval-function-path", BACKEND, "--eval-hf-dir", "d", "--eval-interval", "1"], True),
        (["--eval-function-path", f"{__name__}.plain_function"], False),
    ):
        args = parse(*words)
        validate_eval_args(args)
        assert args.eval_uses_snapshots is uses


def test_an_existing_flag_of_the_framework_is_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-checkpoint", default="theirs")
    assert add_eval_arguments(parser).parse_args([]).hf_checkpoint == "theirs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval-num-gpus", "2", "--eval-min-engines", "3"], "--eval-min-engines 3: the fleet has 2 engines"),
        (["--eval-num-gpus", "3", "--eval-num-gpus-per-engine", "2"], "--eval-num-gpus 3 is no multiple"),
        (["--rollout-external-engine-addrs", "10.0.0.1:80"], "--rollout-external-engine-addrs"),
        (["--prefill-num-servers", "1"], "--prefill-num-servers 1"),
        (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint /nowhere: no config.json"),
        (["--eval-prompt-data", "sums"], "expected NAME PATH pairs"),
        (["--eval-prompt-data", "sums", "/nowhere.jsonl"], "/nowhere.jsonl: no such file or directory"),
        (["--eval-prompt-data", "a", "x", "a", "y"], "'a' is given twice"),
        (["--eval-function-path", BACKEND], "exclude each other"),
        (["--eval-function-path", "no.such.module"], "--eval-function-path no.such.module"),
        (["--eval-function-path", "no.such", "--eval-hf-dir", "/tmp/x", "--save-hf", "/tmp/x"], "overlap"),
        (["--eval-function-path", "plain"], "expected a dotted path"),
        (["--eval-function-path", "json.nothing"], "has no 'nothing'"),
        (["--vllm-config", "/nowhere.yaml"], "--vllm-config /nowhere.yaml"),
        (["--eval-top-p", "1.5"], "--eval-top-p 1.5"),
        (["--eval-max-in-flight", "0"], "--eval-max-in-flight 0: expected a whole number of at least 1"),
        (["--eval-keep-snapshots", "-1"], "--eval-keep-snapshots -1"),
        (["--eval-timeout", "nan"], "--eval-timeout nan"),
        (["--eval-timeout", "soon"], "--eval-timeout 'soon': expected a number of at least 0.001"),
        (["--eval-overflow-policy", "drop"], "--eval-overflow-policy 'drop': expected one of backpressure, skip"),
        (["--eval-prompt-data", "sums@0", "x"], "sums@0 x: no such file"),
        (["--eval-prompt-data", "sums@0", "."], "sums@0: expected NAME@N with N of at least 1"),
        (["--eval-prompt-data", "sums@5", "x", "sums", "y"], "'sums' is given twice"),
        (["--eval-prompt-data", "step", "."], "the name 'step' is vime's own"),
        (["--eval-prompt-data", "", "."], "the name '' is empty"),
        (["--eval-prompt-data", "a\nb", "."], "the name 'a\\nb' has characters that cannot be printed"),
        (["--eval-prompt-data", "sums", "a\0b"], "--eval-prompt-data 'a\\x00b': expected a text without NUL"),
        (["--eval-prompt-data", "sums", "x" * 5000], "no such file or directory (File name too long)"),
        (["--hf-checkpoint", "x" * 5000], "no config.json there (File name too long)"),
        (["--eval-hf-dir", "a\0b"], "--eval-hf-dir 'a\\x00b': expected a text without NUL"),
        (["--eval-reward", "best"], "--eval-reward 'best': expected one of exact"),
        (["--eval-reward", "f1", "--custom-rm-path", "a.b"], "--eval-reward f1 together with --custom-rm-path a.b"),
        (["--eval-reward-batch-size", "8"], "--eval-reward-batch-size 8 without --custom-rm-path"),
        (["--eval-overlong-prompt", "cut"], "--eval-overlong-prompt cut needs --eval-max-prompt-len N"),
    ],
)  # fmt: skip
def test_each_refusal_names_the_flag_and_its_value(
    base: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        validate_eval_args(parse(*fleet_words(base), *words))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        (
            "eval_function_path",
            len,
            "--eval-function-path <built-in function len>: expected a text",
        ),
        ("custom_rm_path", len, "--custom-rm-path <built-in function len>: expected a text"),
        ("eval_hf_dir", 5, "--eval-hf-dir 5: expected a text"),
        ("eval_prompt_data", "sums x.jsonl", "--eval-prompt-data 'sums x.jsonl': expected a list"),
        ("eval_prompt_data", {"sums": "x"}, "--eval-prompt-data {'sums': 'x'}: expected a list"),
        ("eval_prompt_data", ["sums", 5], "--eval-prompt-data 5: expected a text"),
    ],
)
def test_a_value_of_another_type_than_the_command_line_gives_is_named(
    base: Path, attribute: str, value: Any, message: str
) -> None:
    args = parse(*fleet_words(base))
    setattr(args, attribute, value)
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(args)
    assert message in str(caught.value)


def test_what_is_missing_is_named_and_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(parse("--eval-num-gpus", "2"))
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "--hf-checkpoint" in text
    assert "--eval-hf-dir is missing" in text
    assert "--eval-prompt-data" in text


def test_a_staging_directory_without_an_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires --eval-interval"):
        validate_eval_args(parse("--eval-hf-dir", "d"))


@pytest.mark.parametrize(("staging", "saved"), [("x", "x"), ("x/y", "x"), ("x", "x/y")])
def test_saved_checkpoints_and_snapshots_never_share_a_directory(staging: str, saved: str) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        validate_eval_args(
            parse("--eval-hf-dir", staging, "--save-hf", saved, "--eval-interval", "1")
        )


def test_the_base_checkpoint_and_the_snapshots_never_share_a_directory(base: Path) -> None:
    words = ["--hf-checkpoint", str(base / "base"), "--eval-hf-dir", str(base)]
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .* overlap"):
        validate_eval_args(parse(*words, "--eval-interval", "1"))


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("vllm: []", "0 models are named 'eval'"),
        ("vllm: [{name: eval}, {name: eval}]", "2 models are named 'eval'"),
        ("vllm: [{name: eval, server_groups: [{num_gpus: 1}]}]", "covers 1 GPUs"),
        ("[1, 2", "cannot be read"),
        ("- 1", "cannot be read"),
    ],
)
def test_a_layout_must_define_one_eval_model_of_the_right_size(
    base: Path, yaml: str, message: str
) -> None:
    (base / "vllm.yaml").write_text(yaml)
    words = [*fleet_words(base), "--vllm-config", str(base / "vllm.yaml")]
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(parse(*words))
    assert message in str(caught.value)


def test_a_right_layout_passes(base: Path) -> None:
    (base / "vllm.yaml").write_text(
        "vllm: [{name: actor}, {name: eval, server_groups: [{num_gpus: 1}, {num_gpus: 1}]}]"
    )
    validate_eval_args(parse(*fleet_words(base), "--vllm-config", str(base / "vllm.yaml")))


def test_wrong_values_and_broken_rules_of_one_command_line_come_together(base: Path) -> None:
    words = ["--eval-temperature", "warm", "--eval-top-p", "3", "--prefill-num-servers", "1"]
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(parse(*fleet_words(base), *words, "--eval-interval", "often"))
    told = [problem.split()[0] for problem in caught.value.problems]
    assert told == ["--eval-interval", "--eval-temperature", "--eval-num-gpus", "--eval-top-p"]


def test_what_is_no_namespace_is_told_to_be_one() -> None:
    for wrong in (None, {"eval_num_gpus": 1}):
        with pytest.raises(
            TypeError, match=r"expected an object .* argparse.Namespace\(\*\*flags\)"
        ):
            validate_eval_args(wrong)  # type: ignore[arg-type]


def test_a_framework_may_have_no_prefill_servers_and_no_external_engines(base: Path) -> None:
    args = parse(*fleet_words(base))
    args.prefill_num_servers, args.rollout_external_engine_addrs = 0, []
    validate_eval_args(args)


def test_whatever_is_wrong_with_data_and_rewards_and_machine_comes_together(
    base: Path, tmp_path: Path
) -> None:
    class NoMachine(ThisMachine):
        def check(self, config: EvalConfig) -> None:
            raise ConfigError(["no engines here"])

    (tmp_path / "bad.jsonl").write_text("{}\n")
    words = ["--eval-prompt-data", "bad", str(tmp_path / "bad.jsonl"), "--custom-rm-path", "no.rm"]
    config = EvalConfig.from_args(parse(*fleet_words(base), *words))
    with pytest.raises(ConfigError) as caught:
        check_machine(config, NoMachine())
    said = str(caught.value)
    for part in ("bad.jsonl:1: no key 'input'", "--custom-rm-path no.rm", "no engines here"):
        assert part in said


def test_a_frameworks_namespace_without_any_of_our_attributes_passes() -> None:
    odd: dict[str, object] = {f"their_{n}": object() for n in range(20)}
    odd |= {"lr": 1e-6, "rollout_num_gpus": 8, "tp": None, "reward": len, "run_dir": "x", "seed": 1}
    odd |= {"eval_batch": 3, "colocate": True, "save_hf": None, "vllm_dtype": "bfloat16"}
    args = argparse.Namespace(**odd)
    validate_eval_args(args)
    assert args.eval_uses_snapshots is False
    assert EvalConfig.from_args(args) == EvalConfig()


def test_what_a_framework_leaves_unset_has_its_default() -> None:
    unset: dict[str, object] = dict.fromkeys(
        [
            "eval_temperature",
            "eval_top_p",
            "eval_max_response_len",
            "eval_input_key",
            "eval_reward_key",
        ]
    )
    args = argparse.Namespace(**unset, n_samples_per_eval_prompt=4, apply_chat_template=True)
    config = EvalConfig.from_args(args)
    assert config == EvalConfig(n_samples_per_prompt=4, apply_chat_template=True)


def test_a_frameworks_namespace_gets_one_error_that_lists_what_it_lacks() -> None:
    args = argparse.Namespace(eval_num_gpus=2, eval_hf_dir=None)
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(args)
    checkpoint, staging, data = caught.value.problems
    lacks = "(the namespace has no {}; vime.eval.add_eval_arguments adds it)"
    assert checkpoint.startswith(f"--hf-checkpoint is missing {lacks.format('hf_checkpoint')}: ")
    assert staging.startswith("--eval-hf-dir is missing: ")
    assert data.startswith(f"--eval-prompt-data is missing {lacks.format('eval_prompt_data')}: ")


def test_a_wrong_type_in_a_frameworks_namespace_is_told_apart_from_a_missing_one() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(argparse.Namespace(eval_num_gpus="two", eval_max_in_flight=None))
    assert "--eval-num-gpus 'two': expected a whole number" in str(caught.value)
    assert "--eval-max-in-flight is None" in str(caught.value)


def test_engines_that_are_to_outlive_the_driver_must_exist() -> None:
    with pytest.raises(ConfigError, match="--eval-detached without --eval-num-gpus"):
        validate_eval_args(parse("--eval-detached"))
