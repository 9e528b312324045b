"""Exporters: how the weights of a training run become a snapshot.

Training waits for ``capture`` alone, a copy into host memory; everything else happens in
``write``, on a worker thread, in native code that leaves the interpreter lock to training.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vime.eval.contracts import Capture, Exporter
from vime.eval.snapshot.base import TOKENIZER_CONFIG, VOCABULARIES
from vime.eval.snapshot.checkpoint_files import safetensors_dtype, write_weights
from vime.eval.snapshot.files import write_new
from vime.eval.snapshot.host_buffers import BufferPool, HostBuffer
from vime.eval.snapshot.model_state import checkpoint_tensors, unwrap

if TYPE_CHECKING:
    import torch

DEFAULT_SHARD_BYTES = 5 * 10**9

_ALIGNMENT = 64

_TOKENIZER_FILES = (
    *VOCABULARIES,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def as_exporter(obj: Any, tokenizer: Any = None) -> Exporter:
    """Make an exporter of what a caller has at hand.

    Args:
        obj: a ``transformers`` model, a pair ``(model, tokenizer)``, a callable
            ``export(rollout_id, directory)``, or an :class:`~vime.eval.contracts.Exporter`.
        tokenizer: the model's tokenizer or processor, where ``obj`` is a model.

    Raises:
        ValueError: it is none of these, or a model that cannot be captured.
    """
    if isinstance(obj, tuple | list) and len(obj) == 2:
        obj, tokenizer = obj
    if callable(getattr(obj, "capture", None)):
        return cast(Exporter, obj)
    if callable(getattr(obj, "state_dict", None)):
        return TransformersExporter(obj, tokenizer)
    if callable(obj):
        return CallableExporter(obj)
    raise ValueError(
        f"exporter={obj!r}: expected (model, tokenizer) of transformers, a callable "
        "export(rollout_id, directory), or an object with capture(rollout_id, directory)"
    )


class CallableExporter:
    """Hands the whole export to a function of the caller's.

    Args:
        export: ``export(rollout_id, directory)``; called on the training thread, where it may
            run collectives over the training ranks. It writes a Hugging Face checkpoint into the
            empty directory, and has finished when it returns.

    Raises:
        ValueError: it cannot be called like that.
    """

    def __init__(self, export: Callable[[int, Path], object]) -> None:
        if inspect.iscoroutinefunction(export):
            raise ValueError(f"exporter={export!r}: expected a plain function, not a coroutine")
        try:
            inspect.signature(export).bind(0, Path())
        except TypeError as error:
            raise ValueError(
                f"exporter={export!r}: expected export(rollout_id, directory): {error}"
            ) from None
        self._export = export

    def capture(self, rollout_id: int, directory: Path) -> Capture:
        """Run the function.

        Raises:
            Exception: whatever it raises.
        """
        self._export(rollout_id, directory)
        return _AlreadyWritten()


class _AlreadyWritten:
    def write(self, directory: Path) -> None:
        """Leave the directory as the function has filled it."""

    def release(self) -> None:
        """Hold nothing."""


class TransformersExporter:
    """Exports a ``transformers`` model; what it writes equals ``model.save_pretrained``.

    Args:
        model: may be wrapped by ``torch.compile`` or ``DistributedDataParallel``.
        tokenizer: a tokenizer or processor, saved along; read once, now. Without one, the
            tokenizer's files are taken from the local directory that the model was loaded from.
        dtype: write floating-point weights in this dtype (``"bfloat16"``), as mixed-precision
            training with float32 weights needs when the base is bfloat16; as they are if absent.
        max_shard_bytes: most bytes of one weight file.
        max_buffers: how many copies of the weights host memory may hold at once: one that is
            being captured beside one that is being written.
        buffer_timeout_s: how long ``capture`` waits for a copy that is still being written.

    Raises:
        ValueError: the model cannot be captured: quantised, sharded, with adapters, or none.
    """

    needs_directory = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        max_buffers: int = 2,
        buffer_timeout_s: float = 60.0,
    ) -> None:
        self._model = unwrap(model)
        self._dtype = _floating_dtype(dtype)
        self._max_shard_bytes = max_shard_bytes
        self._pool = BufferPool(max_buffers, buffer_timeout_s)
        if tokenizer is None:
            self._tokenizer_files = _files_of_origin(self._model)
        else:
            self._tokenizer_files = _files_of(tokenizer)

    def capture(self, rollout_id: int, directory: Path) -> Capture:  # noqa: ARG002 -- the contract
        """Copy the present weights into host memory.

        Raises:
            ValueError: a tensor cannot be copied (on the meta device, sharded …).
            TimeoutError: all host buffers are still being written.
        """
        tensors = checkpoint_tensors(self._model)
        layout = _layout(tensors, self._dtype)
        on_cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
        num_bytes = max((slot.end for slot in layout.values()), default=0)
        buffer = self._pool.take(num_bytes, pin=on_cuda)
        try:
            _copy(tensors, layout, buffer)
            return _HeldWeights(self, buffer, layout, _Settings.of(self._model, self._dtype))
        except BaseException:
            self._pool.give(buffer)
            raise

    def _write(
        self, directory: Path, tensors: Mapping[str, torch.Tensor], settings: _Settings
    ) -> None:
        write_weights(directory, _as_saved(self._model, tensors), self._max_shard_bytes)
        settings.write(directory)
        for name, content in self._tokenizer_files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_new(directory / name, [content])


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one tensor lies in a buffer, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def view(self, buffer: HostBuffer) -> torch.Tensor:
        return buffer.bytes[self.start : self.end].view(self.dtype).view(self.shape)


class _HeldWeights:
    """A capture: a filled buffer, and what else belongs into the checkpoint."""

    def __init__(
        self,
        exporter: TransformersExporter,
        buffer: HostBuffer,
        layout: Mapping[str, _Slot],
        settings: _Settings,
    ) -> None:
        self._exporter = exporter
        self._buffer: HostBuffer | None = buffer
        self._layout = layout
        self._settings = settings

    def write(self, directory: Path) -> None:
        """Write the checkpoint; see :meth:`vime.eval.contracts.Capture.write`."""
        assert self._buffer is not None, "written before its release"
        views = {name: slot.view(self._buffer) for name, slot in self._layout.items()}
        self._exporter._write(directory, views, self._settings)

    def release(self) -> None:
        """Leave the buffer to the next capture."""
        assert self._buffer is not None, "released once"
        buffer, self._buffer = self._buffer, None
        self._exporter._pool.give(buffer)


@dataclass(frozen=True)
class _Settings:
    """The model's configuration as it was when its weights were captured."""

    config: Any
    generation_config: Any | None

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype | None) -> _Settings:
        config = copy.deepcopy(model.config)
        name = str(dtype or model.dtype).removeprefix("torch.")
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", name)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        generation_config = None
        if model.can_generate():
            generation_config = copy.deepcopy(model.generation_config)
        return cls(config, generation_config)

    def write(self, directory: Path) -> None:
        self.config.save_pretrained(directory)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(directory)


