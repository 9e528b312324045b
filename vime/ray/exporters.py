"""Training actors on the cluster as exporters: each writes its part of a checkpoint where it is."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from vime.eval.contracts import Capture
from vime.ray.processes import on_node

_METHOD: Final = "export_hf"
_CHUNK_BYTES: Final = 16 << 20
_NUM_AHEAD: Final = 4


def handles_of(exporter: Any) -> list[Any] | None:
    """The Ray actors that an exporter consists of; ``None`` when it is something else.

    Args:
        exporter: an actor's handle, or a list of them (one a rank), each with a remote method
            ``export_hf(rollout_id, directory)``; or an object that has such a list as
            ``_actor_handlers`` or ``actor_handlers``, as groups of training actors do.
    """
    group = getattr(exporter, "_actor_handlers", None) or getattr(exporter, "actor_handlers", None)
    candidates = group or exporter
    handles = list(candidates) if isinstance(candidates, list | tuple) else [candidates]
    if handles and all(hasattr(getattr(h, _METHOD, None), "remote") for h in handles):
        return handles
    return None


class RayExporter:
    """Has training actors export their weights; implements :class:`vime.eval.contracts.Exporter`.

    ``export_hf(rollout_id, directory)`` is called on every actor at once, so that it may hold a
    collective over them. It writes a Hugging Face checkpoint, or the rank's part of it, into
    ``directory``, which it makes if need be, and returns when that is done. What it has written on
    a node whose files the driver does not see is fetched from there through the object store.

    An actor does one thing after the other: the call waits in it behind the training step that was
    asked for before, and the next step waits behind the call. So the weights stand still, and the
    driver need not wait. Actors that do several things at once break that promise.

    Args:
        handles: Ray's, one a rank.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    def capture(self, rollout_id: int, directory: Path) -> Capture:
        """Ask for the export; returns at once."""
        refs = [
            getattr(handle, _METHOD).remote(rollout_id, str(directory)) for handle in self._handles
        ]
        return _Exporting(self._handles, refs)


class _Exporting:
    """An export that is under way."""

    def __init__(self, handles: Sequence[Any], refs: list[Any]) -> None:
        self._handles = handles
        self._refs = refs

    def write(self, directory: Path) -> None:
        """Wait for it, and fetch what is not visible here.

        Raises:
            Exception: whatever an actor raised, or that it died.
        """
        import ray

        ray.get(self._refs)
        if any(directory.iterdir()):
            return
        looks = [handle.__ray_call__.remote(_look, str(directory)) for handle in self._handles]
        found = dict(ray.get(looks))  # node → its files; the ranks of one node see the same
        if not any(found.values()):
            raise FileNotFoundError(
                f"{_METHOD} returned on {len(self._handles)} actors, and none has written into "
                f"{directory}"
            )
        for node_id, sizes in found.items():
            fetch(node_id, directory, directory, sizes)

    def release(self) -> None:
        """Forget it; what an actor has begun it finishes."""
        self._refs = []


def fetch(node_id: str, source: Path, target: Path, sizes: dict[str, int]) -> None:
    """Move a directory of another node into the empty ``target`` here.

    Args:
        node_id: which node, hexadecimal.
        source: the directory there.
        target: the directory here.
        sizes: path within it → bytes.
    """
    import ray

    options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": on_node(node_id)}
    read = ray.remote(_read).options(**options)
    under_way: deque[tuple[str, int, Any]] = deque()
    try:
        for name, offset, count in _pieces(sizes):
            if len(under_way) == _NUM_AHEAD:
                _store(target, *under_way.popleft())
            ref = read.remote(str(source / name), offset, count)
            under_way.append((name, offset, ref))
        while under_way:
            _store(target, *under_way.popleft())
    finally:
        ray.get(ray.remote(_remove).options(**options).remote(str(source)))


def _pieces(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    for name, size in sizes.items():
        for offset in range(0, max(size, 1), _CHUNK_BYTES):
            yield name, offset, min(_CHUNK_BYTES, size - offset)


def _store(directory: Path, name: str, offset: int, ref: Any) -> None:
    import ray

    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "xb") as file:
        file.seek(offset)
        file.write(ray.get(ref))


# -- on the actors' nodes ------------------------------------------------------------------------


def _look(_actor: Any, directory: str) -> tuple[str, dict[str, int]]:
    """In a training actor: its node, and the files of the export there."""
    import ray

    sizes = {
        str(Path(root, name).relative_to(directory)): Path(root, name).stat().st_size
        for root, _, names in os.walk(directory)
        for name in names
    }
    return ray.get_runtime_context().get_node_id(), sizes


def _read(path: str, offset: int, count: int) -> Any:
    import numpy

    return numpy.fromfile(path, numpy.uint8, count, offset=offset)


def _remove(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
