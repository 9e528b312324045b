"""A file whose writer was killed ends with a whole line again, and loses nothing that was whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.eval.journal import tail
from vime.eval.journal.tail import mend_tail


@pytest.mark.parametrize(
    ("content", "mended"),
    [
        (b"", b""),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b'{"a":1}\n{"b"', b'{"a":1}\n'),
        (b'{"a":1}\n{"b":2}', b'{"a":1}\n{"b":2}\n'),
        (b'{"a', b""),
        (b'{"a":1}\n\x00\x00\x00', b'{"a":1}\n'),
        (b'{"a":1}\n12', b'{"a":1}\n'),
    ],
)
def test_a_torn_line_is_cut_off_and_a_whole_one_is_ended(
    tmp_path: Path, content: bytes, mended: bytes
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    assert mend_tail(path) == max(0, len(content) - len(mended))
    assert path.read_bytes() == mended


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert mend_tail(tmp_path / "lines") == 0
    assert not (tmp_path / "lines").exists()


@settings(deadline=None)
@given(lines=st.lists(st.integers(0, 40)), torn=st.integers(0, 60), chunk=st.integers(1, 20))
def test_wherever_it_was_torn_the_lines_before_stay(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], torn: int, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "torn"
    whole = b"".join(b"{%s}\n" % (b" " * size) for size in lines)
    path.write_bytes(whole + b"x" * torn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "_CHUNK", chunk)
        assert mend_tail(path) == torn
    assert path.read_bytes() == whole
