"""Exporters: how the weights of a training run become a snapshot.

Training waits for ``capture`` alone, a copy into host memory; everything else happens in
``write``, on a worker thread, in native code that leaves the interpreter lock to training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vime.eval.contracts import Capture, Content, Exporter
from vime.eval.snapshot.checkpoint_files import write_weights
from vime.eval.snapshot.held import Held, floating_dtype, held_bytes, hold
from vime.eval.snapshot.host_buffers import BufferPool
from vime.eval.snapshot.model_state import as_saved, checkpoint_tensors, unwrap
from vime.eval.snapshot.surroundings import Settings, TokenizerFiles

if TYPE_CHECKING:
    import torch

DEFAULT_SHARD_BYTES = 5 * 10**9


def as_exporter(obj: Any, tokenizer: Any = None, **limits: Any) -> Exporter:
    """Make an exporter of what a caller has at hand.

    Args:
        obj: a ``transformers`` model, a pair ``(model, tokenizer)``, a callable
            ``export(rollout_id, directory)``, or an :class:`~vime.eval.contracts.Exporter`.
        tokenizer: the model's tokenizer or processor, where ``obj`` is a model.
        limits: ``max_captures`` and ``max_shard_bytes`` of a :class:`TransformersExporter`.

    Raises:
        ValueError: it is none of these, or a model that cannot be captured.
    """
    if _is_pair(obj):
        obj, tokenizer = obj
    if callable(getattr(obj, "capture", None)):
        return cast(Exporter, obj)
    if callable(getattr(obj, "state_dict", None)):
        return TransformersExporter(obj, tokenizer, **limits)
    if callable(obj):
        return CallableExporter(obj)
    raise ValueError(
        f"exporter={obj!r}: expected (model, tokenizer) of transformers, a callable "
        "export(rollout_id, directory), or an object with capture(rollout_id, directory)"
    )


def is_model(obj: Any) -> bool:
    """Whether a caller gave a model, or a pair of it and its tokenizer."""
    model = obj[0] if _is_pair(obj) else obj
    return callable(getattr(model, "state_dict", None)) and not hasattr(model, "capture")


def _is_pair(obj: Any) -> bool:
    return isinstance(obj, tuple | list) and len(obj) == 2


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
        return AlreadyWritten()


class AlreadyWritten:
    """A capture whose checkpoint lies in the directory already."""

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
        max_shard_bytes: ``--eval-max-shard-size``: most bytes of one weight file.
        max_captures: ``--eval-max-captures``: how many copies of the weights host memory may
            hold at once: one that is being captured beside one that is being written.
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
        max_captures: int = 2,
        buffer_timeout_s: float = 60.0,
    ) -> None:
        self._model = unwrap(model)
        self._dtype = floating_dtype(dtype)
        self._max_shard_bytes = max_shard_bytes
        self.max_captures = max_captures
        self._pool = BufferPool(max_captures, buffer_timeout_s)
        self._tokenizer_files = TokenizerFiles(self._model, tokenizer)

    def capture_bytes(self) -> int:
        """How much memory a capture of the present weights takes."""
        return held_bytes(checkpoint_tensors(self._model), self._dtype)

    def capture(self, rollout_id: int, directory: Path) -> Capture:  # noqa: ARG002 -- the contract
        """Copy the present weights into host memory.

        Raises:
            ValueError: a tensor cannot be copied (on the meta device, sharded …).
            TimeoutError: all host buffers are still being written.
        """
        settings = Settings.of(self._model, self._dtype)
        held = hold(self._pool, checkpoint_tensors(self._model), self._dtype)
        return _HeldWeights(self, held, settings)


class _HeldWeights:
    """A capture: weights held still, and what else belongs into the checkpoint."""

    def __init__(self, exporter: TransformersExporter, held: Held, settings: Settings) -> None:
        self._exporter = exporter
        self._held = held
        self._settings = settings

    def write(self, directory: Path) -> dict[str, Content]:
        """Write the checkpoint; see :meth:`vime.eval.contracts.Capture.write`."""
        exporter = self._exporter
        tensors = as_saved(exporter._model, self._held.views())
        contents = write_weights(directory, tensors, exporter._max_shard_bytes)
        self._settings.write(directory)
        exporter._tokenizer_files.write(directory)
        return contents

    def release(self) -> None:
        """Leave the memory to the next capture."""
        self._held.release()
