"""The reader inside vLLM's workers: what it gives, what it counts, and what it does meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.snapshots import checkpoints
from vime.eval.fleet import tensor_reader
from vime.eval.fleet.host_memory import HostMemory
from vime.eval.fleet.tensor_reader import TensorReader
from vime.eval.snapshot.manifest import Manifest
from vime.eval.snapshot.weights import WeightsError

__all__ = ["checkpoints"]  # a fixture


@pytest.fixture
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "AHEAD_BYTES", 0)


class Reads:
    """Notes which tensors were read, and on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self._more = threading.Condition()
        read: Any = TensorReader._read

        def noted(*args: Any) -> Any:
            content = read(*args)
            with self._more:
                self.threads.append(threading.current_thread().name)
                self._more.notify_all()
            return content

        monkeypatch.setattr(TensorReader, "_read", noted)

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.threads) >= count, 60)


def test_the_reader_gives_every_tensor_and_the_digest_of_the_manifest(checkpoints: Path) -> None:
    import torch
    from safetensors.torch import load_file

    reader = TensorReader(checkpoints / "whole")
    given = dict(reader)
    wanted = load_file(checkpoints / "whole" / "model.safetensors")
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    manifest = Manifest.of_directory(checkpoints / "whole", "run", 1, owned=False)
    assert reader.digest == manifest.digest
    assert reader.num_bytes == sum(t.numel() * t.element_size() for t in wanted.values())
    assert reader.with_nan == []


def test_with_headers_alone_the_reader_and_the_manifest_agree_without_a_digest(
    checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "whole", tmp_path / "whole")
    manifest = Manifest.of_directory(tmp_path / "whole", "run", 1, owned=False, verify="headers")
    reader = TensorReader(tmp_path / "whole", "headers")
    assert len(dict(reader)) == len(manifest.tensors)
    assert reader.digest == manifest.digest
    os.utime(tmp_path / "whole" / "model.safetensors")  # it was written again
    again = TensorReader(tmp_path / "whole", "headers")
    dict(again)
    assert again.digest != manifest.digest


def test_the_reader_counts_only_what_was_taken(checkpoints: Path) -> None:
    reader = TensorReader(checkpoints / "whole")
    name, _ = next(iter(reader))
    assert list(reader.given) == [name]
    manifest = Manifest.of_directory(checkpoints / "whole", "run", 1, owned=False)
    assert reader.digest != manifest.digest


def test_the_reader_follows_an_index_and_several_files(checkpoints: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoints / "whole")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    reader = TensorReader(tmp_path)
    assert dict(reader).keys() == dict(TensorReader(checkpoints / "whole")).keys()


def test_a_nan_is_found_in_every_kind_of_float_and_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    tensors = {str(kind): torch.ones(3, 5).to(kind) for kind in kinds}
    tensors |= {f"nan {kind}": torch.ones(3, 5).to(kind) for kind in kinds}
    for kind in kinds:
        tensors[f"nan {kind}"][1, 2] = float("nan")
    tensors |= {
        "inf": torch.tensor([float("inf")]),
        "none": torch.ones(0),
        "ints": torch.ones(2).int(),
    }
    tensors["scalar"] = torch.tensor(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path)
    dict(reader)
    assert set(reader.with_nan) == {"scalar", *(f"nan {kind}" for kind in kinds)}
    trusting = TensorReader(tmp_path, look_for_nan=False)
    dict(trusting)
    assert (trusting.with_nan, trusting.digest) == ([], reader.digest)


def test_a_broken_checkpoint_is_refused_before_the_model_is_touched(checkpoints: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        TensorReader(checkpoints / "truncated")
    with pytest.raises(WeightsError):
        TensorReader(checkpoints / "no_weights")


@pytest.mark.usefixtures("one_ahead")
def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    checkpoints: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes((checkpoints / "whole" / "model.safetensors").read_bytes())
    reader = TensorReader(tmp_path)
    tensors = iter(reader)
    next(tensors)
    os.truncate(target, 3000)
    with pytest.raises(ValueError, match="became shorter"):
        list(tensors)


@pytest.mark.usefixtures("one_ahead")
def test_the_next_tensor_is_read_while_the_loader_has_one_and_no_more_than_may_be(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    tensors = iter(TensorReader(checkpoints / "whole"))
    next(tensors)
    reads.wait_for(2)  # nobody asks for the second one
    next(tensors)
    reads.wait_for(3)
    tensors.close()  # type: ignore[attr-defined]  # it waits for the thread
    assert len(reads.threads) == 3
    assert all(name.startswith("vime-reader") for name in reads.threads)


def test_a_loader_that_gives_up_leaves_no_thread(checkpoints: Path) -> None:
    def load() -> None:
        for _ in TensorReader(checkpoints / "whole"):
            raise ValueError("a shape that the model does not have")

    with pytest.raises(ValueError, match="a shape"):
        load()
    assert not [t for t in threading.enumerate() if t.name.startswith("vime-reader")]


@pytest.mark.usefixtures("one_ahead")
def test_a_loader_that_keeps_nothing_costs_the_memory_of_a_few_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({f"w{n}": torch.full((1000,), n) for n in range(50)}, tmp_path / "model.safetensors")
    memory = HostMemory()
    monkeypatch.setattr(tensor_reader, "HostMemory", lambda: memory)
    values = [int(tensor[-1]) for _, tensor in TensorReader(tmp_path)]
    assert sorted(values) == list(range(50))
    assert len(memory._pieces) <= 3


@pytest.mark.parametrize("bound_to_all", [False, True])
def test_a_reading_thread_leaves_the_loader_its_cores_where_there_are_others(
    bound_to_all: bool, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = os.sched_getaffinity(os.getppid())
    own = every if bound_to_all else {min(every)}
    cores: list[set[int]] = []
    read: Any = TensorReader._read

    def noted(*args: Any) -> Any:
        cores.append(os.sched_getaffinity(0))
        return read(*args)

    def load() -> None:
        os.sched_setaffinity(0, own)  # of this thread alone
        dict(TensorReader(checkpoints / "whole"))

    monkeypatch.setattr(TensorReader, "_read", noted)
    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
    assert cores
    assert all(found == (every - own or every) for found in cores)


@pytest.mark.parametrize("named", ["", "core"])
def test_only_the_named_cores_read_and_without_any_the_loader_itself(
    named: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(os.sched_getaffinity(0))
    monkeypatch.setenv("VIME_READER_CORES", str(last) if named else "")
    monkeypatch.setattr(tensor_reader, "AHEAD_BYTES", 1 << 30)
    found: list[tuple[str, set[int]]] = []
    read: Any = TensorReader._read

    def noted(*args: Any) -> Any:
        found.append((threading.current_thread().name, os.sched_getaffinity(0)))
        return read(*args)

    monkeypatch.setattr(TensorReader, "_read", noted)
    reader = TensorReader(checkpoints / "whole")
    for count, _ in enumerate(reader, 1):
        assert named or len(found) == count  # nothing is read before it is asked for
    assert reader.digest == Manifest.of_directory(checkpoints / "whole", "r", 1, owned=False).digest
    own = threading.current_thread().name
    assert {name == own for name, _ in found} == {not named}
    assert not named or all(cores == {last} for _, cores in found)
