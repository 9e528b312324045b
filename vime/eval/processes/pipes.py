"""The two ends of a pipe as byte streams, on whichever event loop runs."""

from __future__ import annotations

import os

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream


class PipeReader(ByteReceiveStream):
    """The reading end of a pipe; owns the file descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Up to ``max_bytes`` bytes.

        Raises:
            anyio.EndOfStream: every writing end is closed.
            anyio.ClosedResourceError: this end is closed.
        """
        await anyio.lowlevel.checkpoint()
        while self._fd is not None:
            try:
                data = os.read(self._fd, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._fd)
            else:
                if not data:
                    raise anyio.EndOfStream
                return data
        raise anyio.ClosedResourceError

    async def aclose(self) -> None:
        """Close it; a waiting ``receive`` raises ``ClosedResourceError``."""
        _close(self._fd)
        self._fd = None


class PipeWriter(ByteSendStream):
    """The writing end of a pipe; owns the file descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd

    async def send(self, item: bytes) -> None:
        """Write all of ``item``; cancelled half-way, a part of it may have been written.

        Raises:
            anyio.BrokenResourceError: every reading end is closed.
            anyio.ClosedResourceError: this end is closed.
        """
        await anyio.lowlevel.checkpoint()
        view = memoryview(item)
        while view:
            if self._fd is None:
                raise anyio.ClosedResourceError
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._fd)
            except BrokenPipeError as error:
                raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Close it; a waiting ``send`` raises ``ClosedResourceError``."""
        _close(self._fd)
        self._fd = None


def _close(fd: int | None) -> None:
    if fd is not None:
        anyio.notify_closing(fd)
        os.close(fd)
