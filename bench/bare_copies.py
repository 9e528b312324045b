"""What no way of distributing a snapshot can do without: each node writes and digests its own copy.

As many processes as there are nodes copy the same directory at once, each into one of its own, and
digest it on the way; nothing is sent and nothing is asked. On a machine with fewer cores than that
it takes longer than one copy already, and no distribution can do better there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

_PIECE_BYTES = 16 << 20


def measure(source: Path, targets: Sequence[Path]) -> float:
    """Seconds until every target has its copy of ``source``; the copies are removed again."""
    import shutil

    with ExitStack() as stack:
        copies = []
        for target in targets:
            stack.callback(shutil.rmtree, target, ignore_errors=True)
            command = [sys.executable, "-m", "bench.bare_copies", str(source), str(target)]
            copy = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(copy)
            copies.append(copy)
        for copy in copies:
            assert copy.stdout is not None
            if copy.stdout.readline() != "ready\n":
                raise RuntimeError(f"a copy ended with status {copy.wait()}")
        began = time.perf_counter()
        for copy in copies:
            assert copy.stdin is not None
            copy.stdin.close()
        statuses = [copy.wait() for copy in copies]
        if any(statuses):
            raise RuntimeError("a copy failed")
        return time.perf_counter() - began


def copy_directory(source: Path, target: Path) -> None:
    """Copy the files of a directory through one buffer, and digest them."""
    from blake3 import blake3

    target.mkdir(parents=True)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    print("ready", flush=True)
    sys.stdin.read()
    for file in sorted(source.iterdir()):
        hasher = blake3()
        with file.open("rb", buffering=0) as read, (target / file.name).open("xb", 0) as written:
            os.truncate(written.fileno(), file.stat().st_size)
            while count := read.readinto(buffer):
                written.write(buffer[:count])
                hasher.update(buffer[:count])
        hasher.digest()


if __name__ == "__main__":
    copy_directory(Path(sys.argv[1]), Path(sys.argv[2]))
