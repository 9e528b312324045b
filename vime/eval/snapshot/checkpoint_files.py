"""Lays out a model's weights as safetensors files, and writes them straight from host memory.

Every tensor goes to the kernel as it lies, and is digested in the same pass; the interpreter lock
is free meanwhile. Older versions of the safetensors library hold it while they write, which would
stop training. A full disk is an ``OSError`` here: through a memory map, which is no quicker (its
pages are cleared first), it would be a signal that kills the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from vime.eval.contracts import Content
from vime.eval.snapshot.files import write_new
from vime.eval.snapshot.inspection import Inspection
from vime.eval.snapshot.weights import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8
_PIECE_BYTES = 16 << 20

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of a checkpoint is, without its values.

    Attributes:
        dtype: its dtype.
        shape: its sizes, those of the whole tensor where ranks hold parts of it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file that is to be written.

    Attributes:
        name: within the checkpoint directory.
        header: what comes before the tensors' bytes.
        starts: tensor → where its bytes begin in the file, in the order of the file.
        size: of the whole file, in bytes.
    """

    name: str
    header: bytes
    starts: Mapping[str, int]
    size: int


def safetensors_dtype(dtype: torch.dtype, name: str) -> str:
    """``BF16`` for bfloat16.

    Raises:
        ValueError: safetensors has no such dtype; ``name`` says which tensor has it.
    """
    short = str(dtype).removeprefix("torch.")
    if short not in _NAMES:
        raise ValueError(f"{name} has the dtype {short}, which safetensors files cannot hold")
    return _NAMES[short]


def plan_files(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[WeightFile]:
    """Lay tensors out as ``model.safetensors``, or as shards of it.

    Whoever knows the same specs comes to the same files.

    Args:
        specs: name → tensor.
        max_shard_bytes: most bytes of tensors in one file; a larger tensor has its own.

    Raises:
        ValueError: a dtype that safetensors does not know.
    """
    shards = _shards(specs, max_shard_bytes)
    if len(shards) == 1:
        return [_plan_file(SINGLE, specs, shards[0])]
    return [
        _plan_file(f"model-{number:05}-of-{len(shards):05}.safetensors", specs, names)
        for number, names in enumerate(shards, 1)
    ]


def write_index(directory: Path, specs: Mapping[str, TensorSpec], files: list[WeightFile]) -> None:
    """Write the index that several files need; one alone needs none.

    Raises:
        OSError: the disk is full, or there is one.
    """
    if len(files) == 1:
        return
    index = {
        "metadata": {
            "total_parameters": sum(prod(spec.shape) for spec in specs.values()),
            "total_size": sum(spec.num_bytes for spec in specs.values()),
        },
        "weight_map": {name: file.name for file in files for name in file.starts},
    }
    write_new(
        directory / INDEX,
        [orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)],
    )


def write_weights(
    directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int
) -> dict[str, Content]:
    """Write tensors of host memory as ``model.safetensors``, or as shards and their index.

    Args:
        directory: where to; it must hold no weights yet.
        tensors: name → tensor of any shape and strides.
        max_shard_bytes: most bytes of tensors in one file; a larger tensor has its own.

    Returns:
        Tensor → its bytes, as they were handed to the kernel.

    Raises:
        OSError: the disk is full, or a file exists.
        ValueError: a dtype that safetensors does not know.
    """
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    files = plan_files(specs, max_shard_bytes)
    contents: dict[str, Content] = {}
    for file in files:
        write_new(directory / file.name, _parts(file, specs, tensors, contents))
    write_index(directory, specs, files)
    return contents


def _shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, filled up in the order given."""
    shards: list[list[str]] = [[]]
    left = max_bytes
    for name, spec in specs.items():
        if spec.num_bytes > left and shards[-1]:
            shards.append([])
            left = max_bytes
        shards[-1].append(name)
        left -= spec.num_bytes
    return shards


def _plan_file(file: str, specs: Mapping[str, TensorSpec], names: list[str]) -> WeightFile:
    # Wide elements first: every tensor then begins at a multiple of its element's size.
    names = sorted(names, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = {}
    end = 0
    for name in names:
        spec = specs[name]
        start, end = end, end + spec.num_bytes
        offsets[name] = start
        header[name] = {
            "dtype": safetensors_dtype(spec.dtype, name),
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    text = len(text).to_bytes(8, "little") + text
    starts = {name: len(text) + start for name, start in offsets.items()}
    return WeightFile(file, text, starts, len(text) + end)


def _parts(
    file: WeightFile,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    contents: dict[str, Content],
) -> Iterator[memoryview]:
    """The file's content piece by piece; what has been taken is digested on the way."""
    yield memoryview(file.header)
    for name in file.starts:
        content = bytes_of(tensors[name])
        inspection = Inspection(safetensors_dtype(specs[name].dtype, name))
        for start in range(0, content.nbytes, _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            inspection.look(piece)
            yield piece
        contents[name] = inspection.content


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a host tensor, in the order of its elements."""
    import torch

    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)
