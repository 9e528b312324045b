"""Reads a checkpoint's tensors one by one, and digests the very bytes that it hands out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from blake3 import blake3

from vime.eval.fleet.host_memory import HostMemory
from vime.eval.snapshot.files import open_regular
from vime.eval.snapshot.manifest import ManifestTensor, combined_digest
from vime.eval.snapshot.stamps import FULL, stamps
from vime.eval.snapshot.weights import TensorInfo, dtype_name, read_weights

if TYPE_CHECKING:
    import torch


class TensorReader:
    """Iterates over the weights of a checkpoint, and keeps account of what it gave.

    Each tensor is read into memory that nobody else has, digested there, and given from there:
    nothing that happens to the file afterwards can make the account untrue. Not a map of the file,
    because there a page is only read when it is used.

    Args:
        directory: a Hugging Face checkpoint with safetensors files.
        verify: ``headers`` puts each tensor's stamp in the place of its digest.

    Attributes:
        given: name → type, shape and digest of every tensor that was given so far.
        with_nan: the names of those that hold a NaN.
        num_bytes: their size.

    Raises:
        vime.eval.snapshot.weights.WeightsError: the weight files are not whole.
    """

    def __init__(self, directory: Path, verify: str = FULL) -> None:
        self._directory = directory
        self._infos = read_weights(directory)
        self._stamps = None if verify == FULL else stamps(directory, self._infos)
        self.given: dict[str, ManifestTensor] = {}
        self.with_nan: list[str] = []
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        """What the manifest of a snapshot with just the tensors given says."""
        return combined_digest(self.given)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) file by file, in the order in which they lie there.

        Neighbours in a file belong to one layer, and a loader that waits for whole layers then
        holds few of them at a time. The tensors are on the CPU.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file became shorter, or holds a type that torch lacks.
        """
        memory = HostMemory()
        places = sorted((info.file, info.start, name) for name, info in self._infos.items())
        for _, _, name in places:
            info = self._infos[name]
            data = memory.take(info.num_bytes)
            self._fill(_bytes_of(data), info)
            tensor = data.view(_torch_dtype(info.dtype)).view(info.shape)
            self._account(name, info, data, tensor)
            yield name, tensor
            del data, tensor  # the next one may have the memory, if the loader let go of it

    def _fill(self, buffer: memoryview, info: TensorInfo) -> None:
        with open_regular(self._directory / info.file) as file:
            position = 0
            while position < info.num_bytes:
                count = os.preadv(file.fileno(), [buffer[position:]], info.start + position)
                if not count:
                    raise ValueError(f"{info.file}: it became shorter while it was read")
                position += count

    def _account(
        self, name: str, info: TensorInfo, data: torch.Tensor, tensor: torch.Tensor
    ) -> None:
        if self._stamps is None:
            digest = blake3(_bytes_of(data), max_threads=blake3.AUTO).hexdigest()
        else:
            digest = self._stamps[name]
        self.given[name] = ManifestTensor(info.dtype, info.shape, digest, info.file)
        self.num_bytes += info.num_bytes
        if _holds_nan(tensor):
            self.with_nan.append(name)


def _bytes_of(data: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor on the CPU."""
    return cast(Any, data.numpy()).data  # type: ignore[no-any-return]


def _torch_dtype(dtype: str) -> torch.dtype:
    import torch

    found = getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor of type {dtype}: this torch ({torch.__version__}) has none")
    return found


def _holds_nan(tensor: torch.Tensor) -> bool:
    """One pass without a copy: least and greatest of numbers among which is a NaN are NaN."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return False
    if tensor.dtype.itemsize == 1:  # torch compares no 8-bit floats
        tensor = tensor.to(torch.float32)
    return any(math.isnan(end) for end in torch.aminmax(tensor))
