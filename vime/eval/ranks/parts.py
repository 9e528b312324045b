"""Which part of a model's tensors a rank holds, and puts into the files that all of them write."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from vime.eval.snapshot.checkpoint_files import TensorSpec, WeightFile, bytes_of
from vime.eval.snapshot.files import write_at
from vime.eval.snapshot.held import target_dtype
from vime.eval.snapshot.model_state import is_sharded

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor.

    Attributes:
        tensor: this rank's own, a plain one.
        offset: where it begins within the whole, for each dimension.
    """

    tensor: torch.Tensor
    offset: Shape


@dataclass(frozen=True)
class Parts:
    """What one rank holds of a model.

    Attributes:
        whole: name → the whole tensor, the same on every rank.
        own: name → this rank's part; nothing of those that another rank writes.
        interleaved: names of tensors whose parts take turns within the file.
    """

    whole: dict[str, TensorSpec]
    own: dict[str, Part]
    interleaved: frozenset[str]

    @classmethod
    def of(cls, state: Mapping[str, Any], rank: int, size: int, dtype: torch.dtype | None) -> Parts:
        """Split a state; every rank comes to the same split.

        What several ranks hold alike is dealt out among them, so that each copies and writes its
        share of it.

        Args:
            state: name → plain tensor, of which every rank has the same, or ``DTensor``.
            rank: this rank.
            size: how many there are.
            dtype: what floating-point tensors are written in, if not their own.

        Raises:
            ValueError: a placement that is neither a plain shard nor replicated.
        """
        whole, own, interleaved = {}, {}, set()
        loads: dict[int, list[int]] = {}
        for name, tensor in state.items():
            spec = whole[name] = TensorSpec(target_dtype(tensor, dtype), tuple(tensor.shape))
            if is_sharded(tensor):
                part, holder, num_holders = _part_of(name, tensor)
                if any(_sharded_dims(tensor)):
                    interleaved.add(name)
            else:
                part, holder, num_holders = Part(tensor, (0,) * tensor.dim()), rank, size
            load = loads.setdefault(num_holders, [0] * num_holders)
            turn = load.index(min(load))
            load[turn] += spec.num_bytes
            if holder == turn and part is not None and part.tensor.numel():
                own[name] = part
        return cls(whole, own, frozenset(interleaved))

    def digest(self) -> str:
        """The same on all ranks that mean the same tensors."""
        text = {name: [str(spec.dtype), spec.shape] for name, spec in self.whole.items()}
        return hashlib.sha256(orjson.dumps(text)).hexdigest()


def _sharded_dims(tensor: Any) -> list[int]:
    return [p.dim % tensor.dim() for p in tensor.placements if p.is_shard()]


def _part_of(name: str, tensor: Any) -> tuple[Part | None, int, int]:
    """This rank's part of a ``DTensor``; its number among those who hold the same, and how many.

    Along each dimension of the mesh a shard is split as ``torch.chunk`` splits, the outer
    dimensions first; the last ranks may have less, or nothing.
    """
    from torch.distributed.tensor import Shard

    place = tensor.device_mesh.get_coordinate()
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    holder, num_holders = 0, 1
    for axis, placement in enumerate(tensor.placements):
        size = tensor.device_mesh.size(axis)
        mine = 0 if place is None else place[axis]
        if placement.is_replicate():
            holder, num_holders = holder * size + mine, num_holders * size
        elif type(placement) is Shard:
            dim = placement.dim
            each = -(-shape[dim] // size)
            start = min(each * mine, shape[dim])
            offset[dim] += start
            shape[dim] = min(each, shape[dim] - start)
        else:
            raise ValueError(
                f"{name}: placed as {placement}, which vime does not gather; expected Shard or "
                "Replicate (FSDP2 with tensor parallelism on another dimension). Gather the "
                "weights yourself: pass a callable export(rollout_id, directory)"
            )
    if place is None:
        return None, 0, num_holders
    local = tensor.detach().to_local()
    if local.shape != tuple(shape):
        raise ValueError(
            f"{name}: this rank holds {list(local.shape)} of {list(tensor.shape)}, and "
            f"{list(shape)} follow from its placement {tensor.placements}"
        )
    return Part(local, tuple(offset)), holder, num_holders


def create_files(directory: Path, files: list[WeightFile], *, reserve: bool) -> None:
    """Create weight files at their full size, for all ranks to write into.

    Args:
        directory: where to.
        files: which.
        reserve: take their room on the disk now: where they are written through a memory map, a
            full disk would otherwise kill the process.

    Raises:
        OSError: the disk is full, or a file exists.
    """
    for file in files:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(directory / file.name, flags, 0o600)
        try:
            if reserve and file.size:
                os.posix_fallocate(fd, 0, file.size)
            else:
                os.ftruncate(fd, file.size)
            write_at(fd, file.header, 0)
        finally:
            os.close(fd)


def write_parts(
    directory: Path,
    files: list[WeightFile],
    whole: Mapping[str, TensorSpec],
    own: Mapping[str, tuple[torch.Tensor, Shape]],
) -> int:
    """Write this rank's parts to where they belong, and flush them.

    Args:
        directory: where :func:`create_files` was done.
        files: the same.
        whole: name → whole tensor.
        own: name → this rank's part in host memory, and its offset.

    Returns:
        How many bytes those were.

    Raises:
        OSError: a file is gone, or the disk is full.
    """
    num_bytes = 0
    for file in files:
        names = [name for name in file.starts if name in own]
        if not names:
            continue
        fd = os.open(directory / file.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for name in names:
                tensor, offset = own[name]
                _write_part(fd, file, name, whole[name], tensor, offset)
                num_bytes += tensor.nbytes
            os.fsync(fd)
        finally:
            os.close(fd)
    return num_bytes


def _write_part(
    fd: int, file: WeightFile, name: str, whole: TensorSpec, part: torch.Tensor, offset: Shape
) -> None:
    start, shape = file.starts[name], tuple(part.shape)
    if shape[1:] == whole.shape[1:]:  # one run of bytes
        skipped = offset[0] * prod(whole.shape[1:]) * part.element_size() if offset else 0
        write_at(fd, bytes_of(part), start + skipped)
        return
    import torch

    # Many short runs: one native copy instead of a system call for each.
    page = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, start - page + whole.num_bytes, offset=page) as memory:
        place: Any = torch.frombuffer(
            memory, dtype=whole.dtype, count=prod(whole.shape), offset=start - page
        ).view(whole.shape)
        place[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].copy_(part)
        del place  # the map cannot be closed before


def read_back(
    directory: Path, files: list[WeightFile], whole: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors again, one by one, each in host memory of its own.

    Raises:
        OSError: a file cannot be read.
    """
    import torch

    for file in files:
        fd = os.open(directory / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for name, start in file.starts.items():
                tensor = torch.empty(whole[name].shape, dtype=whole[name].dtype)
                content, position = bytes_of(tensor), start
                while content.nbytes:
                    count = os.preadv(fd, [content], position)
                    if not count:
                        raise OSError(f"{file.name} became shorter while it was read")
                    content, position = content[count:], position + count
                yield name, tensor
        finally:
            os.close(fd)
