"""What runs inside vLLM's own processes: the control routes' guard and the verified load.

Three extension points of vLLM lead here: ``--middleware`` (:class:`ControlGuard`, in the API
server), ``--worker-extension-cls`` (:class:`VerifiedLoad`, in each worker) and the entry point
``vllm.general_plugins`` (:func:`join_fleet`, in every process).
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.eval.fleet.quiet_wait import wait_quietly

if TYPE_CHECKING:
    import torch

#: The environment variable that carries the run's control token into the API server.
CONTROL_TOKEN_VARIABLE = "VIME_CONTROL_TOKEN"  # noqa: S105 -- the name of a token, not a token

#: Routes that need no control token: health, metrics, and what ``VLLM_API_KEY`` guards itself.
#: Everything else is control: an unknown route of a later vLLM is shut until it is listed here.
PUBLIC_ROUTES = ("/health", "/ping", "/version", "/metrics", "/v1", "/inference")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ControlGuard:
    """ASGI middleware: every route but the public ones asks for ``Authorization: Bearer TOKEN``.

    vLLM's ``--api-key`` guards only generation; whoever reaches the port could otherwise pause
    the engine, zero its weights or run any worker method.

    Args:
        app: the application behind it.
        token: the run's control token; read from the environment when absent.

    Raises:
        ValueError: there is no token: the server must not start unguarded.
    """

    def __init__(self, app: App, token: str | None = None) -> None:
        token = token or os.environ.get(CONTROL_TOKEN_VARIABLE)
        if not token:
            raise ValueError(
                f"{CONTROL_TOKEN_VARIABLE} is not set: the control routes would be open to "
                "everybody on this machine; the fleet's supervisor sets it"
            )
        self._app = app
        self._expected = hashlib.sha256(f"Bearer {token}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] == "lifespan" or is_public(scope["path"]) or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _may_pass(self, scope: Scope) -> bool:
        """Compare hashes in constant time, so that neither length nor prefix shows."""
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(
            hashlib.sha256(given[0]).digest(), self._expected
        )


def is_public(path: str) -> bool:
    """Whether ``path`` is one of :data:`PUBLIC_ROUTES` or lies below one."""
    return any(path == route or path.startswith(f"{route}/") for route in PUBLIC_ROUTES)


async def _refuse(send: Send) -> None:
    body = b'{"error":"this route needs the control token of the run"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class VerifiedLoad:
    """A vLLM worker extension: one more method that ``/collective_rpc`` can call."""

    model_runner: Any
    vllm_config: Any

    def vime_load(
        self, directory: str, digest: str, verify: str = "full", look_for_nan: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint's weights, and say exactly what went into the model.

        Every rank reads every tensor: what it hands to the model's loader are the bytes that it
        has digested.

        Args:
            directory: a Hugging Face checkpoint with safetensors files.
            digest: the snapshot's digest, as its manifest says.
            verify: what it is made of; ``headers`` digests no bytes here either.
            look_for_nan: unless that is known of the bytes with this digest.

        Returns:
            ``digest`` over the names and bytes of all tensors read; ``num_tensors`` and
            ``num_bytes``; ``unloaded``, the model's parameters that received nothing; ``with_nan``,
            the tensors in which a NaN was found; and, where the digest is not the expected one,
            ``tensors``: name → digest of its bytes.

        Raises:
            Exception: whatever the files or the model's loader say; the engine is poisoned then
                and must be restarted.
        """
        from vllm.config import set_current_vllm_config

        from vime.eval.fleet.tensor_reader import TensorReader

        _let_go_of_names()
        reader = TensorReader(Path(directory), verify, look_for_nan=look_for_nan)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), _Watched(model) as watched:
            self.model_runner.reload_weights(weights_iterator=reader)
        _repack_tied_heads(model)
        # Quantising renames parameters: there vLLM itself keeps no account either.
        quantized = self.vllm_config.model_config.quantization is not None
        answer = {
            "digest": reader.digest,
            "num_tensors": len(reader.given),
            "num_bytes": reader.num_bytes,
            "unloaded": [] if quantized else sorted(watched.parameters - watched.loaded),
            "with_nan": reader.with_nan,
        }
        if reader.digest != digest:
            answer["tensors"] = {name: tensor.digest for name, tensor in reader.given.items()}
        return answer


class _Watched:
    """Learns which parameters ``model.load_weights`` fills; vLLM only logs the others.

    ``reload_weights`` answers 200 when a layer received nothing and keeps its old weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model
        self.parameters = {name for name, _ in model.named_parameters()}
        self.loaded: set[str] = set()

    def __enter__(self) -> _Watched:
        original = self._model.load_weights

        def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = original(weights, *args, **kwargs)
            # A loader that keeps no account says nothing about what is missing.
            self.loaded |= self.parameters if loaded is None else set(loaded)
            return loaded

        self._model.load_weights = load_weights
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights  # the class's own method shows again


def _let_go_of_names() -> None:
    """Remove the names of the shared memory through which the ranks of a CPU engine talk.

    All of them have mapped it by now, and a process that is killed removes no name any more.
    """
    if identifier := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM's CPU worker
        for path in Path("/dev/shm").glob(f"{identifier}-*"):  # noqa: S108 -- shared memory
            path.unlink(missing_ok=True)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU, pack the output heads anew.

    There a layer computes with a packed copy of its weight. A reload packs the layers that it
    fills; a head tied to the embedding is filled through the latter only, and would go on
    answering with the copy of the old weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    layer: Any
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        # A layer that gave its weight up for the packed copy was packed by the reload itself.
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def join_fleet() -> None:
    """Make this process of vLLM one of a fleet; vLLM calls it in each. A no-op in any other vLLM.

    See :func:`die_with_parent` and :func:`vime.eval.fleet.quiet_wait.wait_quietly`.
    """
    if CONTROL_TOKEN_VARIABLE in os.environ:
        die_with_parent()
        wait_quietly()


def die_with_parent() -> None:
    """Be killed by the kernel when the process above dies.

    vLLM's engine and workers otherwise live on, and hold their memory, when their API server is
    killed together with its keeper and the driver (``pkill -9 python`` does that: they call
    themselves ``VLLM::…``).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # the API server: its keeper sees to it
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent.pid:  # it died before it could be watched
        os.kill(os.getpid(), signal.SIGKILL)
