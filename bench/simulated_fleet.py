"""A fleet whose engines and router are simulated: the supervisor and all its calls are real."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import simulated_engine
from bench.subjects import Setup
from vime.eval.assembly import assemble
from vime.eval.config import EvalConfig
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.fleet.launch import Process, Spawn
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.supervisor import FleetSupervisor
from vime.eval.processes import process

CONCURRENCY = 16
ANSWER_SECONDS = 0.5
ANSWER_TOKENS = 32
_START_TIMEOUT_S = 20.0


def write_eval_set(path: Path, eval_seconds: float) -> Path:
    """As many prompts as keep :data:`CONCURRENCY` requests busy for so long; returns ``path``."""
    num_prompts = CONCURRENCY * max(1, round(eval_seconds / ANSWER_SECONDS))
    rows = ({"input": f"{n} + {n} =", "label": str(2 * n)} for n in range(num_prompts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulated_spawn(state_dir: Path) -> Spawn:
    """Starts a simulated engine, or a simulated router, wherever a real one is asked for."""

    async def spawn(
        argv: Sequence[str], *, name: str, env: Mapping[str, str], log_path: Path
    ) -> Process:
        port = argv[argv.index("--port") + 1]
        command = simulated_argv(port, state_dir / "weight_version")
        return await process.spawn(command, name=name, env=env, log_path=log_path)

    return spawn


def simulated_argv(port: str, state: Path, seconds: float = ANSWER_SECONDS) -> list[str]:
    """The command of one simulated server whose answers take ``seconds``."""
    script = str(Path(simulated_engine.__file__).resolve())
    return [sys.executable, script, port, str(state), str(seconds), str(ANSWER_TOKENS)]


def dispatcher_with_simulated_fleet(setup: Setup, exporter: Any) -> EvalDispatcher:
    """vime with one simulated engine; store, supervisor, runner process and trace are real."""
    run_dir = setup.scratch / "run"
    config = EvalConfig(
        hf_dir=setup.staging / "staging",
        hf_checkpoint=setup.checkpoint,
        interval=1,
        prompt_data=(("sums", write_eval_set(setup.scratch / "sums.jsonl", setup.eval_seconds)),),
        concurrency=CONCURRENCY,
        max_response_len=ANSWER_TOKENS,
        run_dir=run_dir,
        uses_snapshots=True,
    )
    parts = assemble(config, argparse.Namespace(), exporter, None, ())
    parts.fleet = FleetSupervisor(
        FleetSettings(num_engines=1, base=setup.checkpoint, run_dir=run_dir),
        parts.trace,
        spawn=simulated_spawn(setup.scratch),
    )
    dispatcher = EvalDispatcher(config, parts, None)
    try:
        dispatcher.wait_until_ready()
    except BaseException:
        dispatcher.close()
        raise
    return dispatcher


@contextmanager
def simulated_server(directory: Path, seconds: float = ANSWER_SECONDS) -> Iterator[str]:
    """One simulated engine by itself, whose answers take ``seconds``; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(simulated_argv(str(port), directory / "version", seconds)) as server:
        try:
            _wait_until_listening(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise OSError(f"the simulated engine does not listen on port {port}")
