"""Two real engines behind a real router, pinned, fed bad weights, killed, and shut down.

The model's output head is tied to its embedding: the case in which a reload on a CPU goes wrong
most easily. One fleet serves all the tests, in this order, because a start takes most of a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import httpx
import psutil
import pytest
from anyio.abc import SocketStream

from bench.chaos.victims import below, first
from bench.plain_engine import PlainEngine
from tests.snapshots import CHANGES, TIED, change_tensors, write_checkpoint
from tests.standing import API_KEY, MODEL, NUM_BLOCKS, StandingEngine
from tests.watch import watching
from vime.eval.config import EvalConfig
from vime.eval.contracts import PinProof, Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.launch import Tokens, loopback_client
from vime.eval.fleet.settings import FleetSettings, preflight
from vime.eval.fleet.supervisor import FleetSupervisor
from vime.eval.runner.generate import open_generator
from vime.eval.snapshot.manifest import Manifest
from vime.eval.snapshot.stamps import FULL, HEADERS
from vime.fsm.trace import Record, Trace
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

# Longer than several blocks of the prefix cache, on any platform.
PROMPT = [(7 * n) % 250 for n in range(200)]
NUM_TOKENS = 8


class RealFleet:
    """A supervisor on a thread of its own, as in production.

    Args:
        root: a new directory, with the checkpoints.
        cold: what a plain vLLM answers that was started on ``whole``.
    """

    def __init__(self, root: Path, cold: list[int]) -> None:
        self.root = root
        self.cold = cold
        self.settings = FleetSettings(
            num_engines=2,
            base=root / "base",
            run_dir=root / "run",
            vllm={"max_model_len": 256, "num_gpu_blocks_override": NUM_BLOCKS},
            probe_interval_s=2.0,
            probe_timeout_s=15.0,
        )
        self.records: list[Record] = []
        self.trace_path = root / "trace.jsonl"
        trace = Trace(self.trace_path, "run")
        trace.subscribe(self.records.append)
        self.supervisor = FleetSupervisor(self.settings, trace)
        self.pids: set[int] = set()
        self._stack = ExitStack()
        self._stack.callback(trace.close)
        self.portal: Any = None

    def start(self) -> None:
        self._strangers = set(psutil.Process().children())
        preflight(self.settings)
        self.portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        self._run, _ = self.portal.start_task(self.supervisor.run)
        self._stack.callback(self._stop)
        self.portal.call(self.supervisor.wait_ready)

    def _stop(self) -> None:
        self._run.cancel()

    def stop(self) -> None:
        self._stack.close()

    def snapshot(self, name: str, rollout_id: int, verify: str = FULL) -> Snapshot:
        path = self.root / name
        manifest = Manifest.of_directory(path, "run", rollout_id, owned=False, verify=verify)
        version, digest = manifest.weight_version, manifest.digest
        return Snapshot(rollout_id, path, version, digest, owned=False, verify=verify)

    def pin(
        self, name: str, rollout_id: int, verify: str = FULL
    ) -> AbstractContextManager[PinProof]:
        snapshot = self.snapshot(name, rollout_id, verify)
        return self.portal.wrap_async_context_manager(  # type: ignore[no-any-return]
            self.portal.call(self.supervisor.pin, snapshot)
        )

    def ask(self, proof: PinProof, prompt: list[int] = PROMPT) -> list[int]:
        """Greedy tokens through the router; they must be of the pinned weights."""

        async def through_router() -> list[int]:
            async with loopback_client(proof.base_url) as client:
                return await ask(client, proof.api_key, proof.weight_version, proof.model, prompt)

        return self.portal.call(through_router)  # type: ignore[no-any-return]

    def ask_later(self, proof: PinProof) -> Future[list[int]]:
        """As the evaluation asks: what fails on the way is asked again."""

        async def generate() -> list[int]:
            config = EvalConfig()
            sampling = {"n": 1, "temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            async with open_generator(config, proof) as generator:
                return (await generator.generate(PROMPT, 1, sampling)).token_ids

        return self.portal.start_task_soon(generate)  # type: ignore[no-any-return]

    def until(self, condition: Callable[[], bool], timeout_s: float = 200) -> None:
        async def wait() -> None:
            with anyio.fail_after(timeout_s):
                while not condition():
                    await self.supervisor._change.wait()

        self.portal.call(wait)

    def fired(self, engine: str, trigger: str) -> int:
        return sum((r.id, r.trigger) == (engine, trigger) for r in self.records)

    def keepers(self) -> list[psutil.Process]:
        """Whatever it has started itself: a keeper for each engine, and one for the router."""
        return [p for p in psutil.Process().children() if p not in self._strangers]

    def server(self, engine: int) -> psutil.Process:
        """The API server of an engine."""
        ready = [r for r in self.records if (r.id, r.trigger) == (f"engine_{engine}", "ready")]
        assert ready[-1].detail is not None
        return psutil.Process(ready[-1].detail["pid"])

    def urls(self) -> list[str]:
        return [engine.url for engine in self.supervisor._engines]


async def ask(
    client: httpx.AsyncClient, api_key: str | None, version: str, model: str, prompt: list[int]
) -> list[int]:
    headers = {"Authorization": f"Bearer {api_key}"}
    order = {
        "model": model,
        "token_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    }
    with anyio.fail_after(60):
        response = await client.post("/inference/v1/generate", json=order, headers=headers)
    assert response.status_code == httpx.codes.OK, response.text
    (choice,) = response.json()["choices"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": NUM_TOKENS}]
    return [int(token) for token in choice["token_ids"]]


async def ask_cold(engine: PlainEngine) -> list[int]:
    """What vLLM answers that nothing of vime's has touched."""
    async with loopback_client(engine.url) as client:
        return await ask(client, API_KEY, "default", MODEL, PROMPT)


