"""One vLLM server outside vime's fleet, started here or by somebody else, that proves its weights.

A server that is started by somebody else must carry vime's two extensions, which guard its
control routes and account for every tensor that is loaded::

    VIME_CONTROL_TOKEN=SECRET VLLM_API_KEY=KEY VLLM_SERVER_DEV_MODE=1 \
    python -m vllm.entrypoints.openai.api_server --model BASE --served-model-name eval \
        --host 127.0.0.1 --port 8000 --generation-config vllm --enable-scale-out \
        --middleware vime.eval.fleet.vllm_plugin.ControlGuard \
        --worker-extension-cls vime.eval.fleet.vllm_plugin.VerifiedLoad
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from vime.eval.contracts import EngineProof, PinProof, Snapshot
from vime.eval.fleet.control import FIRST_VERSION, Control, EngineFailure
from vime.eval.fleet.devices import visible_gpus
from vime.eval.fleet.launch import Tokens, engine_argv, engine_environment, loopback_client
from vime.eval.fleet.pin import load_and_prove, nan_words, prove_token
from vime.eval.fleet.ports import PortReservation
from vime.eval.fleet.settings import FleetSettings
from vime.eval.processes.process import KeptProcess, spawn
from vime.eval.snapshot.draft import snapshot_of
from vime.eval.snapshot.manifest import FILE, Manifest

#: The label of a server in the middle of a load. One that still has it was given up half-way:
#: nobody knows what it serves, and only a restart makes it sound again.
LOADING = "vime:loading"

_LABEL_S = 5.0

_POLL_S = 0.25


class VllmServer:
    """A server that :meth:`launch` started or :meth:`attach` found.

    Attributes:
        url: where it listens.
        tokens: the keys of its generation and control routes.
        process: its process, where it was started here.
    """

    def __init__(
        self,
        url: str,
        tokens: Tokens,
        settings: FleetSettings,
        process: KeptProcess | None = None,
        port: PortReservation | None = None,
    ) -> None:
        self.url = url
        self.tokens = tokens
        self.process = process
        self._settings = settings
        self._port = port
        self._control = Control(
            loopback_client(url), tokens, settings.model, settings.call_timeout_s
        )

    @classmethod
    async def launch(cls, settings: FleetSettings, gpus: list[str] | None = None) -> VllmServer:
        """Start a server, and wait for its first token; nothing is left of one that fails.

        Args:
            settings: of a fleet of one engine.
            gpus: the GPUs that it may use; those that this process sees if absent.

        Raises:
            EngineFailure: it did not come up; with the end of its log.
            ValueError: there are too few GPUs.
        """
        tokens = Tokens()
        gpus = visible_gpus() if gpus is None else gpus
        if gpus is not None and len(gpus) < settings.num_gpus:
            raise ValueError(
                f"--eval-num-gpus-per-engine {settings.num_gpus}: only {len(gpus)} GPUs are "
                f"visible here ({', '.join(gpus) or 'none'})"
            )
        port = PortReservation(settings.host)
        try:
            process = await spawn(
                engine_argv(settings, port.number, gpus),
                name="external_vllm",
                env=engine_environment(settings, 0, tokens, gpus),
                log_path=settings.run_dir / "logs" / "external_vllm.log",
            )
        except BaseException as error:
            port.close()
            if isinstance(error, (OSError, RuntimeError)):  # a TimeoutError is an OSError
                raise EngineFailure("gone", f"it could not be started: {error}") from error
            raise
        url = f"http://{settings.host}:{port.number}"
        server = cls(url, tokens, settings, process, port)
        try:
            await server._wait_until_serving(process)
        except BaseException:
            await server.close()
            raise
        return server

    @classmethod
    async def attach(cls, url: str, tokens: Tokens, settings: FleetSettings) -> VllmServer:
        """Speak to a server that runs already.

        Raises:
            EngineFailure: nobody answers there, or it was given up in the middle of a load.
        """
        server = cls(url.rstrip("/"), tokens, settings)
        try:
            await server._check_sound()
        except BaseException:
            await server.close()
            raise
        return server

    async def pin(self, snapshot: Snapshot) -> PinProof:
        """Put a snapshot's weights into the server, and prove by content that it serves them.

        When this raises, or is cancelled, a server of one's own must be closed; one that was
        attached keeps the label :data:`LOADING` until it is restarted.

        Raises:
            EngineFailure: it could not prove it.
        """
        if snapshot.with_nan:
            raise EngineFailure("not_finite", nan_words(snapshot.with_nan))
        limit_s = self._settings.pin_timeout_s
        began = anyio.current_time()
        try:
            with anyio.fail_after(limit_s):
                await self._check_sound()
                evidence = await self._load(snapshot, limit_s)
        except TimeoutError:
            late = f"it took longer than {limit_s:.4g} s to load {snapshot.weight_version}"
            raise EngineFailure("overdue", late) from None
        return PinProof(
            base_url=self.url,
            model=self._settings.model,
            weight_version=snapshot.weight_version,
            engines=(EngineProof("external_vllm", snapshot.weight_version, evidence),),
            num_gpus_per_engine=self._settings.num_gpus_per_engine,
            pin_seconds=anyio.current_time() - began,
            api_key=self.tokens.api_key,
        )

    async def _load(self, snapshot: Snapshot, limit_s: float) -> dict[str, Any]:
        """Load it under the label :data:`LOADING`, which stays where the proof fails."""
        try:
            await self._control.pause()
            await self._control.set_version(LOADING)
            return await load_and_prove(
                self._control,
                snapshot,
                self._settings.num_gpus_per_engine,
                timeout_s=limit_s,
                call_timeout_s=self._settings.call_timeout_s,
            )
        except BaseException:  # the proof ends under the label of the weights
            with anyio.move_on_after(_LABEL_S, shield=True), suppress(EngineFailure):
                await self._control.set_version(LOADING)
            raise

    async def close(self) -> None:
        """End the server where it was started here; leave it alone otherwise."""
        with anyio.CancelScope(shield=True):
            try:
                await self._control.close()
                if self.process is not None:
                    await self.process.end(self._settings.end_timeout_s)
            finally:
                if self._port is not None:
                    self._port.close()

    async def _check_sound(self) -> None:
        if self.process is not None and self.process.has_ended():
            raise EngineFailure("gone", f"its process has ended; see {self.process.log_path}")
        if await self._control.version() == LOADING:
            raise EngineFailure(
                "gone",
                f"the server at {self.url} was given up in the middle of a load, and nobody knows "
                "what it serves: restart it",
            )

    async def _wait_until_serving(self, process: KeptProcess) -> None:
        limit_s = self._settings.start_timeout_s
        try:
            with anyio.fail_after(limit_s):
                while not await self._control.answers():
                    if process.has_ended():
                        raise EngineFailure("gone", f"it ended at its start\n{process.log_tail()}")
                    await anyio.sleep(_POLL_S)
                await prove_token(self._control, limit_s, FIRST_VERSION)
        except TimeoutError:
            raise EngineFailure(
                "overdue", f"it has not answered after {limit_s:.4g} s\n{process.log_tail()}"
            ) from None


def describe(checkpoint_dir: Path, rollout_id: int) -> Snapshot:
    """What must be found in a server that serves ``checkpoint_dir``; blocks while it reads.

    A snapshot of vime's says it in its manifest. Any other checkpoint is read through.

    Raises:
        ValueError: it is no whole checkpoint.
        OSError: it cannot be read.
    """
    owned = (checkpoint_dir / FILE).is_file()
    if owned:
        manifest = Manifest.read(checkpoint_dir)
    else:
        name = f"external-{secrets.token_hex(4)}"  # a version is unique in the world
        manifest = Manifest.of_directory(checkpoint_dir, name, rollout_id, owned=False)
    return replace(snapshot_of(checkpoint_dir, manifest, owned=owned), rollout_id=rollout_id)
