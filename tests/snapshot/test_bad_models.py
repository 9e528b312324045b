"""Models that cannot be captured as they are: a clear error or a right snapshot, never a wrong one."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.driver import namespace
from tests.snapshot.test_export import assert_equal, assert_equal_weights, export
from tests.snapshots import make_model, make_tokenizer, write_checkpoint
from vime.eval import ConfigError, EvalDispatcher
from vime.eval.snapshot import memory
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.export import TransformersExporter
from vime.eval.snapshot.verify import SnapshotInvalid, verify

GIB = 1 << 30


def flags(tmp_path: Path, **more: Any) -> Namespace:
    base = str(write_checkpoint(tmp_path / "base"))
    return namespace(str(tmp_path / "run"), str(tmp_path / "staging"), base, **more)


def test_a_model_whose_captures_do_not_fit_into_memory_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    size = TransformersExporter(model).capture_bytes()
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * size - 1)
    monkeypatch.setattr(memory, "is_in_memory", lambda _: False)
    with pytest.raises(ConfigError, match=r"--eval-max-captures 3: .* GiB of memory are needed"):
        EvalDispatcher.from_args(flags(tmp_path, eval_max_captures=3), exporter=model)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "staging").iterdir())


def test_captures_and_snapshots_that_are_both_in_memory_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exporter:
        max_captures = 2

        def capture_bytes(self) -> int:
            return 2 * GIB

    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GIB)
    memory.check_captures(Exporter(), snapshots_bytes=6 * GIB)
    with pytest.raises(ValueError, match=r"10\.50 GiB .* 2 × 2\.00 GiB .* 6\.50 GiB .*snapshots"):
        memory.check_captures(Exporter(), snapshots_bytes=6 * GIB + GIB // 2)
    with pytest.raises(ValueError, match="in each of 4 processes"):
        memory.check_captures(Exporter(), num_ranks=4)
    memory.check_captures(object(), snapshots_bytes=100 * GIB)


def test_memory_file_systems_are_told_from_disks() -> None:
    assert memory.is_in_memory(Path("/dev/shm/evals"))
    assert not memory.is_in_memory(Path("/proc/self"))


def test_memory_that_is_not_there_at_the_capture_skips_the_point_and_not_the_next_one(
    tmp_path: Path,
) -> None:
    """Training has taken it meanwhile."""
    model = make_model()
    exporter = TransformersExporter(model)
    _grow(model)
    with pytest.raises(RuntimeError, match="memory"):
        exporter.capture(1, tmp_path)
    del model.huge
    assert export(exporter, tmp_path / "step_2").is_dir()


def _grow(model: Any) -> None:
    """A parameter of which the one element is repeated: no machine has memory for a copy of it."""
    model.huge = torch.nn.Parameter(torch.zeros(1).expand(1 << 50))


def test_one_parameter_on_the_meta_device_is_named_at_the_start(tmp_path: Path) -> None:
    model = make_model()
    model.model.norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: on the meta device"):
        EvalDispatcher.from_args(flags(tmp_path), exporter=model)


def test_a_quantised_module_within_the_model_is_named(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        """As int8 layers keep their weights: as an object beside the tensors of the state."""

        def get_extra_state(self) -> Any:
            return {"packed": b"\0" * 8, "scale": 0.1}

        def set_extra_state(self, state: Any) -> None:
            raise NotImplementedError

    model = make_model()
    model.lm_head = Packed()
    with pytest.raises(ValueError, match=r"lm_head\._extra_state: of the kind dict"):
        TransformersExporter(model).capture(1, tmp_path)


def test_a_compiled_model_is_written_as_the_plain_one(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "expected")
    compiled = torch.compile(model, backend="eager")
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    assert_equal(export(TransformersExporter(compiled), tmp_path / "ours"), tmp_path / "expected")


def test_a_head_that_is_tied_by_config_but_not_in_fact_is_refused(tmp_path: Path) -> None:
    """An engine would tie it again, and serve other weights than those that are trained."""
    base = BaseSpec.read(write_checkpoint(tmp_path / "base", tie_word_embeddings=True))
    model = make_model(tie_word_embeddings=True)
    weight = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(weight)
    exporter = TransformersExporter(model, make_tokenizer())
    sealed(export(exporter, tmp_path / "step_1"), base)  # it is equal still: nothing is wrong
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(SnapshotInvalid, match=r"lm_head\.weight"):
        sealed(export(exporter, tmp_path / "step_2"), base)


def sealed(snapshot: Path, base: BaseSpec) -> None:
    """Describe and verify, as the store does."""
    from vime.eval.snapshot.manifest import Manifest

    verify(
        snapshot, base, manifest=Manifest.of_directory(snapshot, "run", 1, owned=False), owned=False
    )


def test_a_parameter_that_changes_its_dtype_between_points_is_written_as_it_is_now(
    tmp_path: Path,
) -> None:
    base = BaseSpec.read(write_checkpoint(tmp_path / "base"))
    model = make_model()
    exporter = TransformersExporter(model, make_tokenizer(), max_captures=1)
    verify(export(exporter, tmp_path / "step_1"), base, owned=False)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    changed = export(exporter, tmp_path / "step_2")
    model.save_pretrained(tmp_path / "expected")
    assert_equal_weights(changed, tmp_path / "expected")
    with pytest.raises(SnapshotInvalid, match=r"float32 instead of bfloat16: model\.norm\.weight"):
        verify(changed, base, owned=False)
    model.bfloat16()
    verify(export(exporter, tmp_path / "step_3"), base, owned=False)


def test_a_full_staging_directory_is_an_error_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.writev

    def full(fd: int, views: Any) -> int:
        if sum(view.nbytes for view in views) > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(fd, views)

    monkeypatch.setattr(os, "writev", full)
    exporter = TransformersExporter(make_model(), max_captures=1, buffer_timeout_s=0.01)
    (tmp_path / "step_1").mkdir()
    capture = exporter.capture(1, tmp_path / "step_1")
    with pytest.raises(OSError, match="No space left") as raised:
        capture.write(tmp_path / "step_1")
    assert raised.value.errno == errno.ENOSPC
    capture.release()
    exporter.capture(2, tmp_path).release()
