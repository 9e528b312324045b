"""Reads a checkpoint's tensors one by one, and digests the very bytes that it hands out.

Whoever loads them works meanwhile: other threads read and digest the next ones, where there are
cores for them that nobody computes on. A thread that has to take turns on a core loses it now and
then while it holds the interpreter lock, and the loader waits until it has its turn again: without
cores of its own, reading in turn with loading is several times quicker.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.eval.contracts import Content
from vime.eval.fleet.devices import READER_CORES_VARIABLE
from vime.eval.fleet.host_memory import HostMemory
from vime.eval.snapshot.files import open_regular
from vime.eval.snapshot.float_bits import NanSearch
from vime.eval.snapshot.inspection import CACHED_BYTES, Inspection
from vime.eval.snapshot.manifest import ManifestTensor, combined_digest
from vime.eval.snapshot.stamps import FULL, stamps
from vime.eval.snapshot.weights import dtype_name, read_weights

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 32 << 20
"""How much is read before it is asked for; one tensor at any rate.

Little enough to be in the processor's caches still when it is loaded.
"""

_MAX_THREADS = 4
"""That read: each some 2.5 GB/s, digest included."""


@dataclass
class _Reading:
    """A tensor on its way.

    Attributes:
        name: which.
        num_bytes: its size.
        data: the memory for it; let go of when it is given, for a thread remembers its last task.
        found: what will be found in it.
    """

    name: str
    num_bytes: int
    data: torch.Tensor | None
    found: Future[Content] = field(default_factory=Future)


class TensorReader:
    """Iterates over the weights of a checkpoint, and keeps account of what it gave.

    Each tensor is read into memory that nobody else has, digested there, and given from there:
    nothing that happens to the file afterwards can make the account untrue. Not a map of the file,
    because there a page is only read when it is used.

    Args:
        directory: a Hugging Face checkpoint with safetensors files.
        verify: ``headers`` puts each tensor's stamp in the place of its digest, and always looks
            for NaNs.
        look_for_nan: whoever digested the same bytes before may have done so.

    Attributes:
        given: name → type, shape and digest of every tensor that was given so far.
        with_nan: the names of those in which a NaN was found.
        num_bytes: their size.

    Raises:
        vime.eval.snapshot.weights.WeightsError: the weight files are not whole.
    """

    def __init__(self, directory: Path, verify: str = FULL, *, look_for_nan: bool = True) -> None:
        self._directory = directory
        self._look_for_nan = look_for_nan
        self._infos = read_weights(directory)
        self._stamps = None if verify == FULL else stamps(directory, self._infos)
        self.given: dict[str, ManifestTensor] = {}
        self.with_nan: list[str] = []
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        """What the manifest of a snapshot with just the tensors given says."""
        return combined_digest(self.given)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) file by file, in the order in which they lie there.

        Neighbours in a file belong to one layer, and a loader that waits for whole layers then
        holds few of them at a time. The tensors are on the CPU.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file became shorter, or holds a type that torch lacks.
        """
        places = sorted((info.file, info.start, name) for name, info in self._infos.items())
        names = deque(name for _, _, name in places)
        memory = HostMemory()
        ahead: deque[_Reading] = deque()
        cores = _reader_cores()
        num_threads = min(len(cores), _MAX_THREADS)
        threads = (
            ThreadPoolExecutor(num_threads, "vime-reader", _run_on, (cores,))
            if cores
            else _AtOnce()
        )

        def read_ahead() -> None:
            while names and self._has_room(ahead, names[0], AHEAD_BYTES if cores else 0):
                ahead.append(self._begin(threads, memory, names.popleft()))

        try:
            read_ahead()
            while ahead:
                reading = ahead.popleft()
                tensor = self._account(reading, reading.found.result())
                if cores:
                    read_ahead()
                yield reading.name, tensor
                del tensor  # another one may have the memory, if the loader let go of it
                read_ahead()
        finally:
            threads.shutdown(cancel_futures=True)

    def _has_room(self, ahead: deque[_Reading], name: str, limit: int) -> bool:
        num_bytes = sum(reading.num_bytes for reading in ahead)
        return not ahead or num_bytes + self._infos[name].num_bytes <= limit

    def _begin(self, threads: Executor, memory: HostMemory, name: str) -> _Reading:
        num_bytes = self._infos[name].num_bytes
        reading = _Reading(name, num_bytes, memory.take(num_bytes))
        reading.found = threads.submit(self._read, reading)
        return reading

    def _read(self, reading: _Reading) -> Content:
        """Fill the memory, and look at what is in it; all of it leaves the interpreter lock."""
        assert reading.data is not None, "it was not given yet"
        info, content = self._infos[reading.name], reading.data.numpy().data
        dtype = info.dtype if self._look_for_nan else None
        # A digest of several threads would take the loader's core.
        inspection = Inspection(dtype) if self._stamps is None else NanSearch(info.dtype)
        with open_regular(self._directory / info.file) as file:
            for start in range(0, info.num_bytes, CACHED_BYTES):
                piece = content[start : start + CACHED_BYTES]
                _fill(piece, file, info.start + start)
                inspection.look(piece)
        if isinstance(inspection, Inspection):
            return inspection.content
        assert self._stamps is not None
        return Content(self._stamps[reading.name], inspection.found)

    def _account(self, reading: _Reading, found: Content) -> torch.Tensor:
        """Enter a tensor that is given now."""
        name, info = reading.name, self._infos[reading.name]
        data, reading.data = reading.data, None
        assert data is not None, "it is given once"
        self.given[name] = ManifestTensor(info.dtype, info.shape, found.digest, info.file)
        self.num_bytes += info.num_bytes
        if found.with_nan:
            self.with_nan.append(name)
        return data.view(_torch_dtype(info.dtype)).view(info.shape)


def _fill(buffer: memoryview, file: FileIO, position: int) -> None:
    """Read until the buffer is full."""
    done = 0
    while done < len(buffer):
        count = os.preadv(file.fileno(), [buffer[done:]], position + done)
        if not count:
            raise ValueError(f"{Path(str(file.name)).name}: it became shorter while it was read")
        done += count


class _AtOnce(Executor):
    """Does everything on the thread that asks for it, before it goes on."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def _reader_cores() -> set[int]:
    """The cores that the supervisor has named; by default those that the loader does not run on.

    OpenMP has bound the loader's thread, and all that it starts, to the model's own cores. Where
    there are no others, as for a loader that is bound to nothing, all are meant.
    """
    named = os.environ.get(READER_CORES_VARIABLE)
    if named is not None:
        return {int(core) for core in named.split(",") if core}
    own = os.sched_getaffinity(0)
    try:
        every = os.sched_getaffinity(os.getppid())
    except OSError:  # it has died, or is somebody else's
        every = own
    return every - own or every


def _run_on(cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # one of them was taken away meanwhile
        os.sched_setaffinity(0, cores)


def _torch_dtype(dtype: str) -> torch.dtype:
    import torch

    found = getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor of type {dtype}: this torch ({torch.__version__}) has none")
    return found
