"""Several nodes on this machine, each with a staging directory of its own, and a run on them."""

from __future__ import annotations

import argparse
import itertools
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.ray.conftest import ray_settings
from tests.standing import NUM_BLOCKS
from vime.fsm.check import check
from vime.fsm.merge import Merge
from vime.fsm.read import read_trace
from vime.ray.depot import STAGING_VARIABLE

_STORE_BYTES = 150 << 20


class Nodes:
    """A head without GPUs, where the driver is, and nodes that can be taken away.

    Args:
        root: each node's staging directory is ``root/NAME``; the driver's is ``root/driver``.
    """

    def __init__(self, root: Path) -> None:
        from ray.cluster_utils import Cluster

        self.root = root
        self.nodes: dict[str, Any] = {}
        self._names = map("node_{}".format, itertools.count())
        self.cluster = Cluster()
        self._start(num_gpus=0, include_dashboard=False, dashboard_port=free_port())

    def fill_up(self, count: int) -> None:
        """Have at least so many nodes with one GPU each."""
        while len(self.nodes) < count:
            name = next(self._names)
            own = {STAGING_VARIABLE: str(self.root / name)}
            self.nodes[name] = self._start(num_gpus=1, env_vars=own)

    def _start(self, **settings: Any) -> Any:
        """Ray gives a node 30 s, which is little while engines start on the same two cores."""
        for attempt in range(3):
            before = {process.pid for process in psutil.Process().children()}
            try:
                return self.cluster.add_node(
                    num_cpus=2, object_store_memory=_STORE_BYTES, **settings
                )
            except Exception:
                if attempt == 2:
                    raise
                for process in psutil.Process().children():
                    if process.pid not in before:
                        process.kill()
        raise AssertionError("unreachable")

    def name_of(self, node_id: str) -> str:
        return next(name for name, node in self.nodes.items() if node.node_id == node_id)

    def take_away(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def snapshots(self, name: str) -> list[str]:
        directory = self.root / name
        return sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))


@contextmanager
def nodes() -> Iterator[Nodes]:
    """A cluster with this process as its driver; a base and an eval set lie in its root."""
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="vime-nodes-") as root,
        ray_settings(),
    ):
        write_inputs(Path(root))
        found = Nodes(Path(root))
        try:
            ray.init(address=found.cluster.address, log_to_driver=False)
            yield found
        finally:
            ray.shutdown()
            found.cluster.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_inputs(root: Path) -> None:
    """A base and an eval set of 300 prompts."""
    from arithmetic import build_model, build_tokenizer, training_and_held_out, write_eval_set

    tokenizer = build_tokenizer()
    build_model(tokenizer, 0).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    write_eval_set(root / "sums.jsonl", training_and_held_out()[0][:300])


def make_exporter(seed: int) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    from arithmetic import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    return build_model(tokenizer, seed), tokenizer


def arguments(root: Path, run: str, **flags: Any) -> argparse.Namespace:
    """A run's flags, for engines that suit two cores."""
    return argparse.Namespace(
        **{
            "eval_num_gpus": 2,
            "eval_hf_dir": str(root / "driver"),
            "eval_interval": 1,
            "hf_checkpoint": str(root / "base"),
            "eval_prompt_data": ["sums@40", str(root / "sums.jsonl")],
            "eval_run_dir": str(root / run),
            "eval_max_response_len": 4,
            "eval_vllm_dtype": "float32",
            "eval_vllm_max_model_len": 64,
            "eval_vllm_num_gpu_blocks_override": NUM_BLOCKS,
            "eval_start_timeout": 280.0,
        }
        | flags
    )


def problems(run_dir: Path) -> list[Any]:
    """What the invariants' checker says of a run's traces, merged."""
    paths = sorted(run_dir.glob("trace*.jsonl"))
    merged = Merge([read_trace(path) for path in paths])
    found = list(check(merged, ended=True))
    assert merged.num_broken == merged.num_repeated == 0
    return found


def processes_of(root: Path) -> list[psutil.Process]:
    """Whatever was started with the test's directory on its command line (engines: their base)."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        if any(str(root) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found
