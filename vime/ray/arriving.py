"""Weight files that arrive in pieces: written where they belong, and digested on the way.

Whoever reads a file once more to digest it pays for all its bytes again, on every node.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from vime.eval.snapshot.files import write_at
from vime.eval.snapshot.weights import WeightsError, read_weight_file

_READ_BYTES: Final = 16 << 20
_SUFFIX: Final = ".safetensors"


class ArrivingFile:
    """One file of a known size, whose pieces may come in any order, from several threads.

    Args:
        path: there must be nothing yet.
        size: in bytes.
        digests: whether its tensors are to be digested.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, size: int, *, digests: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._lock = threading.Lock()
        self._num_users = 1  # its owner; everybody who writes is another one
        self._digester: _Digester | None = None
        try:
            os.truncate(self._descriptor, size)
        except OSError:
            os.close(self._descriptor)
            raise
        if digests and path.suffix == _SUFFIX:
            self._digester = _Digester(path, self._descriptor)

    def write(self, piece: Any, offset: int) -> None:
        """Put a piece where it belongs; the interpreter lock is free meanwhile.

        Raises:
            OSError: the disk is full, or the file was closed meanwhile.
        """
        view = memoryview(piece).cast("B")
        with self._lock:
            if not self._num_users:
                raise OSError(errno.EBADF, "given up meanwhile")
            self._num_users += 1
        try:
            write_at(self._descriptor, view, offset)
            if self._digester is not None:
                self._digester.feed(view, offset)
        finally:
            self._leave()

    def digests(self) -> Mapping[str, str]:
        """Tensor → hexadecimal BLAKE3, of those that have come whole and in a known order."""
        return {} if self._digester is None else self._digester.digests

    def close(self, changed_ns: int) -> None:
        """Close it, when the last one who still writes has left.

        Args:
            changed_ns: becomes its time of change, in nanoseconds.
        """
        os.utime(self._descriptor, ns=(changed_ns, changed_ns))
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                os.close(self._descriptor)


class _Digester:
    """Digests a weight file's tensors in the order in which they lie there.

    A piece that comes in its turn is digested from memory; one that comes too early is read from
    the file when its turn has come. Where the first piece does not hold the whole header, nothing
    is digested here.

    Attributes:
        digests: of the tensors that are complete.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._turn = threading.Lock()
        self._position = 0
        self._early: dict[int, int] = {}
        self._spans: deque[tuple[int, int, str]] = deque()
        self._hasher = blake3()
        self._gave_up = False
        self.digests: dict[str, str] = {}

    def feed(self, piece: memoryview, offset: int) -> None:
        """Take a piece that has been written."""
        with self._turn:
            if self._gave_up:
                return
            if offset != self._position:
                self._early[offset] = piece.nbytes
                return
            if offset == 0:
                self._read_header()
            self._digest(piece)
            while not self._gave_up and (count := self._early.pop(self._position, 0)):
                self._digest(memoryview(os.pread(self._descriptor, count, self._position)))

    def _read_header(self) -> None:
        try:
            infos = read_weight_file(self._path)
        except (WeightsError, ValueError):
            self._gave_up = True  # whoever looks at the whole file says what is wrong with it
            return
        spans = sorted((info.start, info.end, name) for name, info in infos.items())
        self._spans.extend(spans)

    def _digest(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        start, end = self._position, self._position + piece.nbytes
        while self._spans and self._spans[0][0] < end:
            first, last, name = self._spans[0]
            self._hasher.update(piece[max(first, start) - start : min(last, end) - start])
            if last > end:
                break
            self.digests[name] = self._hasher.hexdigest()
            self._hasher = blake3()
            self._spans.popleft()
        self._position = end
