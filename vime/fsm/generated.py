"""The command of a page of the docs that is made from code: writes it, or checks it for drift."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(
    wanted: str, argv: Sequence[str] | None, *, prog: str, description: str | None, source: str
) -> int:
    """Write the page where the arguments say or, with ``--check``, compare what is there.

    Args:
        wanted: the page.
        argv: the arguments; those of this process if ``None``.
        prog: the command, for its help.
        description: likewise.
        source: what the page is made from, for whoever has to mend it.

    Returns:
        The exit status: 0 when the page is as it should be.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    if not args.check:
        args.path.write_text(wanted)
        return 0
    if args.path.is_file() and args.path.read_text() == wanted:
        return 0
    sys.stderr.write(f"{args.path} is not what {source} says; run `make docs`\n")
    return 1
