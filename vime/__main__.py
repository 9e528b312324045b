"""``python -m vime``: the ``vime`` command."""

from __future__ import annotations

import sys

from vime.cli import main

if __name__ == "__main__":
    sys.exit(main())
