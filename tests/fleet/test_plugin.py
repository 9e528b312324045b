"""The parts that run inside vLLM's processes, as far as they can be tried without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.watch import watching
from vime.eval.fleet.vllm_plugin import ControlGuard, is_public, join_fleet

TOKEN = "0123456789abcdef"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"reached"})


@asynccontextmanager
async def guarded() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(ControlGuard(application, TOKEN))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


CONTROL = [
    "/pause", "/resume", "/collective_rpc", "/weight_checker", "/update_weight_version",
    "/reset_prefix_cache", "/weight_info", "/server_info", "/sleep", "/wake_up", "/load",
    "/tokenize", "/invocations", "/scale_elastic_ep", "/abort_requests", "/docs", "/openapi.json",
    "/", "/a_route_of_tomorrow", "/v1x", "/healthy", "/V1/models", "//v1", "/inference_control",
]  # fmt: skip
PUBLIC = ["/health", "/v1/models", "/v1/chat/completions", "/inference/v1/generate", "/metrics",
          "/metrics/", "/ping", "/version"]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
async def test_a_control_route_without_the_token_is_refused(path: str, method: str) -> None:
    async with guarded() as client:
        response = await client.request(method, f"http://engine{path}")
        assert response.status_code == httpx.codes.UNAUTHORIZED
        assert response.headers["www-authenticate"] == "Bearer"
        assert b"reached" not in response.content


@pytest.mark.anyio
@pytest.mark.parametrize("path", [*CONTROL, *PUBLIC])
async def test_every_route_can_be_reached_with_the_token(path: str) -> None:
    async with guarded() as client:
        response = await client.get(
            f"http://engine{path}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        assert response.content == b"reached"


@pytest.mark.anyio
@pytest.mark.parametrize("path", PUBLIC)
async def test_a_public_route_can_be_reached_without_it(path: str) -> None:
    async with guarded() as client:
        assert (await client.get(path)).content == b"reached"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer wrong")],
        [("Authorization", f"Bearer {TOKEN}x")],
        [("Authorization", f"Bearer {TOKEN[:-1]}")],
        [("Authorization", f"bearer {TOKEN}")],
        [("Authorization", TOKEN)],
        [("Authorization", "Bearer ")],
        [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")],
        [("X-Authorization", f"Bearer {TOKEN}")],
        [("Authorization", "Bearer \u00e9".encode())],
    ],
)
async def test_anything_but_the_token_is_refused(headers: Any) -> None:
    async with guarded() as client:
        response = await client.post("/pause", headers=headers)
        assert response.status_code == httpx.codes.UNAUTHORIZED


@pytest.mark.anyio
async def test_a_websocket_without_the_token_is_closed() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    guard = ControlGuard(application, TOKEN)
    await guard({"type": "websocket", "path": "/control", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.anyio
async def test_the_start_and_the_end_of_the_server_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await ControlGuard(app, TOKEN)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIME_CONTROL_TOKEN", raising=False)
    with pytest.raises(ValueError, match="VIME_CONTROL_TOKEN is not set"):
        ControlGuard(application)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_CONTROL_TOKEN", TOKEN)
    ControlGuard(application)


def test_only_whole_parts_of_a_path_make_it_public() -> None:
    assert is_public("/v1")
    assert not is_public("/v11")
    assert not is_public("")


def test_the_module_that_vllm_imports_everywhere_is_light() -> None:
    code = (
        "import sys; import vime.eval.fleet.vllm_plugin\n"
        "print(sorted({'torch', 'vllm', 'httpx', 'anyio', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the reader of the verified load


# --- death with the parent


def test_vllm_finds_the_plugin_in_each_of_its_processes() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="vime")
    assert plugin.load() is join_fleet


FAMILY = """
import multiprocessing, os, sys, time
from vime.eval.fleet.vllm_plugin import join_fleet

def child(pipe):
    join_fleet()
    pipe.send(os.getpid())
    time.sleep(1000)

if __name__ == "__main__":
    join_fleet()  # a no-op: it is nobody's child
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    context.Process(target=child, args=(its,)).start()
    print(mine.recv(), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_a_process_of_the_fleet_dies_with_its_parent_and_any_other_lives_on(
    ours: bool, tmp_path: Path
) -> None:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    env = {name: value for name, value in os.environ.items() if name != "VIME_CONTROL_TOKEN"}
    env |= {"VIME_CONTROL_TOKEN": TOKEN} if ours else {}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        with watching([pid]) as child:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            if ours:
                child.assert_gone()
            else:
                with pytest.raises(AssertionError, match="still alive"):
                    child.assert_gone(0.2)
