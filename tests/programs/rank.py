"""One rank of a training run with gloo, for the tests: rank.py SCENARIO ROOT, as torchrun starts it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.snapshots import SHAPE, make_model, make_tokenizer, write_checkpoint
from vime.eval import ConfigError, DistributedEvalDispatcher
from vime.eval.ranks.board import Board
from vime.eval.ranks.exporter import ShardedExporter

BACKEND = "tests.programs.backend.NormBackend"


# -- models ------------------------------------------------------------------------------------


def shard(model: Any) -> Any:
    """As people use FSDP2: each layer, then what is around them."""
    for layer in (model.model if hasattr(model, "model") else model.transformer).children():
        for block in layer if isinstance(layer, torch.nn.ModuleList) else ():
            fully_shard(block)
    return fully_shard(model)


def uneven() -> Any:
    """Odd sizes, and first dimensions that are smaller than the number of ranks."""
    model = make_model(1)
    model.register_parameter("one_row", torch.nn.Parameter(torch.randn(1, 5).bfloat16()))
    model.register_parameter("odd_rows", torch.nn.Parameter(torch.randn(7, 3).bfloat16()))
    return model


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=64, n_layer=2, n_head=2, **special))


def replicated_shards(model: Any) -> Any:
    """Hybrid sharding: the ranks hold the same shards."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    return fully_shard(model, mesh=mesh)


def by_columns(model: Any) -> Any:
    """Tensor parallelism: matrices split along their second dimension, vectors on every rank."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(1) if parameter.dim() > 1 else Replicate()
            whole = distribute_tensor(parameter.data, mesh, [placement])
            setattr(module, name, torch.nn.Parameter(whole))
    return model


def replicated(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "fully_shard": (lambda: make_model(1), shard),
    "tied": (lambda: make_model(1, tie_word_embeddings=True), shard),
    "uneven": (uneven, shard),
    "fused_experts": (mixtral, shard),
    "buffers": (gpt2, shard),
    "hybrid": (lambda: make_model(1), replicated_shards),
    "columns": (lambda: make_model(1), by_columns),
    "data_parallel": (lambda: make_model(1), replicated),
}


def exports(root: Path) -> dict[str, Any]:
    """Capture every kind of model, change all parameters, and only then write."""
    moved = {}
    for kind, (make, distribute) in MODELS.items():
        model = make()
        if dist.get_rank() == 0:
            model.save_pretrained(root / f"{kind}_expected")
        model = distribute(model)
        moved[kind] = export(model, root / kind)
    model = shard(make_model(1))
    moved["files"] = export(model, root / "files", max_shard_bytes=70_000)
    half = shard(make_model(1).float())
    moved["half"] = export(half, root / "half", dtype="bfloat16")
    return moved


def export(model: Any, directory: Path, **settings: Any) -> int:
    """Returns how many bytes this rank has copied."""
    board = Board()
    exporter = ShardedExporter(board, model, make_tokenizer(), timeout_s=60, **settings)
    capture: Any = None
    if board.leads:
        directory.mkdir()
        capture = exporter.capture(1, directory)
    else:
        exporter.follow(1)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(1.0)
    if capture is not None:
        capture.write(directory)
        capture.release()
    pool = exporter._pool
    with pool._changed:
        assert pool._changed.wait_for(lambda: pool._num_taken == 0, 60)
    dist.barrier()
    exporter.close()
    return int(pool._free[0].bytes.numel())


# -- runs --------------------------------------------------------------------------------------


class Run:
    """A small run on this rank: the norm's first weight is the step, and NormBackend scores it."""

    def __init__(self, root: Path, **flags: Any) -> None:
        self.root = root
        own = {"die_at": -1, "hang_at": -1, "skip_at": -1, "fifo": None}
        defaults = {
            "eval_run_dir": str(root / "run"),
            "eval_hf_dir": str(root / "staging"),
            "eval_interval": 1,
            "eval_function_path": BACKEND,
            "eval_start_timeout": 60.0,
        }
        self.args = argparse.Namespace(**{**own, **defaults, **flags})
        self.model = shard(make_model(1))

    def dispatcher(self) -> DistributedEvalDispatcher:
        return DistributedEvalDispatcher.from_args(
            self.args, model=self.model, tokenizer=make_tokenizer()
        )

    def set_step(self, step: int) -> None:
        with torch.no_grad():
            self.model.model.norm.weight.to_local().fill_(float(step))


def outcomes_of(dispatcher: DistributedEvalDispatcher, **limits: Any) -> list[Any]:
    return [
        [o.rollout_id, o.state, o.reason, o.metrics.get("eval/norm"), o.detail]
        for o in sorted(dispatcher.drain(**limits), key=lambda outcome: outcome.rollout_id)
    ]


def whole_run(root: Path) -> Any:
    run = Run(root)
    with run.dispatcher() as dispatcher:
        dispatcher.wait_until_ready()
        for step in range(1, 5):
            run.set_step(step)
            dispatcher.at_step(step)
            dispatcher.dispatch(step)
            run.set_step(1000)
        return outcomes_of(dispatcher)


def dropped_points(root: Path) -> Any:
    """Rank 0 drops most of these points; the others' memory must come back for the last one."""
    run = Run(root, eval_overflow_policy="skip", eval_max_in_flight=1, eval_max_captures=1)
    with run.dispatcher() as dispatcher:
        for step in range(1, 9):
            run.set_step(step)
            dispatcher.dispatch(step, force=step == 8)
        return outcomes_of(dispatcher)


