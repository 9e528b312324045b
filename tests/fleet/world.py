"""A world without processes and sockets: fake vLLM servers and a fake router, which obey the test.

They stand beside ``test_real_fleet.py``, which does the same with real ones. A server lives from
``spawn`` until it is killed; what each life of each engine does wrong is given by ``lives``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import anyio
import httpx

from tests.fleet.answers import Content, answer_of, read_content
from vime.eval.contracts import PinProof, Snapshot
from vime.eval.runner.http import Post, Unreachable
from vime.fsm.trace import Record

Answer = httpx.Response | None
Fault = Callable[["FakeServer"], Awaitable[Answer]]
"""Runs before a path is answered; an answer takes the place of the server's own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as a fake server sees it."""

    method: str
    path: str
    authorization: str | None
    body: dict[str, Any]


class ShortClient:
    """As much of ``httpx.AsyncClient`` as the fleet uses, without what it does to each request.

    That is most of the time of a run whose servers are fake.
    """

    def __init__(self, world: World, base_url: str) -> None:
        self._world = world
        self._base_url = base_url

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **content: Any
    ) -> httpx.Response:
        asked = Asked(method, path, (headers or {}).get("Authorization"), content.get("json", {}))
        return await self._world.ask(self._base_url, asked)

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


@dataclass
class Life:
    """What one life of a process does: it serves after ``start_s``, with ``faults`` by path.

    An engine that ``loads_nothing`` says that it did; one that ``keeps_cache`` says that it
    cleared it; one that ``computes`` in another way than the others answers otherwise; one that
    ``labels`` names weights that it does not have; one that ``halves`` breaks answers off.
    """

    start_s: float = 0.0
    faults: dict[str, Fault] = field(default_factory=dict)
    spawn_error: OSError | None = None
    dies_at_once: bool = False
    unkillable: int = 0
    ranks: int = 1
    loads_nothing: bool = False
    keeps_cache: bool = False
    labels: str | None = None
    halves: bool = False
    computes: str = "soundly"
    report: dict[str, Any] = field(default_factory=dict)


async def hang(server: FakeServer) -> Answer:
    await anyio.sleep_forever()
    raise AssertionError


async def die(server: FakeServer) -> Answer:
    server.kill()
    await anyio.lowlevel.checkpoint()
    return None


def fails(status: int = 500, text: str = "broken") -> Fault:
    async def fault(server: FakeServer) -> Answer:
        return httpx.Response(status, text=text)

    return fault


def answers(content: Any) -> Fault:
    async def fault(server: FakeServer) -> Answer:
        return httpx.Response(200, json=content)

    return fault


def takes(seconds: float) -> Fault:
    async def fault(server: FakeServer) -> Answer:
        await anyio.sleep(seconds)
        return None

    return fault


@dataclass
class Gate:
    """A fault that says when a request has come, and holds it until it is let go."""

    entered: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)

    async def __call__(self, server: FakeServer) -> Answer:
        self.entered.set()
        await self.release.wait()
        return None


