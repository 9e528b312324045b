"""Holds a copy of tensors in one piece of host memory: the only thing that training waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.eval.snapshot.checkpoint_files import safetensors_dtype
from vime.eval.snapshot.host_buffers import BufferPool, HostBuffer

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in a buffer, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def view(self, buffer: HostBuffer) -> torch.Tensor:
        """The tensor itself."""
        return buffer.bytes[self.start : self.end].view(self.dtype).view(self.shape)


class Held:
    """Tensors as they were at one moment.

    Args:
        pool: where ``buffer`` goes back to.
        buffer: holds their bytes.
        layout: name → where.
        copies: what the copy still waits for: events of CUDA devices.
    """

    def __init__(
        self,
        pool: BufferPool,
        buffer: HostBuffer,
        layout: Mapping[str, Slot],
        copies: list[torch.cuda.Event],
    ) -> None:
        self._pool = pool
        self._buffer: HostBuffer | None = buffer
        self._layout = layout
        self._copies = copies

    def views(self) -> dict[str, torch.Tensor]:
        """The tensors, in host memory; waits until every device has finished its copy."""
        assert self._buffer is not None, "read before its release"
        self._wait()
        return {name: slot.view(self._buffer) for name, slot in self._layout.items()}

    def release(self) -> None:
        """Leave the memory to the next capture."""
        assert self._buffer is not None, "released once"
        try:
            self._wait()  # the next capture must not meet a copy that is still on its way
        finally:
            buffer, self._buffer = self._buffer, None
            self._pool.give(buffer)

    def _wait(self) -> None:
        while self._copies:
            self._copies[-1].synchronize()
            self._copies.pop()


def hold(pool: BufferPool, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Held:
    """Copy tensors into host memory.

    From CUDA devices the copy is only recorded, on a stream of its own: the host goes on at once,
    and what the device's current stream is given next waits for the copy there.

    Args:
        pool: lends the memory.
        tensors: name → tensor on any device.
        dtype: cast floating-point tensors to it; keep theirs if ``None``.

    Raises:
        ValueError: a dtype that safetensors files cannot hold.
        TimeoutError: all of the pool's memory is in use.
        MemoryError: there is no more.
    """
    layout = _lay_out(tensors, dtype)
    on_cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
    buffer = pool.take(_size(layout), pin=on_cuda)
    try:
        return Held(pool, buffer, layout, _copy(tensors, layout, buffer))
    except BaseException:
        pool.give(buffer)
        raise


def held_bytes(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> int:
    """How much memory :func:`hold` takes for them."""
    return _size(_lay_out(tensors, dtype))


def floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name.

    Raises:
        ValueError: it is none, or none for weights.
    """
    if dtype is None:
        return None
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'")
    return found


def target_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is to be written."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _size(layout: Mapping[str, Slot]) -> int:
    return max((slot.end for slot in layout.values()), default=0)


def _lay_out(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, Slot]:
    layout = {}
    end = 0
    for name, tensor in tensors.items():
        target = target_dtype(tensor, dtype)
        safetensors_dtype(target, name)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.numel() * target.itemsize
        layout[name] = Slot(target, tuple(tensor.shape), start, end)
    return layout


def _copy(
    tensors: Mapping[str, torch.Tensor], layout: Mapping[str, Slot], buffer: HostBuffer
) -> list[torch.cuda.Event]:
    """Copy what is in host memory, have the devices copy theirs; what is left to wait for."""
    import torch

    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            source = tensor.detach()
            if source.device.type == "cuda":
                by_device.setdefault(source.device, {})[name] = source
            else:
                layout[name].view(buffer).copy_(source)
        return [_record(device, own, layout, buffer) for device, own in by_device.items()]


def _record(
    device: torch.device,
    tensors: Mapping[str, torch.Tensor],
    layout: Mapping[str, Slot],
    buffer: HostBuffer,
) -> torch.cuda.Event:
    """Record the copy of one device's tensors, between what came before and what comes next."""
    import torch

    cuda: Any = torch.cuda
    current, side = cuda.current_stream(device), cuda.Stream(device)
    side.wait_stream(current)
    with cuda.stream(side):
        for name, source in tensors.items():
            slot = layout[name]
            # Cast there: the copy carries fewer bytes.
            slot.view(buffer).copy_(source.to(slot.dtype), non_blocking=buffer.pinned)
            source.record_stream(side)  # its memory is not given away before that
        copied: torch.cuda.Event = cuda.Event(blocking=True)
        copied.record(side)
    current.wait_event(copied)  # the optimizer's next step comes after it
    return copied
