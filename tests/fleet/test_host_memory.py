"""Memory is reused when nobody looks at it any more, and never before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime.eval.fleet.host_memory import HostMemory


def test_what_was_let_go_is_used_again() -> None:
    memory = HostMemory()
    first = memory.take(64)
    address = first.data_ptr()
    del first
    assert memory.take(48).data_ptr() == address


KEEP = {
    "itself": lambda piece: piece,
    "a view": lambda piece: piece.view(torch.float32).view(4, 4),
    "a part": lambda piece: piece[10:20],
    "a detached one": lambda piece: piece.detach(),
    "a parameter": lambda piece: torch.nn.Parameter(piece.view(torch.float32)),
    "what its data is": lambda piece: torch.nn.Parameter(torch.empty(16)).data.set_(
        piece.view(torch.float32)
    ),
    "an array": lambda piece: piece.numpy(),
    "an array of a view": lambda piece: piece.view(torch.int16).numpy()[3:5],
}


@pytest.mark.parametrize("kind", KEEP)
def test_what_somebody_keeps_is_never_used_again(kind: str) -> None:
    memory = HostMemory()
    piece = memory.take(64)
    piece.fill_(7)
    address = piece.data_ptr()
    kept: Any = KEEP[kind](piece)
    del piece
    for _ in range(3):
        other = memory.take(64)
        assert other.data_ptr() != address
        other.fill_(9)
        del other
    del kept
    assert address in {memory.take(64).data_ptr(), *(p.data_ptr() for p in memory._pieces)}


def test_a_torch_that_does_not_count_gets_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    memory = HostMemory()
    one = memory.take(64)
    assert memory.take(64).data_ptr() != one.data_ptr()


def test_pieces_that_became_too_small_are_given_up() -> None:
    memory = HostMemory()
    for size in range(1, 100):
        memory.take(size)
    assert [piece.numel() for piece in memory._pieces] == [99]
