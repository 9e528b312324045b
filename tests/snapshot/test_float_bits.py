"""NaNs are found by their bits: every pattern of the small types, and the edges of the large ones."""

from __future__ import annotations

import numpy as np
import pytest

from vime.eval.snapshot.float_bits import NanSearch, holds_nan
from vime.eval.snapshot.weights import dtype_name

SMALL = ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
ONE_AND_NAN = {"F32": "<f4", "F64": "<f8", "C64": "<c8"}


@pytest.mark.parametrize("dtype", SMALL)
def test_every_pattern_is_a_nan_where_torch_says_so(dtype: str) -> None:
    import torch

    width = 2 if dtype.endswith("F16") else 1
    patterns = np.arange(1 << 8 * width, dtype=f"u{width}")
    numbers = torch.from_numpy(patterns.view(f"i{width}")).view(getattr(torch, dtype_name(dtype)))
    wanted = torch.isnan(numbers.to(torch.float32)).tolist()
    found = [holds_nan(dtype, patterns[n : n + 1].view("u1")) for n in range(len(patterns))]
    assert found == wanted
    sound = patterns[~np.array(wanted)]
    assert not holds_nan(dtype, sound.view("u1")), "among all others it stays unseen"
    assert holds_nan(dtype, patterns.view("u1"))


@pytest.mark.parametrize("dtype", ONE_AND_NAN)
def test_a_nan_of_either_sign_is_found_and_infinity_is_none(dtype: str) -> None:
    numbers = np.array([1, -1, 0, -0.0, np.inf, -np.inf, 1e-40], dtype=ONE_AND_NAN[dtype])
    assert not holds_nan(dtype, numbers.view("u1"))
    for nan in (np.nan, -np.nan):
        numbers[3] = nan
        assert holds_nan(dtype, numbers.view("u1"))


def test_types_without_nans_have_none() -> None:
    for dtype in ("I64", "U8", "BOOL", "F4"):
        assert not holds_nan(dtype, np.full(16, 0xFF, "u1"))
    assert not holds_nan("F32", np.zeros(0, "u1"))


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "F8_E5M2"])
def test_a_nan_is_found_wherever_pieces_break_its_bytes(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype_name(dtype))
    sound = torch.ones(6).to(kind)
    numbers = sound.clone()
    numbers[3] = float("nan")
    for tensor, wanted in ((sound, False), (numbers, True)):
        content = b"\0" + tensor.view(torch.uint8).numpy().tobytes()  # not aligned
        content_view = memoryview(content)[1:]
        for length in range(1, len(content)):
            search = NanSearch(dtype)
            for start in range(0, len(content_view), length):
                search.look(content_view[start : start + length])
            assert search.found is wanted, f"in pieces of {length} bytes"
