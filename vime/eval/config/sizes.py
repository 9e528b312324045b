"""Sizes of files as people write them: ``5GB``, ``512MiB``, ``70000``."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MOST = 10**15
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """How many bytes a size means; ``GB`` is 10⁹ of them and ``GiB`` 2³⁰.

    Raises:
        ValueError: it is no size, none above 0, or too large for any file.
    """
    found = _SIZE.fullmatch(str(text).strip())
    num_bytes = 0 if found is None else float(found[1]) * _UNITS.get(found[2].upper(), 0)
    if not 1 <= num_bytes <= _MOST:  # hundreds of digits are infinite
        raise ValueError(
            f"{text!r:.200}: expected a size above 0, such as 5GB, 512MiB, or bytes, and at most "
            "1000TB"
        )
    return int(num_bytes)