def failing_rank(root: Path) -> Any:
    """At step 1 rank 1 cannot capture."""
    run = Run(root)
    with run.dispatcher() as dispatcher:
        bias = torch.nn.Parameter(torch.zeros(2, device="meta"))
        if dist.get_rank() == 1:
            run.model.register_parameter("bias", bias)
        dispatcher.dispatch(1)
        if dist.get_rank() == 1:
            del run.model.bias
        run.set_step(2)
        dispatcher.dispatch(2)
        return outcomes_of(dispatcher)


def stopped_rank(root: Path) -> Any:
    """Rank 1 is stopped before step 1; the test continues it when rank 0 has told of the end."""
    run = Run(root, eval_export_timeout=10.0)  # the ranks have a second less: they say who is late
    with run.dispatcher() as dispatcher:
        run.set_step(1)
        if dist.get_rank() == 1:
            (root / "stopping").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        handle = dispatcher.dispatch(1)
        if handle is not None:
            assert handle.result(60).reason == "timeout_export"
            (root / "timed_out").write_text("step 1")
        run.set_step(2)
        dispatcher.dispatch(2)
        return outcomes_of(dispatcher)


def dead_rank(root: Path) -> Any:
    """Rank 1 dies with its part of step 1 captured."""
    run = Run(root, eval_export_timeout=4.0)
    dispatcher = run.dispatcher()
    if dist.get_rank() == 1:
        (root / "result_1.json").write_text("null")
        os._exit(0)
    dispatcher.dispatch(1)
    outcomes = outcomes_of(dispatcher)
    (root / "result_0.json").write_text(json.dumps(outcomes))
    dispatcher.close()
    os._exit(0)  # the other end of gloo is gone: leaving in order would wait for it


def absent_rank(root: Path) -> Any:
    """Rank 1 never dispatches step 1, and rank 0 never step 3."""
    run = Run(root, eval_export_timeout=4.0)
    with run.dispatcher() as dispatcher:
        for step in (1, 2) if dist.get_rank() == 0 else (2, 3):
            run.set_step(step)
            dispatcher.dispatch(step)
        return outcomes_of(dispatcher)


def wrong_flags(root: Path) -> Any:
    try:
        Run(root, eval_max_in_flight=0).dispatcher()
    except ConfigError as error:
        return error.problems
    return None


def ci_test(root: Path) -> Any:
    from vime.eval.dispatcher import SkippedPointsError

    run = Run(root, ci_test=True, skip_at=1)
    dispatcher = run.dispatcher()
    dispatcher.dispatch(1)
    try:
        dispatcher.drain()
    except SkippedPointsError as error:
        return [replace(outcome, metrics={}).reason for outcome in error.outcomes]
    finally:
        dispatcher.close()
    return None


def leader_leaves(root: Path) -> Any:
    """Training fails on rank 0, while rank 1 waits for the outcomes."""
    try:
        with Run(root).dispatcher() as dispatcher:
            if dist.get_rank() == 0:
                raise ArithmeticError("the loss is no number")
            dispatcher.drain()
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    return None


def follower_leaves(root: Path) -> Any:
    """Rank 1 closes with its part of step 1 captured, and only then rank 0 dispatches it."""
    dispatcher = Run(root, eval_export_timeout=100.0).dispatcher()
    if dist.get_rank() == 1:
        dispatcher.dispatch(1)
        dispatcher.close()
    dist.barrier()
    if dist.get_rank() == 1:
        return None
    dispatcher.dispatch(1)
    outcomes = outcomes_of(dispatcher)
    dispatcher.close()
    return outcomes


RUNS = (
    whole_run,
    dropped_points,
    failing_rank,
    absent_rank,
    leader_leaves,
    follower_leaves,
    wrong_flags,
    ci_test,
)


def runs(root: Path) -> Any:
    """Several runs, one after the other, in the same processes."""
    found = {}
    for scenario in RUNS:
        own = root / scenario.__name__
        own.mkdir(exist_ok=True)
        found[scenario.__name__] = scenario(own)
    return found


def engine(root: Path) -> Any:
    """A real engine evaluates what both ranks have written."""
    settings = {"tie_word_embeddings": True}
    if dist.get_rank() == 0:
        write_checkpoint(root / "base", **settings)
        (root / "set.jsonl").write_text('{"input": "abc", "label": "d"}\n')
    dist.barrier()
    run = Run(
        root,
        eval_function_path=None,
        eval_num_gpus=1,
        eval_vllm_max_model_len=64,
        eval_max_response_len=4,
        eval_prompt_data=["letters", str(root / "set.jsonl")],
        hf_checkpoint=str(root / "base"),
        eval_start_timeout=100.0,
    )
    run.model = shard(make_model(2, **settings))
    with run.dispatcher() as dispatcher:
        dispatcher.dispatch(1)
        run.set_step(3)
        dispatcher.dispatch(2)
        return [[o.state, o.detail, o.weight_version] for o in dispatcher.drain()]


SCENARIOS = (exports, runs, stopped_rank, dead_rank, engine)


def main() -> None:
    """Run one scenario on this rank, and leave what it returns in ``ROOT/result_RANK.json``."""
    scenario, root = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    by_name = {function.__name__: function for function in SCENARIOS}
    result = by_name[scenario](root)
    (root / f"result_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
