"""Memory for tensors that are read one after the other: what nobody looks at any more is reused.

Fresh memory costs more than reading into it: the kernel clears each page when it is touched first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NOBODY_ELSE = 2
"""References to a storage that only the pool and the one who counts them hold."""


class HostMemory:
    """Hands out one-dimensional uint8 tensors on the CPU, and takes them back by itself.

    A piece is used again when no other tensor shares its storage: views of any shape and type,
    parameters and arrays made of them count. Whoever keeps one keeps it for good.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A tensor of ``num_bytes`` bytes with whatever was in them."""
        import torch

        free = sorted((p for p in self._pieces if _is_free(p)), key=lambda piece: piece.numel())
        fitting = next((piece for piece in free if piece.numel() >= num_bytes), None)
        if fitting is None:
            if free:  # the largest makes room for one that is larger still
                self._pieces = [piece for piece in self._pieces if piece is not free[-1]]
            fitting = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._pieces.append(fitting)
        return fitting[:num_bytes]


def _is_free(piece: torch.Tensor) -> bool:
    import torch

    storage: Any = piece.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    # A torch that does not say so gets fresh memory each time.
    return count is not None and count(storage._cdata) == _NOBODY_ELSE
