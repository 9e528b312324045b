"""Reads safetensors headers strictly: what weight files say that they hold, against their sizes.

The format: eight bytes with the length of a JSON header (little endian), the header (tensor name
→ dtype, shape, data offsets), then the tensors' bytes without a gap. Source: the README of the
safetensors project. Nothing here reads the tensors' bytes, nor needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

from vime.eval.snapshot.files import json_object, open_regular, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""As much as the safetensors library itself accepts."""

MAX_INDEX_BYTES = 256 << 20
MAX_DIMENSIONS = 64

#: safetensors dtype → (bits an element, name that people know it by).
DTYPES: Mapping[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F4": (4, "float4_e2m1"),
    "F6_E2M3": (6, "float6_e2m3"),
    "F6_E3M2": (6, "float6_e3m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}


class WeightsError(ValueError):
    """Weight files are not whole; ``problems`` has one sentence for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a weight file.

    Attributes:
        dtype: as safetensors writes it, a key of :data:`DTYPES`.
        shape: its sizes; empty for a scalar.
        file: the name of its file within the checkpoint directory.
        start, end: its bytes within the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return self.end - self.start


def dtype_name(dtype: str) -> str:
    """``float32`` for ``F32``."""
    return DTYPES[dtype][1] if dtype in DTYPES else dtype


def read_weights(directory: Path, *, alone: bool = False) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint directory, from the headers of its safetensors files.

    With an index the files that it names count, otherwise ``model.safetensors``: what engines
    and ``transformers`` read.

    Args:
        directory: the checkpoint.
        alone: weight files beside those are a fault, whatever an index says.

    Raises:
        WeightsError: there are none, or a file is not whole, or files and index disagree.
    """
    names = {path.name for path in directory.glob("*.safetensors")}
    index: Mapping[str, str] | None = None
    problems: list[str] = []
    if os.path.lexists(directory / INDEX):
        index = _read_index(directory / INDEX)
        wanted = set(index.values())
        problems += [f"{name}: missing, and {INDEX} asks for it" for name in sorted(wanted - names)]
    elif SINGLE in names:
        wanted = {SINGLE}
    else:
        raise WeightsError([_no_weights(directory)])
    if alone or index is None:  # without an index, an engine loads whatever lies there
        problems += [f"{name}: weights beside the model's" for name in sorted(names - wanted)]
    tensors = _read_files(directory, sorted(wanted & names), problems)
    if index is not None and not problems:
        problems += _index_problems(index, tensors)
    if problems:
        raise WeightsError(problems)
    return tensors


def _no_weights(directory: Path) -> str:
    missing = f"{SINGLE}: missing, and so is {INDEX}"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        missing += (
            "; the torch pickles (.bin, .pt) beside them cannot be checked: convert them once "
            "with model.save_pretrained(...)"
        )
    return missing


def _read_files(directory: Path, names: list[str], problems: list[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        try:
            found = read_weight_file(directory / name)
        except WeightsError as error:
            problems += error.problems
            continue
        twice = tensors.keys() & found.keys()
        problems += [f"{name}: {tensor} is in {tensors[tensor].file} too" for tensor in twice]
        tensors |= found
    return tensors


def read_weight_file(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; every byte of it is accounted for.

    Raises:
        WeightsError: the header is none, names an unknown dtype, does not fit the shapes, or does
            not cover the file exactly (a truncated file); the message names the file.
    """
    name = path.name
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = _read_header(file, name, size)
    except OSError as error:
        raise WeightsError([f"{name}: cannot be read: {error.strerror}"]) from None
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError([str(error)]) from None
    tensors = {tensor: _info(name, tensor, entry, data_start) for tensor, entry in header.items()}
    _check_cover(name, tensors.values(), data_start, size)
    return tensors


def _read_header(file: FileIO, name: str, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise WeightsError(
            [f"{name}: truncated or no safetensors file: its {size} bytes do not hold its header"]
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise WeightsError(
            [f"{name}: a header of {length} bytes; expected 2 to {MAX_HEADER_BYTES}"]
        )
    text = file.read(length)
    header = json_object(text, f"{name}: header", unique=True)
    if not text.startswith(b"{"):
        raise WeightsError([f"{name}: its header does not begin with a brace, as the format asks"])
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_text_map(metadata):
        raise WeightsError([f"{name}: the header's __metadata__ does not map strings to strings"])
    return header, 8 + length


def _is_text_map(value: object) -> bool:
    return type(value) is dict and all(type(text) is str for text in value.values())


def _info(file: str, tensor: str, entry: Any, data_start: int) -> TensorInfo:
    """One entry of a header, with its types checked and its size computed from its shape."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]}:
            numbers = (*shape, start, end)
            sound = len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in numbers)
        case _:
            sound = False
    if not sound:
        raise WeightsError([f"{file}: the header's entry of {tensor} makes no sense"])
    if dtype not in DTYPES:
        raise WeightsError([f"{file}: {tensor} has the unknown dtype {dtype!r}"])
    if prod(shape) * DTYPES[dtype][0] != (end - start) * 8:
        raise WeightsError(
            [f"{file}: {tensor}: {dtype} {shape} does not take the {end - start} bytes given"]
        )
    return TensorInfo(dtype, tuple(shape), file, data_start + start, data_start + end)


def _check_cover(file: str, infos: Iterable[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for info in sorted(infos, key=lambda info: (info.start, info.end)):
        if info.start != position:
            raise WeightsError(
                [f"{file}: its tensors leave a hole or overlap at byte {min(position, info.start)}"]
            )
        position = info.end
    if size < position:
        raise WeightsError([f"{file}: truncated: {size} bytes, its header needs {position}"])
    if size > position:
        raise WeightsError([f"{file}: {size - position} bytes too many at its end"])


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json_object(path, MAX_INDEX_BYTES, follow_link=True, unique=True)
    except ValueError as error:
        raise WeightsError([str(error)]) from None
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        raise WeightsError([f"{INDEX}: it has no weight_map"])
    for tensor, file in weight_map.items():
        plain = type(file) is str and file.endswith(".safetensors") and "/" not in file
        if not plain or "\0" in file:
            raise WeightsError([f"{INDEX}: {tensor} is in {file!r}, which is no file of this kind"])
    return weight_map


def _index_problems(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> list[str]:
    actual = {name: info.file for name, info in tensors.items()}
    wrong = sorted(n for n in index.keys() | actual.keys() if index.get(n) != actual.get(n))
    return [
        f"{INDEX}: it puts {name} into {index.get(name, 'no file')}, and it is in "
        f"{actual.get(name, 'none')}"
        for name in wrong[:5]
    ] + ([f"{INDEX}: {len(wrong) - 5} more tensors like these"] if len(wrong) > 5 else [])
