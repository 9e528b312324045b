"""The docs' page on flags is made from their definitions, and has not drifted from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vime.eval.config.flags import FLAGS
from vime.eval.config.flags_doc import main, page

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"

#: Names and defaults that users rely on: they are fixed.
FIXED = {
    "--eval-num-gpus": "`0`",
    "--eval-num-gpus-per-engine": "`1`",
    "--eval-hf-dir": "none",
    "--eval-max-in-flight": "`2`",
    "--eval-overflow-policy": "`backpressure`",
    "--eval-keep-snapshots": "`2`",
}


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `(--[\w-]+)` \| (.+?) \|", page(), re.MULTILINE))


def test_the_page_in_the_repository_has_not_drifted_from_the_flags() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_the_page_has_one_row_for_each_flag() -> None:
    assert sorted(rows()) == sorted(flag.name for flag in FLAGS)


@pytest.mark.parametrize(("name", "default"), FIXED.items())
def test_fixed_names_have_their_fixed_defaults(name: str, default: str) -> None:
    assert rows()[name] == default


def test_check_tells_a_page_that_has_drifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.md"
    assert main([str(path), "--check"]) == 1
    assert "run `make docs`" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert main([str(path), "--check"]) == 0
    path.write_text(path.read_text().replace("`backpressure`", "`skip`"))
    assert main([str(path), "--check"]) == 1
