"""Training actors on a real cluster as exporters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.snapshots import write_checkpoint
from vime.ray import exporters
from vime.ray.exporters import RayExporter

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("machine")]


class Trainer:
    """A training actor, as far as vime is concerned."""

    def __init__(self, base: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.data += 1

    def export_hf(self, rollout_id: int, directory: str) -> None:
        self.model.save_pretrained(directory)


def test_a_training_actor_exports_what_it_trains_and_nobody_waits_for_it(tmp_path: Path) -> None:
    import ray
    from safetensors.torch import load_file

    base = write_checkpoint(tmp_path / "base")
    actor = ray.remote(Trainer).options(num_cpus=0).remote(str(base))
    target = tmp_path / "exported"
    target.mkdir()
    capture = RayExporter([actor]).capture(7, target)
    later = actor.step.remote()  # waits its turn: the weights stand still until they are written
    capture.write(target)
    capture.release()
    written = load_file(target / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert all((written[name] == before[name]).all() for name in before)
    ray.get(later, timeout=60)


def test_what_an_actor_wrote_on_another_node_is_fetched_and_removed_there(tmp_path: Path) -> None:
    import ray

    source, target = tmp_path / "there", tmp_path / "here"
    contents = {"a.bin": os.urandom(100_000), "sub/empty": b"", "sub/b.bin": os.urandom(10)}
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    target.mkdir()
    node_id = ray.get_runtime_context().get_node_id()
    exporters.fetch(node_id, source, target, {n: len(c) for n, c in contents.items()})
    assert {n: (target / n).read_bytes() for n in contents} == contents
    assert not source.exists()