def _layout(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, _Slot]:
    layout = {}
    end = 0
    for name, tensor in tensors.items():
        safetensors_dtype(tensor, name)
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.numel() * target.itemsize
        layout[name] = _Slot(target, tuple(tensor.shape), start, end)
    return layout


def _copy(
    tensors: Mapping[str, torch.Tensor], layout: Mapping[str, _Slot], buffer: HostBuffer
) -> None:
    """Copy, and wait until every device has finished its part."""
    import torch

    devices = set()
    with torch.no_grad():
        for name, tensor in tensors.items():
            slot = layout[name]
            source = tensor.detach()
            if source.device.type == "cuda":  # cast there: the copy carries fewer bytes
                devices.add(source.device)
                source = source.to(slot.dtype)
            slot.view(buffer).copy_(source, non_blocking=buffer.pinned)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _as_saved(model: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The names and shapes of the checkpoint, where the model in memory has others.

    Since transformers 5 models fuse experts when they are loaded, for example.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps models in memory as they are on disk
        return tensors
    return cast("Mapping[str, torch.Tensor]", revert_weight_conversion(model, dict(tensors)))


def _floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'")
    return found


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    """Save a tokenizer once: it does not change, and threads must not share it."""
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ValueError(f"tokenizer={tokenizer!r}: expected one with save_pretrained(directory)")
    with tempfile.TemporaryDirectory(prefix="vime-tokenizer-") as scratch:
        tokenizer.save_pretrained(scratch)
        root = Path(scratch)
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


def _files_of_origin(model: Any) -> dict[str, bytes]:
    """The tokenizer's files of the local directory that the model was loaded from, if any."""
    name = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not name or not Path(name, "config.json").is_file():
        return {}
    origin = Path(name)
    files = [origin / name for name in _TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in files if path.is_file()}
