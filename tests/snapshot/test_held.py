"""Weights held still: read and given back only when every device has finished its copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime.eval.snapshot.held import Held, held_bytes, hold
from vime.eval.snapshot.host_buffers import BufferPool


class Event:
    """Stands for a CUDA event: the copy is done when somebody has waited for it."""

    def __init__(self, buffer: torch.Tensor, value: int) -> None:
        self._buffer, self._value = buffer, value
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1
        self._buffer.fill_(self._value)


def held_with_event(pool: BufferPool) -> tuple[Held, Event]:
    held = hold(pool, {"w": torch.zeros(8, dtype=torch.uint8)}, None)
    assert held._buffer is not None
    event = Event(held._buffer.bytes, 7)
    copies: list[Any] = [event]
    held._copies = copies
    return held, event


def test_what_a_device_is_still_copying_is_waited_for_once_before_it_is_read() -> None:
    held, event = held_with_event(BufferPool(1, 1.0))
    assert held.views()["w"].tolist() == [7] * 8
    held.views()
    held.release()
    assert event.num_waits == 1


def test_memory_is_not_given_to_the_next_capture_while_a_device_writes_into_it() -> None:
    pool = BufferPool(1, 1.0)
    held, event = held_with_event(pool)
    held.release()
    assert event.num_waits == 1
    again = hold(pool, {"w": torch.ones(8, dtype=torch.uint8)}, None)
    assert again.views()["w"].tolist() == [1] * 8


def test_a_device_whose_copy_failed_says_so_where_the_weights_are_written() -> None:
    class Failed(Event):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

    pool = BufferPool(1, 0.01)
    held, _ = held_with_event(pool)
    copies: list[Any] = [Failed(torch.empty(0), 0)]
    held._copies = copies
    with pytest.raises(RuntimeError, match="illegal memory access"):
        held.views()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        held.release()
    pool.take(8, pin=False)


def test_the_memory_that_a_capture_takes_is_known_before() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.int8)}
    pool = BufferPool(1, 1.0)
    for dtype in (None, torch.bfloat16):
        held = hold(pool, tensors, dtype)
        assert held._buffer is not None
        assert held_bytes(tensors, dtype) <= held._buffer.bytes.numel()
        held.release()
    assert held_bytes(tensors, None) == 64 + 5
