"""The engines' layout: from the flags, from the YAML, and every refusal with its table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vime.eval import ConfigError, EvalConfig
from vime.eval.config.layout import VllmLayout, eval_group, vllm_layout

GROUP = {"num_gpus": 2}
ROLLOUT = {"name": "default", "server_groups": [{"num_gpus": 4}]}
FLEET = {"name": "eval", "server_groups": [GROUP]}
FLAGS = {"rollout_num_gpus": 4, "eval_num_gpus": 2, "hf_checkpoint": "base"}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes the entries into a YAML; returns arguments that name it."""

    def write(*entries: Any, **flags: Any) -> Namespace:
        path = tmp_path / "vllm.yaml"
        path.write_text(yaml.safe_dump({"vllm": list(entries)}))
        return Namespace(**{**FLAGS, "vllm_config": str(path), **flags})

    return write


def facts(layout: VllmLayout) -> list[tuple[Any, ...]]:
    return [
        (m.name, m.update_weights, g.worker_type, g.num_gpus, g.num_gpus_per_engine, g.num_engines)
        for m in layout.models
        for g in m.groups
    ]


def problems(args: Namespace) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        vllm_layout(args)
    return caught.value.problems


# --- without a YAML ---------------------------------------------------------------------------


def test_the_config_made_from_the_flags_gains_the_eval_model() -> None:
    without = vllm_layout(Namespace(rollout_num_gpus=4, rollout_num_gpus_per_engine=2))
    assert facts(without) == [("default", True, "regular", 4, 2, 2)]
    flags = {**FLAGS, "rollout_num_gpus_per_engine": 2, "eval_num_gpus": 6}
    layout = vllm_layout(Namespace(**flags, eval_num_gpus_per_engine=3))
    assert facts(layout) == [*facts(without), ("eval", False, "regular", 6, 3, 2)]
    assert layout.eval_model is layout.models[1]
    assert layout.eval_model.model_path == Path("base")
    assert (layout.num_gpus, layout.eval_model.num_engines) == (10, 2)


def test_prefill_servers_get_their_gpus_first() -> None:
    layout = vllm_layout(
        Namespace(rollout_num_gpus=6, rollout_num_gpus_per_engine=2, prefill_num_servers=1)
    )
    assert facts(layout) == [
        ("default", True, "prefill", 2, 2, 1),
        ("default", True, "decode", 4, 2, 2),
    ]
    wrong = Namespace(rollout_num_gpus=2, prefill_num_servers=2)
    assert problems(wrong) == ["--prefill-num-servers 2 takes 2 of --rollout-num-gpus 2: nothing is left for decoding"]  # fmt: skip


