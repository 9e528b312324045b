"""The engines' settings: their flags, their words on vLLM's command line, and vLLM's own names."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vime.eval import add_eval_arguments
from vime.eval.config.engines import (
    BOUND_TO_TP_SIZE,
    OWNED,
    ROLLOUT_ONLY,
    command_line,
    inherited_settings,
    own_settings,
)


def framework() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm-max-num-seqs", type=int)
    parser.add_argument("--vllm-max-model-len", type=int)
    parser.add_argument("--vllm-compilation-config", type=dict)
    parser.add_argument("--vllm-enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--vllm-enforce-eager", action="store_true")
    parser.add_argument("--vllm-cudagraph-capture-sizes", type=int, nargs="+")
    parser.add_argument("--vllm-tensor-parallel-size", type=int)
    parser.add_argument("--vllm-router-port", type=int)
    parser.add_argument("--vllm-config")
    return add_eval_arguments(parser)


def test_each_engine_flag_of_the_framework_can_be_said_for_the_fleet_alone() -> None:
    words = [
        "--vllm-max-num-seqs", "8", "--eval-vllm-max-num-seqs", "16",
        "--eval-vllm-max-model-len", "4096", "--eval-vllm-compilation-config", '{"level": 0}',
        "--no-eval-vllm-enable-prefix-caching", "--eval-vllm-enforce-eager",
        "--eval-vllm-cudagraph-capture-sizes", "1", "2",
    ]  # fmt: skip
    args = framework().parse_args(words)
    assert own_settings(args) == {
        "max_num_seqs": 16, "max_model_len": 4096, "compilation_config": '{"level": 0}',
        "enable_prefix_caching": False, "enforce_eager": True, "cudagraph_capture_sizes": [1, 2],
    }  # fmt: skip
    assert inherited_settings(args, same_tp_size=True) == {
        "max_num_seqs": 8, "enforce_eager": False
    }  # fmt: skip
    assert own_settings(framework().parse_args([])) == {}


@pytest.mark.parametrize("name", ["tensor-parallel-size", "router-port", "config"])
def test_what_is_no_setting_of_an_eval_engine_gets_no_flag(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        framework().parse_args([f"--eval-vllm-{name}", "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


@dataclass
class Compilation:
    """Like one of vLLM's config objects."""

    level: int | None = None
    sizes: list[int] = field(default_factory=list)


def test_a_config_object_that_nobody_has_chosen_is_not_passed_on() -> None:
    args = argparse.Namespace(vllm_compilation_config=Compilation(), vllm_dtype=None)
    assert inherited_settings(args, same_tp_size=True) == {}
    args.vllm_compilation_config = Compilation(level=3)
    chosen = inherited_settings(args, same_tp_size=True)
    with pytest.raises(ValueError, match=r"compilation_config=.*say it with --eval-vllm-comp"):
        command_line(chosen)


def test_settings_become_words() -> None:
    settings = {
        "max_model_len": 4096, "gpu_memory_utilization": 0.5, "dtype": "bfloat16",
        "enforce_eager": True, "enable_prefix_caching": False, "seed": None,
        "cudagraph_capture_sizes": [1, 2], "compilation_config": {"mode": 0},
        "allowed_local_media_path": Path("media"),
    }  # fmt: skip
    assert command_line(settings) == [
        "--max-model-len", "4096", "--gpu-memory-utilization", "0.5", "--dtype", "bfloat16",
        "--enforce-eager", "--no-enable-prefix-caching",
        "--cudagraph-capture-sizes", "1", "2", "--compilation-config", '{"mode": 0}',
        "--allowed-local-media-path", "media",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": object()}, [object()]])
def test_what_has_no_words_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="engine setting it="):
        command_line({"it": value})


def vllm_settings() -> set[str]:
    """The names of vLLM's settings, read from its source without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    classes = {"EngineArgs", "BaseFrontendArgs", "FrontendArgs"}
    found: set[str] = set()
    for path in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        for node in ast.parse((root / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                found |= {target.id for target in fields if isinstance(target, ast.Name)}
    return found


def test_the_names_are_vllms_own() -> None:
    arguments = {"headless", "api_server_count"}  # of its parser only
    assert (OWNED | ROLLOUT_ONLY | BOUND_TO_TP_SIZE) - arguments <= vllm_settings()


def test_every_setting_of_vllm_about_parallel_engines_is_accounted_for() -> None:
    parallel = {name for name in vllm_settings() if "parallel" in name}
    loading = {"max_parallel_loading_workers"}
    assert parallel - loading <= OWNED | BOUND_TO_TP_SIZE
    assert len(parallel) > 10


def test_no_setting_is_treated_in_two_ways() -> None:
    assert len(OWNED | ROLLOUT_ONLY | BOUND_TO_TP_SIZE) == sum(
        map(len, (OWNED, ROLLOUT_ONLY, BOUND_TO_TP_SIZE))
    )


READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
names, words = json.load(sys.stdin)
parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
print("values", json.dumps({name: getattr(parsed, name) for name in names}))
"""


@pytest.mark.real
def test_vllm_reads_the_words_as_the_values_that_they_stand_for() -> None:
    settings = {
        "max_model_len": 4096, "gpu_memory_utilization": 0.5, "dtype": "bfloat16",
        "enforce_eager": True, "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2], "mm_processor_kwargs": {"size": 3},
    }  # fmt: skip
    order = json.dumps([list(settings), command_line(settings)])
    done = subprocess.run(
        [sys.executable, "-c", READ], input=order, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.rpartition("values ")[2]) == settings
