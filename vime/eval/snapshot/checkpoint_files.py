"""Writes a model's weights as safetensors files, straight from host memory.

Every tensor goes to the kernel as it lies, and the interpreter lock is free meanwhile; older
versions of the safetensors library hold it while they write, which would stop training. A full
disk is an ``OSError`` here, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from vime.eval.snapshot.files import write_new
from vime.eval.snapshot.weights import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8

#: torch dtype → safetensors dtype; a torch that lacks one of them cannot hold it either.
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def safetensors_dtype(tensor: torch.Tensor, name: str) -> str:
    """``BF16`` for a bfloat16 tensor.

    Raises:
        ValueError: safetensors has no such dtype; ``name`` says whose it is.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _NAMES:
        raise ValueError(f"{name} has the dtype {dtype}, which safetensors files cannot hold")
    return _NAMES[dtype]


def write_weights(
    directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int
) -> None:
    """Write tensors of host memory as ``model.safetensors``, or as shards and their index.

    Args:
        directory: where to; it must hold no weights yet.
        tensors: name → tensor of any shape and strides.
        max_shard_bytes: most bytes of tensors in one file; a larger tensor has its own.

    Raises:
        OSError: the disk is full, or a file exists.
        ValueError: a dtype that safetensors does not know.
    """
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_shard(directory / SINGLE, tensors, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(directory / file, tensors, names)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {
            "total_parameters": sum(t.numel() for t in tensors.values()),
            "total_size": sum(t.nbytes for t in tensors.values()),
        },
        "weight_map": weight_map,
    }
    write_new(
        directory / INDEX,
        [orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)],
    )


def _shards(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, filled up in the order given."""
    shards: list[list[str]] = [[]]
    left = max_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > left and shards[-1]:
            shards.append([])
            left = max_bytes
        shards[-1].append(name)
        left -= tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    # Wide elements first: every tensor then begins at a multiple of its element's size.
    names = sorted(names, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": safetensors_dtype(tensor, name),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    write_new(path, _parts(text, (tensors[name] for name in names)))


def _parts(header: bytes, tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
    import torch

    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
