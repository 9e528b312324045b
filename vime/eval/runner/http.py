"""HTTP to the engines behind one proof: a body out, a status and a body in, on kept connections.

aiohttp, because a client of Python's asyncio alone spends most of its time in its HTTP library,
and this one parses in C: a sixth of the processor time of httpx. It needs asyncio, on which the
runner's process runs; tests on a virtual clock put servers in memory in the place of
:func:`connect`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import aiohttp
import anyio
from yarl import URL

from vime.eval.contracts import PinProof

CONNECT_TIMEOUT_S = 10.0

#: Servers of vLLM close a connection that was idle for 5 s; a request that is sent just then is
#: lost, and asked again only after a backoff.
KEEP_ALIVE_S = 4.0
_CLOSE_TIMEOUT_S = 5.0


class Unreachable(Exception):
    """No whole answer came over the connection; another attempt may get one."""


class Post(Protocol):
    """Makes requests."""

    async def __call__(self, path: str, body: bytes) -> tuple[int, bytes]:
        """One request with a body of JSON → the answer's status and body.

        It has no deadline of its own but that of connecting: an answer may take long to begin.

        Raises:
            Unreachable: no connection, or none that lasted until the end of the answer.
        """


Connect = Callable[[PinProof], AbstractAsyncContextManager[Post]]
"""Opens the way to the engines of a proof, with its key."""


class _Request(aiohttp.ClientRequest):
    """Takes no kept connection on which an answer lies already: it would be taken for this one's.

    aiohttp looks for that when a connection is given back, and not when it is taken again.
    """

    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        protocol = conn.protocol
        if protocol is not None and protocol.should_close:
            raise aiohttp.ServerDisconnectedError("the server sent what nobody had asked for")
        return await super().send(conn)


@asynccontextmanager
async def connect(proof: PinProof) -> AsyncIterator[Post]:
    """The network's :data:`Connect`: one pool of connections, closed on leaving.

    A connection that was cancelled or failed in the middle of an answer is never used again.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if proof.api_key is not None:
        headers["Authorization"] = f"Bearer {proof.api_key}"
    session = aiohttp.ClientSession(
        # No limit: whoever asks decides how many requests are in flight.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # nothing compressed is asked for
        request_class=_Request,
        trust_env=False,  # a proxy for the outside world does not know our loopback
    )
    base = proof.base_url.rstrip("/")
    urls: dict[str, URL] = {}

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        url = urls.get(path) or urls.setdefault(path, URL(base + path))
        try:
            async with session.post(url, data=body, allow_redirects=False) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{_kind(error)}: {error}") from error

    try:
        yield post
    finally:
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            await session.close()


def _kind(error: Exception) -> str:
    """What failed, in a word."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "ConnectTimeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "ConnectError"
    return type(error).__name__
