"""HTTP over real sockets, by hand: a server that does to each request what a test says."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.runner.engine_double import EngineDouble
from vime.eval.runner.http import Unreachable


@dataclass
class Exchange:
    """One request, and the connection that it came on.

    Attributes:
        connection: which one of the server's, from 0.
        headers: their names in lower case.
    """

    writer: asyncio.StreamWriter
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    def say(self, status: int, body: bytes, *headers: str) -> None:
        """A whole answer."""
        self.send(head(status, f"Content-Length: {len(body)}", *headers) + body)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Break the connection off, as the death of a process does."""
        peer: socket.socket = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


def head(status: int, *headers: str) -> bytes:
    """The first lines of an answer."""
    lines = [f"HTTP/1.1 {status} Any", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


@dataclass
class Server:
    """Answers every request as ``behaves``, on as many connections as are opened.

    Attributes:
        seen: every request, in order.
        num_connections: that were opened.
        ends: set when the test is over; what hangs waits for it.
    """

    behaves: Behaviour
    seen: list[Exchange] = field(default_factory=list)
    num_connections: int = 0
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    talks: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = field(default_factory=dict)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        self.talks[writer] = asyncio.current_task()
        try:
            while not writer.is_closing():
                exchange = await _read(reader, writer, number)
                self.seen.append(exchange)
                await self.behaves(exchange)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side has gone, or shall find this one gone
        finally:
            writer.close()

    async def end(self) -> None:
        self.ends.set()
        for writer in self.talks:
            writer.close()
        await asyncio.gather(*filter(None, self.talks.values()))


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
) -> Exchange:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Exchange(writer, number, method, path, headers, body)


@asynccontextmanager
async def serving(
    behaves: Behaviour, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, Server]]:
    """A server on a free port of the loopback; gives its URL."""
    server = Server(behaves)
    listener = await asyncio.start_server(server.talk, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    try:
        async with listener:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}", server
    finally:
        await server.end()


def speaks_for(engine: EngineDouble) -> Behaviour:
    """What the double says, over a socket; where it breaks, the connection does."""

    async def behave(exchange: Exchange) -> None:
        key = exchange.headers.get("authorization")
        try:
            answer = await engine.respond(exchange.method, exchange.path, key, exchange.body)
        except Unreachable:
            exchange.reset()
        else:
            exchange.say(*answer)

    return behave
