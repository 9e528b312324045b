"""A server that answers as an engine and as a router do, after a wait instead of a computation.

A program of its own, so that nothing of an engine's work shares the trainer's interpreter:
``simulated_engine.py PORT STATE SECONDS TOKENS``. Engine and router are two such processes that
share the file STATE, which holds the weight version: what one was told, the other answers with.
An answer of TOKENS tokens takes SECONDS; one of a single token, a probe, takes no time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.parse
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
_LIMIT = 1 << 24


class SimulatedEngine:
    """The routes that the supervisor and the evaluation use.

    Args:
        state: the file with the weight version.
        seconds: how long an answer takes.
        num_tokens: of an answer, where fewer are not asked for.
    """

    def __init__(self, state: Path, seconds: float, num_tokens: int) -> None:
        self._state = state
        self._seconds = seconds
        self._num_tokens = num_tokens
        self._workers: dict[str, Answer] = {}
        self._generated = 0
        self._routes: dict[tuple[str, str], Callable[[Answer], Answer]] = {
            ("POST", "/collective_rpc"): self._load,
            ("POST", "/update_weight_version"): self._set_version,
            ("GET", "/weight_info"): lambda _: {"weight_version": self._version()},
            ("GET", "/workers"): lambda _: {"workers": list(self._workers.values())},
            ("POST", "/workers"): self._add_worker,
        }

    async def answer(self, method: str, path: str, body: Answer) -> bytes:
        """The body of the answer to one request."""
        if path == "/metrics":
            return f"vllm:generation_tokens_total {self._generated}\n".encode()
        if path == "/inference/v1/generate":
            return json.dumps(await self._generate(body)).encode()
        if path == "/v1/completions":
            return json.dumps(await self._complete(body)).encode()
        if method == "DELETE" and path.startswith("/workers/"):
            self._workers.pop(urllib.parse.unquote(path.removeprefix("/workers/")), None)
            return b"{}"
        route = self._routes.get((method, path), _agree)
        return json.dumps(route(body)).encode()

    def _version(self) -> str:
        return self._state.read_text() if self._state.exists() else "default"

    def _set_version(self, body: Answer) -> Answer:
        part = self._state.with_suffix(f".{id(self)}")
        part.write_text(body["new_version"])
        part.replace(self._state)
        return {}

    def _load(self, body: Answer) -> Answer:
        """Every order to load is obeyed in no time, and to the letter."""
        digest = body["args"][1]
        found = {"digest": digest, "num_tensors": 1, "num_bytes": 1, "unloaded": [], "with_nan": []}
        return {"results": [found]}

    def _add_worker(self, body: Answer) -> Answer:
        self._workers[body["url"]] = {"url": body["url"], "is_healthy": True, "load": 0}
        return {}

    async def _complete(self, body: Answer) -> Answer:
        """The same, as text, for clients that know nothing of tokens."""
        await asyncio.sleep(self._seconds)
        num_tokens = min(int(body["max_tokens"]), self._num_tokens)
        choice = {"index": 0, "finish_reason": "length", "text": "H" * num_tokens}
        return {"choices": [choice]}

    async def _generate(self, body: Answer) -> Answer:
        sampling = body["sampling_params"]
        wanted = int(sampling.get("max_tokens", self._num_tokens))
        is_probe = "logprobs" in sampling
        num_tokens = wanted if is_probe else min(wanted, self._num_tokens)
        if not is_probe:
            await asyncio.sleep(self._seconds)
        self._generated += num_tokens
        span = {"version": self._version(), "start": 0, "end": num_tokens}
        logprob = {"logprob": _logprob(span["version"])}
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [72] * num_tokens,
            "weight_versions": [span],
            "logprobs": {"content": [logprob] * num_tokens} if is_probe else None,
        }
        return {"choices": [choice]}


def _logprob(version: object) -> float:
    """Other weights answer otherwise, and the same ones alike: a version ends with their digest."""
    return -1.0 - zlib.crc32(str(version).rpartition(":")[2].encode()) / 2**32


def _agree(_: Answer) -> Answer:
    return {"success": True, "is_paused": True}


async def serve(port: int, engine: SimulatedEngine) -> None:
    """Answer requests on the loopback interface until the process is ended."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _exchange(engine, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side has gone, as clients may
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port, limit=_LIMIT, backlog=1024)
    async with server:
        await server.serve_forever()


async def _exchange(
    engine: SimulatedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """One request and its answer; ``False`` when the connection has been closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    request, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = request.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (s.partition(":") for s in lines)
    }
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    body = await engine.answer(method, target.partition("?")[0], json.loads(raw) if raw else {})
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ")
    writer.write(str(len(body)).encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return headers.get("connection", "").lower() != "close"


def main() -> None:
    """Run the program."""
    port, state, seconds, num_tokens = sys.argv[1:]
    engine = SimulatedEngine(Path(state), float(seconds), int(num_tokens))
    asyncio.run(serve(int(port), engine))


if __name__ == "__main__":
    main()
