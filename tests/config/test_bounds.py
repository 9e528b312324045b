"""Every number of the flags is finite and bounded, and every path leads somewhere."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_config import base, fleet_words, parse
from vime.eval import ConfigError, EvalConfig, validate_eval_args
from vime.eval.config.datasets import name_and_count
from vime.eval.config.flags import BY_DEST, FLAGS
from vime.eval.config.sizes import parse_size
from vime.eval.outcomes.tracking import CallableTracker, Trackers
from vime.limits import LONGEST_S

__all__ = ["base"]  # a fixture

NUMBERS = [flag for flag in FLAGS if flag.parse in (int, float)]
PATHS = [flag for flag in FLAGS if flag.kind == "path"]
DOTTED = [flag for flag in FLAGS if flag.kind == "dotted path"]
DEADLINES = [flag for flag in FLAGS if flag.name.endswith("-timeout")]


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / "loop"


def problems_of(args: argparse.Namespace) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(args)
    return caught.value.problems


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "1e400", "1e20", "9" * 20, "9" * 5000])
def test_no_number_is_infinite_or_beyond_64_bits(flag: Any, word: str) -> None:
    args = parse(f"{flag.name}={word}")
    (problem,) = (p for p in problems_of(args) if p.startswith(f"{flag.name} "))
    assert ": expected " in problem


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_an_integer_of_thousands_of_digits_in_a_namespace_is_refused_in_words(flag: Any) -> None:
    assert "a number of thousands of digits: expected" in str(flag.problem(10**5000))


@pytest.mark.parametrize("flag", DEADLINES, ids=lambda flag: flag.name)
def test_a_deadline_is_at_most_thirty_days_and_its_message_says_so(flag: Any, base: Path) -> None:
    (problem,) = problems_of(parse(*fleet_words(base), flag.name, "1e20"))
    assert problem == (
        f"{flag.name} 1e+20: expected a number of at least 0.001 and at most 2592000 seconds "
        "(30 days)"
    )
    validate_eval_args(parse(*fleet_words(base), flag.name, str(LONGEST_S)))


def test_threads_can_wait_for_the_longest_deadline() -> None:
    heard: list[Any] = []
    trackers = Trackers([CallableTracker(heard.append)])
    assert trackers.flush(LONGEST_S)
    trackers.close(LONGEST_S)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dispose_timeout_s": 1e20}, "--eval-dispose-timeout 1e+20: expected"),
        ({"eval_timeout_s": math.inf}, "--eval-timeout inf: expected"),
        ({"drain_timeout_s": "soon"}, "--eval-drain-timeout 'soon': expected"),
        ({"engine_max_restarts": 10**20}, "--eval-engine-max-restarts 100000000000000000000: expe"),
        ({"run_dir": ""}, "--eval-run-dir '': expected a path, got an empty string"),
        ({"verify": "hope"}, "--eval-verify 'hope': expected one of full, headers"),
    ],
)
def test_a_config_that_is_made_by_hand_keeps_to_the_same_bounds(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EvalConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval_dispose_timeout: .inf", "eval_dispose_timeout inf: expected a number of at least"),
        ("eval_dispose_timeout: 1e20", "eval_dispose_timeout 1e+20: expected a number"),
        (f"eval_max_captures: {10**20}", f"eval_max_captures {10**20}: expected a whole number"),
        ("eval_run_dir: ''", "eval_run_dir '': expected a path, got an empty string"),
        ("eval_vllm_seed: 100000000000000000000", "--eval-vllm-* sets seed to 100000000000000000"),
        ("eval_vllm_cpu_offload_gb: .nan", "--eval-vllm-* sets cpu_offload_gb to nan: expected"),
    ],
)
def test_a_file_keeps_to_the_same_bounds(base: Path, text: str, message: str) -> None:
    (base / "eval.yaml").write_text(f"{text}\n")
    problems = problems_of(parse(*fleet_words(base), "--eval-config", str(base / "eval.yaml")))
    assert message in "\n".join(problems)


def test_a_layouts_overrides_keep_to_64_bits_and_so_does_what_is_inherited(base: Path) -> None:
    (base / "vllm.yaml").write_text(
        "vllm: [{name: eval, server_groups: [{num_gpus: 2, overrides: "
        "{max_model_len: 100000000000000000000, nested: {deep: [1, .inf]}}}]}]"
    )
    args = parse(*fleet_words(base), "--vllm-config", str(base / "vllm.yaml"))
    args.vllm_seed = -(10**20)
    said = "\n".join(problems_of(args))
    assert "overrides sets max_model_len to 100000000000000000000: expected finite numbers" in said
    assert "overrides sets nested to inf: expected finite numbers" in said
    assert said.count("--vllm-* sets seed to -100000000000000000000: expected finite") == 1


@pytest.mark.parametrize("share", ["inf", "1e400", "2", "0"])
def test_a_share_of_memory_is_at_most_all_of_it(base: Path, share: str) -> None:
    words = [*fleet_words(base), "--eval-vllm-gpu-memory-utilization", share]
    (problem,) = problems_of(parse(*words))
    assert problem.startswith("--eval-vllm-gpu-memory-utilization ")
    assert problem.endswith(": expected a number of at least 0.01 and at most 1")


@pytest.mark.parametrize("number", ["9" * 20, "9" * 5000, "2147483648"])
def test_a_number_of_examples_is_bounded_however_long_it_is(base: Path, number: str) -> None:
    words = [*fleet_words(base), "--eval-prompt-data", f"sums@{number}", "."]
    (problem,) = problems_of(parse(*words))
    assert problem.endswith("expected NAME@N with N of at least 1 and at most 2147483647")


def test_a_number_of_examples_may_have_zeros_in_front() -> None:
    assert name_and_count("sums@" + "0" * 30 + "5") == ("sums", 5)
    assert name_and_count("sums@000") == ("sums", 0)


@pytest.mark.parametrize("text", ["9" * 20, "9" * 400, "9" * 400 + "GB", "1001TB"])
def test_a_size_is_at_most_that_of_any_file(text: str) -> None:
    with pytest.raises(ValueError, match="and at most 1000TB"):
        parse_size(text)
    assert parse_size("1000TB") == 10**15


@pytest.mark.parametrize("flag", [*PATHS, *DOTTED], ids=lambda flag: flag.name)
def test_an_empty_path_is_told_to_be_one(base: Path, flag: Any) -> None:
    (problem,) = problems_of(parse(*fleet_words(base), flag.name, ""))
    assert problem == (
        f"{flag.name} '': expected a {flag.kind}, got an empty string; is a shell variable unset?"
    )


def test_the_path_of_an_eval_set_is_not_empty(base: Path) -> None:
    (problem,) = problems_of(parse(*fleet_words(base), "--eval-prompt-data", "sums", ""))
    assert problem.startswith("--eval-prompt-data sums '': expected a path, got an empty string")


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("flag", PATHS, ids=lambda flag: flag.name)
def test_a_link_that_leads_back_to_itself_is_one_clear_error(
    base: Path, loop: Path, flag: Any, below: bool
) -> None:
    place = loop / "x" if below else loop
    (problem,) = problems_of(parse(*fleet_words(base), flag.name, str(place)))
    assert problem.startswith(f"{flag.name} {place}: ")
    assert "a link that leads back to itself: remove it" in problem


def test_an_eval_set_behind_a_link_loop_is_named_with_the_reason(base: Path, loop: Path) -> None:
    words = ["--eval-prompt-data", "sums", str(loop)]
    (problem,) = problems_of(parse(*fleet_words(base), *words))
    assert problem.endswith("no such file or directory (Too many levels of symbolic links)")


def test_paths_that_do_not_exist_yet_and_dangling_links_may_be_named(base: Path) -> None:
    (base / "dangling").symlink_to("nowhere")
    words = ["--eval-hf-dir", str(base / "dangling"), "--save-hf", str(base / "new" / "{id}")]
    validate_eval_args(parse(*fleet_words(base), *words))


def test_every_flag_that_is_a_path_is_known_to_be_one() -> None:
    named = {dest for dest in BY_DEST if dest.endswith(("_dir", "_config", "_checkpoint", "_hf"))}
    assert {flag.dest for flag in PATHS} == named
    assert {flag.dest for flag in DOTTED} == {d for d in BY_DEST if d.endswith("_path")}