@pytest.fixture(scope="module")
def fleet(
    standing_engine: StandingEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealFleet]:
    root = tmp_path_factory.mktemp("fleet")
    write_checkpoint(root / "base", seed=0, **TIED)
    shutil.copytree(standing_engine.checkpoint, root / "whole")
    for name in ("not_finite", "missing_layer"):
        change_tensors(root / "whole", root / name, CHANGES[name])
    fleet = RealFleet(root, anyio.run(ask_cold, standing_engine.running()))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def test_a_pinned_fleet_answers_as_an_engine_that_was_started_on_the_snapshot(
    fleet: RealFleet,
) -> None:
    with fleet.pin("base", 0) as proof:
        before = [fleet.ask(proof) for _ in range(4)]  # both engines have it in their caches
    assert before == [before[0]] * 4
    with fleet.pin("whole", 1) as proof:
        assert [fleet.ask(proof) for _ in range(4)] == [fleet.cold] * 4
        assert [e.engine for e in proof.engines] == ["engine_0", "engine_1"]
        assert proof.pin_seconds < 30
    assert fleet.cold != before[0]
    canary = proof.canary
    with fleet.pin("base", 2) as proof:
        assert [fleet.ask(proof) for _ in range(4)] == before
        assert proof.canary not in (None, canary)
        assert proof.unchanged_since is None


def test_headers_alone_are_proof_where_no_digests_are_asked_for(fleet: RealFleet) -> None:
    with fleet.pin("base", 0, HEADERS) as proof:
        base = fleet.ask(proof)
    with fleet.pin("whole", 1, HEADERS) as proof:
        assert [fleet.ask(proof) for _ in range(2)] == [fleet.cold] * 2
    assert base != fleet.cold


def test_a_control_route_of_an_engine_needs_the_control_token_and_a_generation_the_key(
    fleet: RealFleet,
) -> None:
    tokens = fleet.supervisor.tokens
    own = {"Authorization": f"Bearer {tokens.api_key}"}
    for url in fleet.urls():
        with httpx.Client(base_url=url, trust_env=False) as client:
            for headers in ({}, own, {"Authorization": f"Bearer {Tokens().control}"}):
                for path in ("/pause", "/collective_rpc", "/weight_checker", "/resume"):
                    answer = client.post(path, headers=headers, json={"action": "reset"})
                    assert answer.status_code == httpx.codes.UNAUTHORIZED, path
                assert client.get("/server_info", headers=headers).status_code == 401
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers=own).status_code == 200


