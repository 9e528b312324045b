"""The strict reader of weight files: what is whole is read, what is not is refused and named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime.eval.snapshot.weights import (
    DTYPES,
    INDEX,
    SINGLE,
    WeightsError,
    read_weight_file,
    read_weights,
)


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> Any:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_it_reads_what_the_safetensors_library_wrote(checkpoints: Path) -> None:
    from safetensors import safe_open

    infos = read_weights(checkpoints / "whole")
    with safe_open(checkpoints / "whole" / SINGLE, framework="pt") as file:
        names = set(file.keys())
        assert infos.keys() == names
        for name in names:
            tensor = file.get_tensor(name)
            assert infos[name].shape == tuple(tensor.shape)
            assert DTYPES[infos[name].dtype][1] == str(tensor.dtype).removeprefix("torch.")
            content = (checkpoints / "whole" / SINGLE).read_bytes()
            raw = content[infos[name].start : infos[name].end]
            import torch

            assert raw == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_empty_tensors_and_scalars_are_read(tmp_path: Path) -> None:
    header = {"a": entry(0, 0, "F32", [0, 7]), "b": entry(0, 4, "F32", [])}
    infos = read_weight_file(write_file(tmp_path / SINGLE, header, bytes(4)))
    assert infos["a"].num_bytes == 0
    assert infos["b"].shape == ()


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "an entry that is no object": ({"a": 3}, b"", "makes no sense"),
    "an entry without offsets": ({"a": {"dtype": "U8", "shape": [1]}}, b"0", "makes no sense"),
    "a negative size": ({"a": entry(0, 1, "U8", [-1])}, b"0", "makes no sense"),
    "a size that is no integer": ({"a": entry(0, 1, "U8", [1.0])}, b"0", "makes no sense"),
    "a size that is true": ({"a": entry(0, 1, "U8", [True])}, b"0", "makes no sense"),
    "an unknown dtype": ({"a": entry(0, 1, "U9")}, b"0", "unknown dtype 'U9'"),
    "a shape of another size": (
        {"a": entry(0, 4, "F32", [2])},
        b"0000",
        "F32 .2. does not take the 4 bytes",
    ),
    "a shape beyond all memory": (
        {"a": entry(0, 4, "F32", [2**62] * 40)},
        b"0000",
        "does not take",
    ),
    "dimensions without end": ({"a": entry(0, 1, "U8", [1] * 99)}, b"0", "makes no sense"),
    "half a byte": ({"a": entry(0, 1, "F4", [1])}, b"0", "does not take"),
    "a hole": ({"a": entry(0, 1), "b": entry(2, 3)}, b"000", "hole or overlap"),
    "a hole at the beginning": ({"a": entry(1, 2)}, b"00", "hole or overlap"),
    "an overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"000", "hole or overlap"),
    "too few bytes": ({"a": entry(0, 4)}, b"000", "truncated"),
    "too many bytes": ({"a": entry(0, 4)}, b"00000", "1 bytes too many"),
    "a header that is a list": ([1], b"", "a JSON object was expected"),
    "a header that is no JSON": (b"{'a'}", b"", "not JSON"),
    "a header with a tensor twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"0",
        "header: the key 'a' is there twice",
    ),
    "a header with a tensor twice, once under another spelling": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"\\u0061": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"0",
        "header: the key 'a' is there twice",
    ),
    "a header with a field twice": (
        b'{"a": {"dtype": "U8", "shape": [1], "shape": [1], "data_offsets": [0, 1]}}',
        b"0",
        "header: the key 'shape' is there twice",
    ),
    "metadata that is a number": ({"__metadata__": 5, "a": entry(0, 1)}, b"0", "__metadata__"),
    "metadata with a number": ({"__metadata__": {"a": 1}, "a": entry(0, 1)}, b"0", "__metadata__"),
    "a header that begins with a blank": (b' {"a": []}', b"", "begin with a brace"),
    "offsets that are true": ({"a": entry(False, True)}, b"0", "makes no sense"),
    "offsets that are no integers": ({"a": entry(0.0, 1.0)}, b"0", "makes no sense"),
    "a size that is not a number": (
        b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}',
        b"0",
        "not JSON",
    ),
    "a header nested without end": (b"[" * 50_000, b"", "not JSON"),
    "no header": (b"", b"", "header of 0 bytes"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_is_refused_and_named(fault: str, tmp_path: Path) -> None:
    header, data, message = DAMAGED[fault]
    with pytest.raises(WeightsError, match=message) as caught:
        read_weight_file(write_file(tmp_path / "model-3.safetensors", header, data))
    assert "model-3.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 16])
def test_a_file_too_small_for_its_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(WeightsError, match="truncated or no safetensors file"):
        read_weights(tmp_path)


def test_a_pipe_or_directory_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("pipe.safetensors", "directory.safetensors"):
        with pytest.raises(WeightsError, match=f"{name}: no regular file"):
            read_weight_file(tmp_path / name)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_to_a_header_escapes_as_another_error(
    data: st.DataObject, checkpoints: Path, tmp_path: Path
) -> None:
    content = bytearray((checkpoints / "whole" / SINGLE).read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    path = tmp_path / SINGLE
    path.write_bytes(content)
    try:
        infos = read_weight_file(path)
    except WeightsError:
        return
    assert sum(i.num_bytes for i in infos.values()) == len(content) - header_end


# -- several files -----------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_file(tmp_path / "model-00001-of-00002.safetensors", {"a": entry(0, 1)}, b"1")
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"b": entry(0, 2)}, b"12")
    write_index(tmp_path, {"a": 1, "b": 2})
    return tmp_path


def write_index(directory: Path, files: dict[str, Any]) -> None:
    weight_map = {
        name: f"model-{n:05}-of-00002.safetensors" if isinstance(n, int) else n
        for name, n in files.items()
    }
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_one(sharded: Path) -> None:
    infos = read_weights(sharded, alone=True)
    assert {name: info.file[6:11] for name, info in infos.items()} == {"a": "00001", "b": "00002"}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors: missing"):
        read_weights(sharded)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": 2, "b": 1}, "puts a into model-00002.*it is in model-00001"),
        ({"a": 1}, "model-00002-of-00002.safetensors: weights beside"),
        ({"a": 1, "b": 2, "c": 2}, "puts c into model-00002.*and it is in none"),
        ({"a": 1, "b": "../b.safetensors"}, "no file of this kind"),
        ({"a": 1, "b": "/etc/passwd"}, "no file of this kind"),
        ({"a": 1, "b": 7.5}, "no file of this kind"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(
    files: dict[str, Any], message: str, sharded: Path
) -> None:
    write_index(sharded, files)
    with pytest.raises(WeightsError, match=message):
        read_weights(sharded, alone=True)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    write_file(
        sharded / "model-00002-of-00002.safetensors", {"a": entry(0, 1), "b": entry(1, 2)}, b"12"
    )
    with pytest.raises(WeightsError, match=r"a is in model-00001-of-00002\.safetensors too"):
        read_weights(sharded)


def test_weights_that_an_engine_would_load_too_are_refused(checkpoints: Path, whole: Path) -> None:
    (whole / "adapter.safetensors").write_bytes((whole / SINGLE).read_bytes())
    with pytest.raises(WeightsError, match=r"adapter.safetensors: weights beside the model's"):
        read_weights(whole)


def test_files_that_an_index_leaves_out_are_left_alone_in_a_strangers_directory(
    sharded: Path,
) -> None:
    write_file(sharded / "consolidated.safetensors", {"x": entry(0, 1)}, b"1")
    assert read_weights(sharded).keys() == {"a", "b"}
    with pytest.raises(WeightsError, match="consolidated"):
        read_weights(sharded, alone=True)


def test_pickled_weights_alone_get_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"\.bin.*save_pretrained"):
        read_weights(tmp_path)
