"""Exporters: what is written equals save_pretrained's, and is what was captured, not what came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.snapshot.interpreter_lock import leaves_the_lock
from tests.snapshots import SHAPE, make_model, make_tokenizer, write_checkpoint
from vime.eval.contracts import Content
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.checkpoint_files import write_weights
from vime.eval.snapshot.export import CallableExporter, TransformersExporter, as_exporter
from vime.eval.snapshot.host_buffers import BufferPool
from vime.eval.snapshot.manifest import Manifest
from vime.eval.snapshot.verify import verify
from vime.eval.snapshot.weights import SINGLE, read_weights


def export(exporter: Any, directory: Path) -> Path:
    """Capture and write at once."""
    directory.mkdir()
    capture = exporter.capture(1, directory)
    capture.write(directory)
    capture.release()
    return directory


def read_all(directory: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equal(ours: Path, theirs: Path) -> None:
    """The same names, shapes, dtypes and bytes, and the same files otherwise."""
    assert_equal_weights(ours, theirs)
    assert others(ours) == others(theirs)


def assert_equal_weights(ours: Path, theirs: Path) -> None:
    """The same names, shapes, dtypes and bytes."""
    mine, expected = read_all(ours), read_all(theirs)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].shape == tensor.shape, name
        assert torch.equal(
            mine[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def others(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if "safetensors" not in p.name}


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=64, n_layer=2, n_head=2, **special))


def with_odd_parameters() -> Any:
    """Of one transposed parameter the memory is not in the order of its elements."""
    model = make_model(4)
    weight = model.lm_head.weight.data
    model.lm_head.weight.data = weight.t().contiguous().t()
    assert not model.lm_head.weight.is_contiguous()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: make_model(1),
    "float32": lambda: make_model(1).float(),
    "tied": lambda: make_model(1, tie_word_embeddings=True),
    "fused experts": mixtral,
    "buffers and biases": gpt2,
    "odd strides": with_odd_parameters,
}


@pytest.mark.parametrize("kind", MODELS)
def test_it_writes_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "theirs")
    ours = export(TransformersExporter(model), tmp_path / "ours")
    assert_equal(ours, tmp_path / "theirs")
    assert (ours / SINGLE).read_bytes() == (tmp_path / "theirs" / SINGLE).read_bytes()


def test_a_snapshot_is_whole_and_loads_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = BaseSpec.read(write_checkpoint(tmp_path / "base", seed=0))
    model, tokenizer = make_model(7), make_tokenizer()
    snapshot = export(as_exporter((model, tokenizer)), tmp_path / "step_1")
    verify(snapshot, base, owned=False)
    loaded = AutoModelForCausalLM.from_pretrained(snapshot)
    assert loaded.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    words = AutoTokenizer.from_pretrained(snapshot)
    assert words.decode(words.encode("Grüße")) == "Grüße"
    assert words.chat_template == tokenizer.chat_template


def test_the_weights_are_those_of_the_capture_whatever_training_does_next(tmp_path: Path) -> None:
    model = make_model(1)
    model.save_pretrained(tmp_path / "before")
    exporter = TransformersExporter(model)
    snapshot = tmp_path / "step_1"
    snapshot.mkdir()
    capture = exporter.capture(1, snapshot)
    assert not list(snapshot.iterdir()), "training waits for the copy alone"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.config.hidden_size = 63
    capture.write(snapshot)
    capture.release()
    assert_equal(snapshot, tmp_path / "before")


@pytest.mark.parametrize("wrap", ["whole", "a part"])
def test_torch_compile_leaves_no_trace_in_the_names(wrap: str, tmp_path: Path) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    model = make_model(1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs")

    def compiled(module: Any) -> Any:
        wrapper = torch.compile(module, backend="eager")
        assert isinstance(wrapper, OptimizedModule)
        return wrapper

    if wrap == "whole":
        assert_equal(
            export(TransformersExporter(compiled(model)), tmp_path / "ours"), tmp_path / "theirs"
        )
        return
    model.model.layers[0] = compiled(model.model.layers[0])
    assert any("_orig_mod" in name for name in model.state_dict())
    ours = export(TransformersExporter(model), tmp_path / "ours")
    assert_equal(ours, tmp_path / "theirs")


def test_data_parallel_wrappers_are_taken_off(tmp_path: Path) -> None:
    model = make_model(1)
    model.save_pretrained(tmp_path / "theirs")
    ours = export(TransformersExporter(torch.nn.DataParallel(model)), tmp_path / "ours")
    assert_equal(ours, tmp_path / "theirs")


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    model = make_model(1)
    model.save_pretrained(tmp_path / "theirs")
    exporter = TransformersExporter(model, max_shard_bytes=70_000)
    ours = export(exporter, tmp_path / "ours")
    infos = read_weights(ours, alone=True)
    sizes = {f: sum(i.num_bytes for i in infos.values() if i.file == f) for f in file_names(infos)}
    assert len(sizes) > 2
    assert max(sizes.values()) <= 70_000
    assert read_all(ours).keys() == read_all(tmp_path / "theirs").keys()
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(ours)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_what_is_known_of_the_bytes_that_were_written_is_what_a_reader_finds(
    tmp_path: Path,
) -> None:
    model = make_model(1)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    capture = TransformersExporter(model, max_shard_bytes=70_000).capture(1, tmp_path)
    known = capture.write(tmp_path)
    capture.release()
    found = Manifest.of_directory(tmp_path, "run", 1)
    assert found.with_nan == ("model.norm.weight",)
    assert known == {n: Content(t.digest, t.with_nan) for n, t in found.tensors.items()}


def file_names(infos: dict[str, Any]) -> set[str]:
    return {info.file for info in infos.values()}


def test_float32_training_can_export_in_the_dtype_of_its_base(tmp_path: Path) -> None:
    base = BaseSpec.read(write_checkpoint(tmp_path / "base", seed=0))
    model = make_model(1).float()
    exporter = TransformersExporter(model, make_tokenizer(), dtype="bfloat16")
    snapshot = export(exporter, tmp_path / "step_1")
    verify(snapshot, base, owned=False)
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    for name, tensor in read_all(snapshot).items():
        assert torch.equal(tensor, expected[name]), name
    assert '"dtype": "bfloat16"' in (snapshot / "config.json").read_text()
    assert model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "bf16", 3])
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        TransformersExporter(make_model(), dtype=dtype)


def test_without_a_tokenizer_its_files_come_from_where_the_model_was_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    origin = write_checkpoint(tmp_path / "base", seed=0)
    model = AutoModelForCausalLM.from_pretrained(origin)
    snapshot = export(TransformersExporter(model), tmp_path / "step_1")
    verify(snapshot, BaseSpec.read(origin), owned=False)
    assert (snapshot / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()


def test_a_model_of_no_origin_brings_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "here", seed=0)
    monkeypatch.chdir(tmp_path / "here")  # the working directory is no origin
    snapshot = export(TransformersExporter(make_model()), tmp_path / "step_1")
    assert not (snapshot / "tokenizer.json").exists()


# -- buffers -------------------------------------------------------------------------------------


def test_captures_take_turns_with_the_same_memory(tmp_path: Path) -> None:
    exporter = TransformersExporter(make_model(1))
    addresses = []
    for step in range(4):
        capture: Any = exporter.capture(step, tmp_path)
        addresses.append(capture._held._buffer.bytes.data_ptr())
        capture.release()
    assert len(set(addresses)) == 1


def test_a_capture_beside_one_that_is_still_being_written_has_its_own_memory(
    tmp_path: Path,
) -> None:
    model = make_model(1)
    model.save_pretrained(tmp_path / "theirs")
    exporter = TransformersExporter(model)
    first = exporter.capture(1, tmp_path)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    second = exporter.capture(2, tmp_path)
    (tmp_path / "step_1").mkdir()
    first.write(tmp_path / "step_1")
    assert_equal(tmp_path / "step_1", tmp_path / "theirs")
    first.release()
    second.release()


def test_a_capture_waits_for_memory_and_gets_it_when_it_is_released(tmp_path: Path) -> None:
    exporter = TransformersExporter(make_model(1), max_captures=1)
    first: Any = exporter.capture(1, tmp_path)
    pool = exporter._pool
    waiting = threading.Event()
    wait = pool._changed.wait

    def noticed_wait(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    pool._changed.wait = noticed_wait  # type: ignore[method-assign]
    captured: list[Any] = []
    thread = threading.Thread(target=lambda: captured.append(exporter.capture(2, tmp_path)))
    thread.start()
    waiting.wait()
    assert not captured
    first.release()
    thread.join()
    assert len(captured) == 1


def test_a_capture_does_not_wait_for_memory_for_ever(tmp_path: Path) -> None:
    exporter = TransformersExporter(make_model(1), max_captures=1, buffer_timeout_s=0.01)
    held = exporter.capture(1, tmp_path)
    with pytest.raises(TimeoutError, match=r"still being written after 0\.01 s"):
        exporter.capture(2, tmp_path)
    held.release()
    exporter.capture(3, tmp_path).release()


def test_a_capture_that_fails_gives_its_memory_back(tmp_path: Path) -> None:
    model = make_model(1)
    exporter = TransformersExporter(model, max_captures=1, buffer_timeout_s=0.01)
    generation_config = model.generation_config
    del model.generation_config
    for _ in range(2):
        with pytest.raises(AttributeError):
            exporter.capture(1, tmp_path)
    model.generation_config = generation_config
    exporter.capture(2, tmp_path).release()


def test_a_buffer_that_is_too_small_is_replaced() -> None:
    pool = BufferPool(1, 0.01)
    for num_bytes in (10, 1000, 20):
        buffer = pool.take(num_bytes, pin=False)
        assert buffer.bytes.numel() >= num_bytes
        pool.give(buffer)
    with pytest.raises(RuntimeError):
        pool.take(1 << 62, pin=False)
    pool.give(pool.take(10, pin=False))


def test_writing_leaves_the_interpreter_lock_to_training(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(16 << 20, dtype=torch.uint8)}

    def write() -> None:
        (tmp_path / SINGLE).unlink(missing_ok=True)
        write_weights(tmp_path, tensors, 1 << 30)

    assert leaves_the_lock(write)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_every_dtype_is_written_as_the_library_writes_it(dtype: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    raw = torch.arange(48, dtype=torch.uint8)
    if dtype == "bool":
        raw = raw % 2
    tensor = raw.view(getattr(torch, dtype))
    tensors = {"a": tensor, "b": tensor[:0], "c": tensor[0].clone()}
    write_weights(tmp_path, tensors, 1 << 30)
    save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / "b", {"format": "pt"})
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "b").read_bytes()


# -- what cannot be captured ---------------------------------------------------------------------


def test_weights_on_the_meta_device_are_refused_and_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = make_model(1)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*on the meta device"):
        TransformersExporter(model).capture(1, tmp_path)


def test_quantised_weights_are_refused() -> None:
    model = make_model(1)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"weights are quantised.*export"):
        TransformersExporter(model)


def test_adapters_are_refused() -> None:
    model = make_model(1)
    model.peft_config = {"default": object()}
    with pytest.raises(ValueError, match=r"has adapters.*export"):
        TransformersExporter(model)


def test_sharded_tensors_are_refused_and_named(tmp_path: Path) -> None:
    class Sharded(torch.Tensor):
        pass

    model = make_model(1)
    weight = model.lm_head.weight.data.as_subclass(Sharded)
    model.lm_head.weight = torch.nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"lm_head\.weight: of the kind Sharded"):
        TransformersExporter(model).capture(1, tmp_path)


def test_zero_3_shards_are_refused() -> None:
    model = make_model(1)
    model.lm_head.weight.ds_id = 3
    with pytest.raises(ValueError, match="DeepSpeed ZeRO-3"):
        TransformersExporter(model)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a transformers model"):
        TransformersExporter(torch.nn.Linear(2, 2))


# -- a caller's own export -----------------------------------------------------------------------


def test_a_callable_runs_wholly_in_the_capture(tmp_path: Path) -> None:
    calls = []

    def save(rollout_id: int, directory: Path) -> None:
        calls.append((rollout_id, threading.current_thread()))
        (directory / "config.json").write_text("{}")

    exporter = as_exporter(save)
    assert isinstance(exporter, CallableExporter)
    capture = exporter.capture(40, tmp_path)
    assert calls == [(40, threading.current_thread())]
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    capture.write(tmp_path)
    capture.release()
    assert len(calls) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_what_a_callable_raises_reaches_the_dispatcher(tmp_path: Path) -> None:
    def save(rollout_id: int, directory: Path) -> None:
        raise RuntimeError(f"rank 3 is gone at step {rollout_id}")

    with pytest.raises(RuntimeError, match="rank 3 is gone at step 40"):
        as_exporter(save).capture(40, tmp_path)


async def coroutine(rollout_id: int, directory: Path) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("obj", [coroutine, lambda: None, lambda a: None, lambda a, b, c: None])
def test_a_callable_of_another_form_is_refused(obj: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        as_exporter(obj)


@pytest.mark.parametrize("obj", [None, 3, "model", (1, 2, 3)])
def test_what_is_no_exporter_is_refused(obj: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .*tokenizer.* of transformers, a callable"):
        as_exporter(obj)


def test_an_exporter_is_used_as_it_is() -> None:
    exporter = TransformersExporter(make_model())
    assert as_exporter(exporter) is exporter


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer=7: expected one with save_pretrained"):
        as_exporter(make_model(), 7)