def test_no_control_route_can_be_reached_through_the_router(fleet: RealFleet) -> None:
    tokens = fleet.supervisor.tokens
    with (
        fleet.pin("whole", 8) as proof,
        httpx.Client(base_url=proof.base_url, trust_env=False) as client,
    ):
        for token in (None, tokens.api_key, Tokens().control):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            for path in ("/pause", "/collective_rpc", "/weight_checker", "/update_weight_version"):
                answer = client.post(path, headers=headers, json={"action": "reset"})
                assert answer.status_code in (401, 403, 404, 405), (path, answer.text)
        order = {"model": proof.model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        for headers in ({}, {"Authorization": f"Bearer {tokens.control}"}):
            answer = client.post("/inference/v1/generate", json=order, headers=headers)
            assert answer.status_code == httpx.codes.UNAUTHORIZED, answer.text
        assert [fleet.ask(proof) for _ in range(2)] == [fleet.cold] * 2


def test_no_token_is_in_a_command_line_a_log_or_the_trace(fleet: RealFleet) -> None:
    tokens = fleet.supervisor.tokens
    texts = [path.read_text() for path in (fleet.root / "run" / "logs").iterdir()]
    assert len(texts) == 3
    texts.append(fleet.trace_path.read_text())
    for process in (fleet.server(0), *fleet.server(0).children(recursive=True)):
        texts.append(json.dumps(process.cmdline()))
    for text in texts:
        assert tokens.api_key not in text
        assert tokens.control not in text


def test_everything_of_the_fleet_listens_on_loopback(fleet: RealFleet) -> None:
    family = [p for keeper in fleet.keepers() for p in keeper.children(recursive=True)]
    listening = [
        connection.laddr.ip
        for process in family
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4  # two engines, the router, its metrics
    assert set(listening) == {"127.0.0.1"}


def test_weights_that_are_no_numbers_are_unhealthy_and_the_next_snapshot_is_served(
    fleet: RealFleet,
) -> None:
    with pytest.raises(EvalSkip) as skip, fleet.pin("not_finite", 3):
        pass
    assert skip.value.reason == "unhealthy"
    assert "NaN in 1 tensors of the snapshot: model.norm.weight" in skip.value.detail
    with fleet.pin("whole", 4) as proof:
        assert [fleet.ask(proof) for _ in range(2)] == [fleet.cold] * 2
    assert fleet.fired("engine_0", "restart") == fleet.fired("engine_1", "restart") == 1


def test_a_killed_engine_comes_back_into_the_pin_that_it_left(fleet: RealFleet) -> None:
    with fleet.pin("whole", 5) as proof:
        victim = fleet.server(0)
        tree = [victim.pid, *(child.pid for child in victim.children(recursive=True))]
        with watching(tree) as watch:
            os.kill(victim.pid, signal.SIGKILL)
            began = time.monotonic()
            # The eval goes on with the other engine, while the dead one is replaced.
            while time.monotonic() - began < 3:
                assert fleet.ask(proof) == fleet.cold
            watch.assert_gone(10)  # to give a gigabyte back takes a while
        fleet.until(lambda: fleet.fired("engine_0", "ready") == 3)
        fleet.until(lambda: fleet.supervisor._engines[0].state == "serving")
        fleet.until(lambda: not fleet.supervisor._hold.rejoining)  # type: ignore[union-attr]
        assert [fleet.ask(proof) for _ in range(4)] == [fleet.cold] * 4


def test_an_engine_that_is_stopped_is_taken_for_hung_and_its_requests_are_answered_by_another(
    fleet: RealFleet,
) -> None:
    with fleet.pin("whole", 6) as proof:
        restarts = fleet.fired("engine_1", "restart")
        victim = fleet.server(1)
        tree = [victim.pid, *(child.pid for child in victim.children(recursive=True))]
        asked = [fleet.ask_later(proof) for _ in range(6)]
        with watching(tree) as watch:
            for pid in tree:
                os.kill(pid, signal.SIGSTOP)
            asked += [fleet.ask_later(proof) for _ in range(6)]
            assert [answer.result(120) for answer in asked] == [fleet.cold] * 12
            fleet.until(lambda: fleet.fired("engine_1", "restart") == restarts + 1)
            watch.assert_gone(1)
        suspect = [r for r in fleet.records if (r.id, r.trigger) == ("engine_1", "suspect")][-1]
        assert suspect.reason == "overdue"
        fleet.until(lambda: fleet.supervisor._engines[1].state == "serving")


def test_an_engine_whose_core_dies_under_a_call_ends_at_once_and_comes_back(
    fleet: RealFleet,
) -> None:
    """vLLM's own server would wait for the end of that call, which nobody can answer any more."""
    restarts = fleet.fired("engine_0", "restart")
    tree = below(fleet.server(0).pid)
    core = first(tree, "core")
    assert core is not None
    with watching([process.pid for process in tree]) as watch:
        core.suspend()  # so that the call is under way
        stream = fleet.portal.call(pause, fleet.urls()[0], fleet.supervisor.tokens.control)
        core.kill()
        watch.assert_gone(10)
    fleet.portal.call(stream.aclose)
    fleet.until(lambda: fleet.fired("engine_0", "restart") == restarts + 1)
    suspect = [r for r in fleet.records if (r.id, r.trigger) == ("engine_0", "suspect")][-1]
    assert suspect.reason in ("gone", "refused")  # the latter by a probe that came first
    fleet.until(lambda: fleet.supervisor._engines[0].usable)


async def pause(url: str, token: str) -> SocketStream:
    """Ask an engine to pause, and do not wait for its answer; it has begun with it."""
    stream = await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1]))
    order = f"POST /pause?mode=abort HTTP/1.1\r\nHost: vime\r\nAuthorization: Bearer {token}\r\n"
    await stream.send(f"{order}Content-Length: 0\r\n\r\n".encode())
    async with loopback_client(url) as client:
        assert (await client.get("/health")).status_code == httpx.codes.OK
    return stream