class FakeServer:
    """One life of one process: a vLLM server, or the router."""

    def __init__(self, world: World, name: str, life: Life, port: int, env: Mapping[str, str]):
        self.world = world
        self.name = name
        self.life = life
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.env = env
        self.pid = 1000 + len(world.servers)
        self.exited = anyio.Event()
        self.status: int | None = None
        self.doubted = False
        self.refused = False
        self.up_at = anyio.current_time() + life.start_s
        self.version = "default"
        self.content = Content("base")
        self.paused = False
        self.resumed = anyio.Event()
        self.num_tokens = 0
        self.cache: dict[str, str] = {}
        self.workers: list[str] = []
        self._scopes: set[anyio.CancelScope] = set()
        if life.dies_at_once:
            self.kill(status=1)

    # --- as a process

    async def wait(self) -> int:
        await self.exited.wait()
        assert self.status is not None
        return self.status

    async def end(self, timeout_s: float = 5.0) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
            if self.life.unkillable > 0:
                self.life.unkillable -= 1
                self.refused = True
                await anyio.sleep(timeout_s)
                raise TimeoutError(f"{self.name} lives on")
            self.kill()

    def log_tail(self, lines: int = 20) -> str:
        return f"the last words of {self.name}"

    def kill(self, status: int = -9) -> None:
        """The process is gone, and every request that it was answering."""
        if self.status is None:
            self.status = status
            self.exited.set()
            for scope in self._scopes:
                scope.cancel()

    # --- as a server

    async def answer(self, asked: Asked) -> httpx.Response:
        """Raises ``httpx.TransportError`` as a connection to a dead process does."""
        await anyio.lowlevel.checkpoint()
        if self.status is not None or anyio.current_time() < self.up_at:
            raise httpx.ConnectError("All connection attempts failed")
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await self._answer(asked)
            finally:
                self._scopes.remove(scope)
        raise httpx.ReadError("")

    async def _answer(self, asked: Asked) -> httpx.Response:
        path = asked.path
        public = path in ("/health", "/metrics")
        secret = "VLLM_API_KEY" if path.startswith("/inference") else "VIME_CONTROL_TOKEN"
        right = f"Bearer {self.env.get(secret)}"
        if self.name != "router" and not public and asked.authorization != right:
            return httpx.Response(401)
        fault = self.life.faults.get(path)
        answer = None if fault is None else await fault(self)
        if answer is not None:
            return answer
        if self.name == "router":
            return await self._route(asked)
        return await self._serve(path, asked.body)

    async def _serve(self, path: str, body: dict[str, Any]) -> httpx.Response:
        reply: dict[str, Any] = {"success": True}
        match path:
            case "/pause":
                self.paused, self.resumed = True, anyio.Event()
            case "/resume":
                self.paused = False
                self.resumed.set()
            case "/collective_rpc":
                return self._load(*body["args"])
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/reset_prefix_cache" if not self.life.keeps_cache:
                self.cache.clear()
            case "/weight_info" | "/is_paused":
                reply = {"weight_version": self.version, "is_paused": self.paused}
            case "/metrics":
                return httpx.Response(200, text=self._metrics())
            case "/inference/v1/generate":
                if self.paused:
                    await self.resumed.wait()
                reply = self._tokens(body)
        return httpx.Response(200, json=reply)

    def _load(
        self, directory: str, expected: str, verify: str, look_for_nan: bool
    ) -> httpx.Response:
        self.world.loads.append((self.name, directory))
        self.world.looks.append((self.name, look_for_nan))
        content = self.world.contents.get(directory) or read_content(Path(directory))
        if content is None:
            return httpx.Response(500, text="no such directory")
        if not self.life.loads_nothing:
            self.content = content
        rank = {
            "digest": content.digest,
            "num_tensors": 3,
            "num_bytes": 300,
            "unloaded": [],
            "with_nan": content.with_nan if look_for_nan else [],
        } | self.life.report
        return httpx.Response(200, json={"results": [rank] * self.life.ranks})

    def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens that the weights decide, as far as these are known."""
        count = body.get("sampling_params", {}).get("max_tokens", 1)
        self.num_tokens += count
        digest, prompt = self._computed_with(body), body.get("token_ids", [])
        ids, logprobs = answer_of(digest, prompt, count, self.life.computes)
        if self.content.with_nan:
            logprobs = [-9999.0] * count
        entries = [
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [
                    {"token_id": token, "logprob": logprob},
                    {"token_id": 250, "logprob": logprob - 1},
                ],
            }
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": entries},
            "weight_versions": [
                {"version": self.life.labels or self.version, "start": 0, "end": count}
            ],
            "finish_reason": "length",
        }
        if self.life.halves:
            _halve(choice)
        return {"choices": [choice]}

    def _computed_with(self, body: dict[str, Any]) -> str:
        """The weights behind an answer: for a prompt in the prefix cache, those of that time."""
        return self.cache.setdefault(str(body.get("token_ids")), self.content.digest)

    def _metrics(self) -> str:
        return (
            "# HELP vllm:generation_tokens_total Number of generation tokens.\n"
            f'vllm:prompt_tokens_total{{engine="0",model_name="eval"}} {4.0 * self.num_tokens}\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="eval"}} {self.num_tokens}.0\n'
            'vllm:request_success_total{engine="0"} 12.0\n'
        )

    async def _route(self, asked: Asked) -> httpx.Response:
        path = unquote(asked.path)
        if asked.method == "DELETE":
            self.workers.remove(path.removeprefix("/workers/"))
        elif asked.method == "POST" and path == "/workers":
            if not self.world.alive(asked.body["url"]):
                return httpx.Response(503, text="worker is not healthy")
            self.workers.append(asked.body["url"])
        elif path == "/workers":
            return httpx.Response(200, json={"workers": [{"url": url} for url in self.workers]})
        else:
            return await self._pass_on(asked)
        return httpx.Response(200, json={"success": True})

    async def _pass_on(self, asked: Asked) -> httpx.Response:
        """Round robin, over the engines that answer."""
        for url in list(self.workers):
            self.workers.append(self.workers.pop(0))
            try:
                return await self.world.server_at(url).answer(asked)
            except httpx.TransportError:
                continue
        return httpx.Response(503, text="no engine answers")


def _halve(choice: dict[str, Any]) -> None:
    """What an answer looks like that was broken off."""
    half = len(choice["token_ids"]) // 2
    choice["token_ids"] = choice["token_ids"][:half]
    choice["logprobs"] = {"content": choice["logprobs"]["content"][:half]}
    choice["weight_versions"][0]["end"] = half
    choice["finish_reason"] = "abort"


class World:
    """Everything outside the supervisor.

    Attributes:
        lives: engine → its lives, the first one first; a sound one where none is given.
        servers: every process that was ever started.
        loads: (engine, directory), in order.
        wrongs: control calls to an engine that was doubted: there must be none.
    """

    def __init__(self) -> None:
        self.lives: defaultdict[str, list[Life]] = defaultdict(list)
        self.servers: list[FakeServer] = []
        self.contents: dict[str, Content] = {}
        self.loads: list[tuple[str, str]] = []
        self.looks: list[tuple[str, bool]] = []
        self.wrongs: list[str] = []
        self.argvs: list[Sequence[str]] = []

    async def spawn(
        self, argv: Sequence[str], *, name: str, env: Mapping[str, str], log_path: Path
    ) -> FakeServer:
        await anyio.lowlevel.checkpoint()
        self.argvs.append(argv)
        number = len([s for s in self.servers if s.name == name])
        life = self.lives[name][number] if number < len(self.lives[name]) else Life()
        if life.spawn_error is not None:
            self.lives[name].pop(number)
            raise life.spawn_error
        port = int(argv[argv.index("--port") + 1])
        server = FakeServer(self, name, life, port, env)
        self.servers.append(server)
        return server

    def make_client(self, base_url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=base_url, transport=self.transport(base_url))

    def make_short_client(self, base_url: str) -> httpx.AsyncClient:
        return cast(httpx.AsyncClient, ShortClient(self, base_url))

    def transport(self, base_url: str) -> httpx.MockTransport:
        """The way to one server, and no other."""

        async def handle(request: httpx.Request) -> httpx.Response:
            asked = Asked(
                request.method,
                request.url.path,
                request.headers.get("authorization"),
                json.loads(request.content) if request.content else {},
            )
            return await self.ask(base_url, asked)

        return httpx.MockTransport(handle)

    @asynccontextmanager
    async def connect(self, proof: PinProof) -> AsyncIterator[Post]:
        """The runner's way to the fleet."""

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            asked = Asked("POST", path, f"Bearer {proof.api_key}", json.loads(body))
            try:
                answer = await self.ask(proof.base_url, asked)
            except httpx.TransportError as error:
                raise Unreachable(f"{type(error).__name__}: {error}") from error
            return answer.status_code, answer.content

        yield post

    async def ask(self, url: str, asked: Asked) -> httpx.Response:
        """Have the last process that was started at ``url`` answer."""
        server = self.server_at(url)
        if server.doubted:
            self.wrongs.append(f"{server.name}: {asked.path}")
        return await server.answer(asked)

    def server_at(self, url: str) -> FakeServer:
        """The last process that was started there."""
        return next(s for s in reversed(self.servers) if s.url == url)

    def alive(self, url: str) -> bool:
        return any(s.url == url and s.status is None for s in self.servers)

    def now(self, name: str) -> FakeServer:
        """The present life of a process."""
        return next(s for s in reversed(self.servers) if s.name == name)

    def listen(self, record: Record) -> None:
        """To be subscribed to the trace: whom the supervisor believes no more."""
        if record.trigger == "suspect" and any(s.name == record.id for s in self.servers):
            self.now(record.id).doubted = True

    def snapshot(self, number: int, *, nan: bool = False) -> Snapshot:
        path, digest = Path(f"/staging/step_{number}"), f"{number:064x}"
        self.contents[str(path)] = Content(digest, ["model.norm.weight"] if nan else [])
        return Snapshot(number, path, f"run:{number}:{digest[-12:]}", digest, owned=True)

    def leftovers(self) -> list[str]:
        """Processes that are still alive, but for those that refused to be killed."""
        return [s.name for s in self.servers if s.status is None and not s.refused]
