"""Ports that nobody else is given between the moment they are chosen and the moment of use."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class PortReservation:
    """A free TCP port, held until :meth:`close`, that one server may nevertheless listen on.

    The reservation is a socket that is bound and never listens. On Linux a second socket may
    bind the same port when both have ``SO_REUSEADDR`` and neither listens, which servers set;
    meanwhile the kernel gives the port to nobody who asks for any free one. See socket(7) and
    ip(7), "ip_local_port_range".

    Args:
        host: the address to bind.

    Raises:
        OSError: no port is free, or there is no such address.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let the port go; may be called again."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