def test_a_fleet_is_read_whatever_the_rollout_engines_are() -> None:
    odd = Namespace(**{**FLAGS, "rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2})
    group = eval_group(odd)
    assert group is not None
    assert (group.num_gpus, group.num_engines) == (2, 2)
    assert eval_group(Namespace()) is None
    assert problems(odd) == [
        "the flags: model 'default', server group 0: num_gpus 3 is no multiple of "
        "num_gpus_per_engine 2: every engine needs its full tensor-parallel size"
    ]


# --- with one -----------------------------------------------------------------------------------


def test_a_group_says_what_it_has_else_its_model_else_the_flags(written: Any) -> None:
    groups = [{"num_gpus": 4, "num_gpus_per_engine": 4}, {"num_gpus": 2, "worker_type": "decode"}]
    layout = vllm_layout(
        written(
            {"name": "actor", "num_gpus_per_engine": 2, "server_groups": groups},
            {"name": "judge", "model_path": "other", "server_groups": [{"num_gpus": 3}]},
            {"name": "spare", "server_groups": [{"num_gpus": 3, "worker_type": "placeholder"}]},
            FLEET,
            rollout_num_gpus=12,
            rollout_num_gpus_per_engine=3,
            eval_num_gpus_per_engine=1,
        )
    )
    assert facts(layout) == [
        ("actor", True, "regular", 4, 4, 1),
        ("actor", True, "decode", 2, 2, 1),
        ("judge", False, "regular", 3, 3, 1),
        ("spare", True, "placeholder", 3, 3, 0),
        ("eval", False, "regular", 2, 1, 2),
    ]
    assert layout.models[1].model_path == Path("other")


def test_the_sizes_of_the_yaml_are_those_of_the_fleet(written: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "eval.jsonl").write_text("")
    fleet = {**FLEET, "num_gpus_per_engine": 2, "server_groups": [{"num_gpus": 4}, {"num_gpus": 2}]}
    args = written(
        fleet,
        rollout_num_gpus=0,
        eval_num_gpus=6,
        eval_num_gpus_per_engine=4,
        eval_hf_dir="staging",
        eval_interval=1,
        hf_checkpoint=str(tmp_path),
        eval_prompt_data=["sums", str(tmp_path / "eval.jsonl")],
    )
    config = EvalConfig.from_args(args)
    assert (config.num_gpus, config.num_gpus_per_engine, config.num_engines) == (6, 2, 3)


def test_colocated_engines_have_the_trainers_gpus(written: Any) -> None:
    args = written(ROLLOUT, FLEET, rollout_num_gpus=None, colocate=True, actor_num_gpus_per_node=4)
    assert vllm_layout(args).num_gpus == 6
    args.actor_num_gpus_per_node = 5
    (problem,) = problems(args)
    assert "its models have 6 GPUs, expected the sum of --rollout-num-gpus 5" in problem


def test_the_sum_is_checked_only_where_the_rollout_gpus_are_known(written: Any) -> None:
    assert vllm_layout(written(FLEET, rollout_num_gpus=None)).num_gpus == 2
    assert len(problems(written(FLEET))) == 1


TABLE = """
model    worker type  GPUs  GPUs/engine  engines
default  regular         4            1        4
eval     regular         3            1        3
sum                      7"""


def test_what_does_not_fit_is_shown_with_the_table(written: Any) -> None:
    path = written().vllm_config
    fleet = {**FLEET, "server_groups": [{"num_gpus": 3}]}
    assert problems(written(ROLLOUT, fleet)) == [
        f"--vllm-config {path}: the model 'eval' covers 3 GPUs, and --eval-num-gpus is 2; make "
        f"them equal:{TABLE}"
    ]
    assert problems(written(ROLLOUT, fleet, rollout_num_gpus=5, eval_num_gpus=3)) == [
        f"--vllm-config {path}: its models have 7 GPUs, expected the sum of --rollout-num-gpus 5 "
        f"and --eval-num-gpus 3:{TABLE}"
    ]
    for entries, num, found in (
        ([ROLLOUT], 2, "0 models are named 'eval'; with --eval-num-gpus 2 exactly one must be"),
        ([FLEET, FLEET], 2, "2 models are named 'eval'; with --eval-num-gpus 2 exactly one"),
        ([FLEET], 0, "1 models are named 'eval'; with --eval-num-gpus 0 none must be"),
    ):
        (problem,) = problems(written(*entries, eval_num_gpus=num))
        assert found in problem
        assert "sum" in problem


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("eval", "model 1: 'eval': expected a mapping with a name"),
        ({"num_gpus": 2}, "model 1: {'num_gpus': 2}: expected a mapping with a name"),
        ({**FLEET, "gpus": 2}, "model 'eval': unknown gpus: expected name, model_path"),
        ({**FLEET, "server_groups": 2}, "model 'eval': server_groups 2: expected a list"),
        ({**FLEET, "server_groups": [2]}, "model 'eval', server group 0: 2: expected a mapping"),
        ({**FLEET, "server_groups": [{"gpus": 2, **GROUP}]}, "server group 0: unknown gpus: expected worker_type"),
        ({**FLEET, "server_groups": [{}]}, "server group 0: num_gpus None: expected a whole number of at least 1"),
        ({**FLEET, "server_groups": [{"num_gpus": True}]}, "num_gpus True: expected a whole number"),
        ({**FLEET, "num_gpus_per_engine": 0}, "num_gpus_per_engine 0: expected a whole number"),
        ({**FLEET, "num_gpus_per_engine": 3}, "num_gpus 2 is no multiple of num_gpus_per_engine 3"),
        ({**FLEET, "server_groups": [{**GROUP, "worker_type": "big"}]}, "worker_type 'big': expected one of regular, prefill"),
        ({**FLEET, "server_groups": [{**GROUP, "worker_type": "decode"}]}, "worker_type decode: the engines of a fleet are 'regular'"),
        ({**FLEET, "server_groups": [{**GROUP, "overrides": [1]}]}, "overrides [1]: expected a mapping"),
        ({**FLEET, "server_groups": [{**GROUP, "overrides": {"port": 1}}]}, "server group 0, overrides sets port, which the eval fleet sets itself"),
        ({**FLEET, "update_weights": True}, "update_weights is true; the fleet loads exported snapshots"),
        ({**FLEET, "update_weights": "no"}, "update_weights 'no': expected true or false"),
        ({**FLEET, "model_path": "other"}, "model_path other is not --hf-checkpoint base"),
        ({**FLEET, "server_groups": [{"num_gpus": 1}, {"num_gpus": 1, "overrides": {"seed": 1}}]}, "its 2 server groups differ in num_gpus_per_engine or overrides"),
    ],
)  # fmt: skip
def test_each_wrong_entry_is_named(entry: Any, message: str, written: Any) -> None:
    found = problems(written(ROLLOUT, entry))
    assert any(message in problem for problem in found), found


