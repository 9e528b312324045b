"""Host memory that weights are copied into: kept, reused, and never more than a few of them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class HostBuffer:
    """One piece of host memory.

    Args:
        num_bytes: its size.
        pin: lock its pages for fast copies from CUDA devices; where the system refuses that,
            copies are slower and a warning says so.

    Attributes:
        bytes: the memory as a one-dimensional uint8 tensor.
        pin: page-locking was asked for.
        pinned: its pages are locked.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        import torch

        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.pin = pin
        self.pinned = pin and num_bytes > 0 and _lock_pages(self.bytes)
        if self.pinned:
            finalizer = weakref.finalize(self, _unlock_pages, self.bytes)
            finalizer.atexit = False  # CUDA may be gone by then, and so are the pages


def _lock_pages(memory: torch.Tensor) -> bool:
    """Register plain memory with CUDA: torch's own pinned tensors round up to a power of two."""
    code = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        log.warning(
            "%.1f GB of host memory could not be page-locked (CUDA error %d): captures of the "
            "weights will be slower; raise the limit of locked memory (ulimit -l)",
            memory.numel() / 1e9,
            code,
        )
    return not code


def _unlock_pages(memory: torch.Tensor) -> None:
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


class BufferPool:
    """A few buffers that captures take turns with.

    Args:
        max_buffers: how many there may be at once; each is as large as the weights.
        timeout_s: how long :meth:`take` waits for one to come back.
    """

    def __init__(self, max_buffers: int, timeout_s: float) -> None:
        self._max_buffers = max_buffers
        self._timeout_s = timeout_s
        self._free: list[HostBuffer] = []
        self._num_taken = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        """A buffer of at least ``num_bytes`` bytes; waits while all are in use.

        Raises:
            TimeoutError: none came back in time.
            RuntimeError, MemoryError: the machine has no such memory.
        """
        with self._changed:
            self._wait_for_one()
            self._num_taken += 1
            buffer = self._free.pop() if self._free else None
        if buffer is not None and buffer.bytes.numel() >= num_bytes and buffer.pin >= pin:
            return buffer
        del buffer  # before the larger one is made
        try:
            return HostBuffer(num_bytes, pin=pin)
        except BaseException:
            with self._changed:
                self._num_taken -= 1
                self._changed.notify()
            raise

    def _wait_for_one(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._num_taken == self._max_buffers:
            if not self._changed.wait(deadline - time.monotonic()):
                raise TimeoutError(
                    f"the last {self._max_buffers} captured weights are still being written "
                    f"after {self._timeout_s:g} s: the staging directory is slower than the "
                    "evals are due, or its disk hangs"
                )

    def give(self, buffer: HostBuffer) -> None:
        """Hand a buffer back for the next capture."""
        with self._changed:
            self._num_taken -= 1
            self._free.append(buffer)
            self._changed.notify()