def test_an_engine_that_keeps_old_weights_in_a_layer_is_found_out(fleet: RealFleet) -> None:
    engine = fleet.supervisor._engines[1]
    with pytest.raises(EngineFailure) as failure:
        fleet.portal.call(engine.pin, fleet.snapshot("missing_layer", 7), 60)
    assert failure.value.kind == "stale"
    assert failure.value.skip_reason == "pin_violation"
    assert "rank 0 kept old weights in" in failure.value.detail
    assert "model.layers.1." in failure.value.detail
    fleet.until(lambda: fleet.fired("engine_1", "kill") == 3)


def test_a_point_runs_on_the_engine_that_proved_itself_where_one_is_enough(
    fleet: RealFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has just been ended."""
    one_is_enough = replace(fleet.settings, min_engines=1)
    monkeypatch.setattr(fleet.supervisor._pinner, "_settings", one_is_enough)
    with fleet.pin("base", 8) as proof:
        assert [engine.engine for engine in proof.engines] == ["engine_0"]
        assert fleet.ask(proof) != fleet.cold
    with fleet.pin("whole", 9) as proof:
        assert [fleet.ask(proof) for _ in range(2)] == [fleet.cold] * 2


def test_nothing_is_left_of_a_fleet_that_was_shut_down(fleet: RealFleet) -> None:
    family = [
        *(process.pid for process in (fleet.server(0), *fleet.server(0).children(recursive=True))),
        *(process.pid for process in fleet.keepers()),
    ]
    assert len(family) >= 3 + 2  # the other engine is somewhere between death and birth
    scratch = scratch_directories(family)
    assert len(scratch) >= 2
    ports = [int(url.rsplit(":", 1)[1]) for url in fleet.urls()]
    with watching(family) as watch:
        began = time.monotonic()
        fleet.stop()
        assert time.monotonic() - began < 15
        watch.assert_gone(0.1)
    assert [path for path in scratch if path.exists()] == []
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            free.listen()
    assert [r.dest for r in fleet.records][-2:] == ["stopped", "stopped"]


def scratch_directories(pids: list[int]) -> set[Path]:
    """The private directories for temporary files, of engines and router."""
    named = {psutil.Process(pid).environ().get("TMPDIR", "") for pid in pids}
    return {Path(name) for name in named if Path(name).name.startswith("vime-")}
