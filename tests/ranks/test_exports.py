"""What two real ranks write together equals save_pretrained's file of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.programs.rank import MODELS
from tests.ranks.launch import run
from tests.snapshot.test_export import assert_equal_weights, read_all
from vime.eval.snapshot.weights import SINGLE, read_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the exports are, and how many bytes each rank copied for each of them."""
    root = tmp_path_factory.mktemp("ranks")
    return root, run("exports", root)


@pytest.mark.parametrize("kind", MODELS)
def test_all_ranks_together_write_what_one_would(
    kind: str, exported: tuple[Path, list[Any]]
) -> None:
    root, _ = exported
    assert_equal_weights(root / kind, root / f"{kind}_expected")
    expected = (root / f"{kind}_expected" / SINGLE).read_bytes()
    assert (root / kind / SINGLE).read_bytes() == expected
    config = "config.json"
    assert (root / kind / config).read_bytes() == (root / f"{kind}_expected" / config).read_bytes()
    assert (root / kind / "tokenizer.json").is_file()
    assert not list((root / kind).glob(".*"))


@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_copies_its_share_alone(kind: str, exported: tuple[Path, list[Any]]) -> None:
    root, copied = exported
    if kind == "fused_experts":  # some of them are cut in the middle, whatever their size
        whole = sum(t.nbytes for t in read_all(root / kind).values())
    else:
        whole = sum(info.num_bytes for info in read_weights(root / kind).values())
    padding = 64 * 40  # every tensor begins at a multiple of 64 bytes
    assert sum(rank[kind] for rank in copied) <= whole + 2 * padding
    assert max(rank[kind] for rank in copied) <= 0.6 * whole + padding


def test_large_models_are_written_by_all_ranks_in_several_files(
    exported: tuple[Path, list[Any]],
) -> None:
    root, _ = exported
    infos = read_weights(root / "files", alone=True)
    assert len({info.file for info in infos.values()}) > 2
    ours, expected = read_all(root / "files"), read_all(root / "fully_shard_expected")
    assert ours.keys() == expected.keys()
    assert all(bool((ours[name] == expected[name]).all()) for name in expected)


def test_float32_shards_can_be_written_in_the_dtype_of_the_base(
    exported: tuple[Path, list[Any]],
) -> None:
    root, _ = exported
    assert_equal_weights(root / "half", root / "fully_shard_expected")
    assert '"dtype": "bfloat16"' in (root / "half" / "config.json").read_text()
