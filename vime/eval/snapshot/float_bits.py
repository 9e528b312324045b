"""Finds NaNs in the raw bytes of tensors, in one pass that no other thread has to wait for.

Not by torch: its threads are the model's, which is being loaded meanwhile.
"""

from __future__ import annotations

from typing import Any

#: safetensors dtype → its bits as a signed integer, and those of infinity (of the largest finite
#: number where there is none). IEEE 754 and its kin: whatever is above is a NaN, of either sign.
_ABOVE: dict[str, tuple[str, int]] = {
    "BF16": ("i2", 0x7F80),
    "F16": ("i2", 0x7C00),
    "F32": ("i4", 0x7F80_0000),
    "C64": ("i4", 0x7F80_0000),
    "F64": ("i8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("i1", 0x7C),
    "F8_E4M3": ("i1", 0x7E),
}

#: Types with a single NaN, at the place of a negative zero.
_NO_NEGATIVE_ZERO = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")


class NanSearch:
    """Looks for a NaN in a tensor that comes in pieces, which may break its numbers off.

    Args:
        dtype: as safetensors writes it.

    Attributes:
        found: whether there was one so far.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._width = int(_ABOVE[dtype][0][1]) if dtype in _ABOVE else 1
        self._rest = b""
        self.found = False

    def look(self, piece: memoryview) -> None:
        """Take the next bytes."""
        if self._rest:
            missing = self._width - len(self._rest)
            self._rest += piece[:missing]
            piece = piece[missing:]
            if len(self._rest) < self._width:
                return
            self._look(memoryview(self._rest))
        whole = len(piece) - len(piece) % self._width
        self._look(piece[:whole])
        self._rest = bytes(piece[whole:])

    def _look(self, numbers: memoryview) -> None:
        import numpy as np

        if numbers and not self.found:
            self.found = holds_nan(self._dtype, np.frombuffer(numbers, np.uint8))


def holds_nan(dtype: str, content: Any) -> bool:
    """Whether a NaN is among the numbers of a tensor.

    Args:
        dtype: as safetensors writes it; one without NaNs has none.
        content: whole numbers of the tensor: a one-dimensional NumPy array of uint8.
    """
    if not content.size:
        return False
    if dtype in _NO_NEGATIVE_ZERO:
        return int(content.view("i1").min()) == -128
    if dtype == "F8_E8M0":  # exponents alone
        return int(content.max()) == 0xFF
    if dtype not in _ABOVE:
        return False
    signed, limit = _ABOVE[dtype]
    if int(content.view(signed).max()) > limit:
        return True
    # The unsigned integer is largest for the negative numbers furthest from zero.
    unsigned = signed.replace("i", "u")
    sign = 1 << (8 * content.view(unsigned).itemsize - 1)
    return bool(int(content.view(unsigned).max()) > (sign | limit))