def test_all_that_is_wrong_comes_together(written: Any) -> None:
    wrong = {"name": "judge", "server_groups": [{"num_gpus": "2", "worker_type": "x", "size": 1}]}
    assert len(problems(written(wrong, 3, FLEET))) == 4


@pytest.mark.parametrize("text", ["", "[]", "vllm: 1", "{vllm: {eval: 2}}", "\x00", "a: ["])
def test_what_is_no_layout_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(text)
    (problem,) = problems(Namespace(**FLAGS, vllm_config=str(path)))
    assert problem.startswith(f"--vllm-config {path}: cannot be read")


# --- the engines' settings ------------------------------------------------------------------------


def settings(args: Namespace) -> dict[str, Any]:
    group = eval_group(args)
    assert group is not None
    return dict(group.settings)


def test_the_yaml_is_stronger_than_the_fleets_own_flags_and_these_than_the_rollouts(
    written: Any,
) -> None:
    flags = {
        "vllm_max_model_len": 1024, "eval_vllm_max_model_len": 2048,
        "vllm_dtype": "float16", "eval_vllm_dtype": "bfloat16",
        "vllm_seed": 7, "eval_vllm_seed": None,
    }  # fmt: skip
    overrides = {"max-model-len": 4096, "max_num_seqs": 8}
    fleet = {**FLEET, "server_groups": [{**GROUP, "overrides": overrides}]}
    args = written(ROLLOUT, fleet, **flags)
    assert settings(args) == {
        "max_model_len": 4096, "dtype": "bfloat16", "seed": 7, "max_num_seqs": 8
    }  # fmt: skip
    rollout = vllm_layout(args).models[0].groups[0]
    assert rollout.settings == {"max_model_len": 1024, "dtype": "float16", "seed": 7}
    args.vllm_config = None
    assert settings(args) == {"max_model_len": 2048, "dtype": "bfloat16", "seed": 7}


@pytest.mark.parametrize(("per_engine", "inherited"), [(2, True), (1, False)])
def test_settings_tied_to_the_tp_size_are_not_inherited_across_different_ones(
    per_engine: int, inherited: bool
) -> None:
    args = Namespace(
        **FLAGS,
        rollout_num_gpus_per_engine=2,
        eval_num_gpus_per_engine=per_engine,
        vllm_disable_custom_all_reduce=True,
        vllm_max_model_len=1024,
    )
    assert settings(args)["max_model_len"] == 1024
    assert ("disable_custom_all_reduce" in settings(args)) is inherited
    args.eval_vllm_disable_custom_all_reduce = False
    assert settings(args)["disable_custom_all_reduce"] is False


def test_what_the_fleet_sets_itself_is_not_inherited_and_must_not_be_overridden() -> None:
    args = Namespace(**FLAGS, vllm_port=80, vllm_load_format="dummy", vllm_router_port=1)
    assert settings(args) == {}
    args.eval_vllm_load_format = "auto"
    assert settings(args) == {"load_format": "auto"}
    args.eval_vllm_port = 80
    assert problems(args) == [
        "--eval-vllm-* sets port, which the eval fleet sets itself: remove it"
    ]
