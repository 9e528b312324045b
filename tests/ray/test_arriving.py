"""Files that arrive in pieces: whatever their order, content and digests are those of the original."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.eval.snapshot.manifest import digest_tensors
from vime.eval.snapshot.weights import read_weight_file
from vime.ray.arriving import ArrivingFile

SHAPES = {"a": (40, 25), "b": (3,), "c": (0, 7), "d": (501,), "e": (1,), "f": (0,)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("original") / "model.safetensors"
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, path)
    return path


def pieces_of(path: Path, size: int) -> list[tuple[int, bytes]]:
    content = path.read_bytes()
    return [(offset, content[offset : offset + size]) for offset in range(0, len(content), size)]


def arrive(path: Path, pieces: list[tuple[int, bytes]], *, num_threads: int = 1) -> dict[str, str]:
    file = ArrivingFile(path, sum(len(piece) for _, piece in pieces), digests=True)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda entry: file.write(entry[1], entry[0]), pieces))
    found = dict(file.digests())
    file.close(changed_ns=5_000)
    return found


def expected(original: Path) -> dict[str, str]:
    tensors = digest_tensors(original.parent, read_weight_file(original))
    return {name: tensor.digest for name, tensor in tensors.items()}


@given(size=st.integers(600, 9000), order=st.randoms(use_true_random=False))
def test_pieces_in_any_order_give_the_content_and_its_digests(
    original: Path, size: int, order: object
) -> None:
    pieces = pieces_of(original, size)
    order.shuffle(pieces)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        found = arrive(path, pieces)
        assert path.read_bytes() == original.read_bytes()
        assert path.stat().st_mtime_ns == 5_000
    want = expected(original)
    assert found.items() <= want.items()
    assert {name for name, shape in SHAPES.items() if 0 not in shape} <= found.keys()


def test_pieces_of_many_threads_give_the_same(original: Path, tmp_path: Path) -> None:
    found = arrive(tmp_path / "model.safetensors", pieces_of(original, 700), num_threads=8)
    assert found.items() <= expected(original).items()
    assert len(found) >= 4


def test_a_header_that_comes_in_two_pieces_leaves_the_digests_to_others(
    original: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    assert arrive(path, pieces_of(original, 100)) == {}
    assert path.read_bytes() == original.read_bytes()


def test_a_file_that_was_given_up_takes_no_more_and_no_other_file_suffers(tmp_path: Path) -> None:
    file = ArrivingFile(tmp_path / "model.safetensors", 10, digests=True)
    file.close(changed_ns=0)
    descriptor = os.open(tmp_path / "another", os.O_RDWR | os.O_CREAT)  # with the same number
    with pytest.raises(OSError, match="given up meanwhile"):
        file.write(b"late", 0)
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
