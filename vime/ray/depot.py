"""One Ray actor a node that looks after snapshots there, and one that sends them from the driver's.

Bulk data never passes through the driver's process: the sender reads a file piece by piece into
Ray's object store, and the depots hand each piece on from node to node. So the driver's node sends
a snapshot once, however many nodes there are, and all of them send and receive at the same time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from blake3 import blake3

from vime.eval.contracts import Snapshot
from vime.eval.snapshot.files import open_regular, read_small_file
from vime.ray.host import Facts, facts_here
from vime.ray.node_store import FileFacts, NodeStore, NotReceived

#: Where a node keeps the snapshots that have travelled to it, if not in --eval-hf-dir.
STAGING_VARIABLE: Final = "VIME_EVAL_HF_DIR"

CHUNK_BYTES: Final = 16 << 20
#: Pieces under way at once, beside one a node; all of them lie in the driver's object store.
_NUM_CHUNKS: Final = 5
_EDGE_BYTES: Final = 4096
_MAX_WORD_BYTES: Final = 1 << 10


@dataclass(frozen=True)
class Nonce:
    """A file that the driver has just written into its staging directory.

    Attributes:
        name: its path within that directory.
        value: its content, which nobody can guess.
    """

    name: str
    value: str


@dataclass(frozen=True)
class DepotOrder:
    """What one depot is to do.

    Attributes:
        run_id: the run.
        staging: ``--eval-hf-dir``, as the driver sees it.
        keep: how many finished snapshots stay on the node.
        verify: what digests are made of.
        nonce: tells whether the driver's staging directory is visible on the node.
    """

    run_id: str
    staging: Path
    keep: int
    verify: str
    nonce: Nonce


@dataclass(frozen=True)
class Reply:
    """What a depot answers.

    Attributes:
        value: what was asked for.
        problem: why there is none.
    """

    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Taken:
    """What a depot answers to a piece.

    Attributes:
        problem: why it has not got it.
        onward: Ray's reference to the piece, as it lies in this node's object store; ``None``
            where nobody has asked for it.
    """

    problem: str | None
    onward: Any = None


class Depot:
    """Looks after the snapshots of one node.

    Consumes: questions of the driver's :class:`~vime.ray.delivery.Deliveries`, pieces of a
    :class:`Sender`. Waits for the disk alone.
    """

    def __init__(self, order: DepotOrder) -> None:
        self._order = order
        self._root = Path(os.environ.get(STAGING_VARIABLE) or order.staging)
        self._store: NodeStore | None = None

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this depot's death."""
        await asyncio.Event().wait()

    def facts(self) -> Facts:
        """Of its node."""
        return facts_here()

    async def where(self) -> tuple[Facts, Path | None]:
        """Where it is, and under which name the driver's staging directory is visible here."""
        nonce = self._order.nonce
        try:
            found = await anyio.to_thread.run_sync(_word_in, self._root / nonce.name)
        except ValueError:
            return self.facts(), None
        return self.facts(), self._root if found == nonce.value else None

    async def sees(self, path: Path, print_: str) -> bool:
        """Whether somebody else's checkpoint is visible here under its own name."""
        return await anyio.to_thread.run_sync(fingerprint, path) == print_

    async def lease(self, weight_version: str) -> Reply:
        """Keep a snapshot here; answers with its path, if it is here."""
        return Reply(self._store and self._store.lease(weight_version))

    async def leave(self, weight_version: str) -> Reply:
        """Let go of one lease."""
        if self._store is not None:
            self._store.leave(weight_version)
        return Reply()

    async def begin(self, name: str, snapshot: Snapshot, files: dict[str, FileFacts]) -> Reply:
        """Make room; ``name`` is this depot's in traces."""
        try:
            (await self._opened(name)).begin(snapshot, files)
        except NotReceived as error:
            return Reply(problem=str(error))
        return Reply()

    async def write(self, name: str, offset: int, chunk: Any, hand_on: bool) -> Taken:
        """Take one piece, and have it ready for the next node if there is one."""
        assert self._store is not None, "it has begun"
        try:
            await self._store.write(name, offset, chunk)
        except NotReceived as error:
            return Taken(str(error))
        return Taken(None, await anyio.to_thread.run_sync(_put, chunk) if hand_on else None)

    async def seal(self) -> Reply:
        """Prove that everything has arrived as it was."""
        assert self._store is not None, "it has begun"
        try:
            await self._store.seal()
        except NotReceived as error:
            return Reply(problem=str(error))
        return Reply()

    async def close(self) -> Reply:
        """Remove everything that has travelled here."""
        if self._store is not None:
            await anyio.to_thread.run_sync(self._store.close)
        return Reply()

    async def records(self, num_known: int) -> list[bytes]:
        """The lines of the node's trace but the first ``num_known``, which are forgotten here."""
        return [] if self._store is None else self._store.records(num_known)

    async def _opened(self, name: str) -> NodeStore:
        if self._store is None:
            order = self._order
            store = NodeStore(self._root, order.run_id, name, order.keep, order.verify)
            await anyio.to_thread.run_sync(store.open)
            self._store = store
        return self._store


class Sender:
    """On the driver's node: puts the pieces of a snapshot where depots can take them from."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._buffer: Any = None

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this sender's death."""
        await asyncio.Event().wait()

    async def files(self, path: Path, owned: bool) -> dict[str, FileFacts]:
        """The files that have to travel."""
        return await anyio.to_thread.run_sync(travelling_files, path, owned)

    async def fingerprint(self, path: Path) -> str:
        """See :func:`fingerprint`."""
        return await anyio.to_thread.run_sync(fingerprint, path)

    async def send(
        self, path: Path, files: dict[str, FileFacts], depots: Mapping[str, Any]
    ) -> dict[str, str]:
        """Send every file to every depot, each piece from node to node.

        Args:
            path: the snapshot.
            files: from :meth:`files`; every depot has begun with them.
            depots: name → Ray's handle.

        Returns:
            name → what went wrong, of the depots that have not got everything.
        """
        problems: dict[str, str] = {}
        room = asyncio.Semaphore(_NUM_CHUNKS + len(depots))

        async def send_piece(name: str, offset: int, count: int) -> None:
            try:
                piece = await anyio.to_thread.run_sync(self._read, path / name, offset, count)
                await _hand_round(piece, name, offset, depots, problems)
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            for name, file in files.items():
                for offset in range(0, file.size, CHUNK_BYTES):
                    await room.acquire()
                    count = min(CHUNK_BYTES, file.size - offset)
                    tasks.create_task(send_piece(name, offset, count))
        return problems

    def _read(self, path: Path, offset: int, count: int) -> Any:
        """One piece, in the object store."""
        import numpy

        with self._reading, open_regular(path) as file:
            if self._buffer is None:  # fresh memory for each piece would cost as much as reading
                self._buffer = numpy.empty(CHUNK_BYTES, numpy.uint8)
            piece = self._buffer[:count]
            view, done = memoryview(piece), 0
            while done < count:
                num_read = os.preadv(file.fileno(), [view[done:]], offset + done)
                if not num_read:
                    raise OSError(f"{path}: it became shorter while it was sent")
                done += num_read
            return _put(piece)


async def _hand_round(
    piece: Any,
    name: str,
    offset: int,
    depots: Mapping[str, Any],
    problems: dict[str, str],
) -> None:
    """One piece to every depot that has had no problem so far, from each one to the next.

    When a node is lost, the one behind it gets the piece from the driver's.
    """
    source = piece
    sound = [depot_name for depot_name in depots if depot_name not in problems]
    for place, depot_name in enumerate(sound, 1):
        depot, hand_on = depots[depot_name], place < len(sound)
        taken = await _give(depot, name, offset, source, hand_on)
        if taken.problem is not None and source is not piece:
            taken = await _give(depot, name, offset, piece, hand_on)
        if taken.problem is not None:
            problems.setdefault(depot_name, taken.problem)
        else:
            source = taken.onward


async def _give(depot: Any, name: str, offset: int, source: Any, hand_on: bool) -> Taken:
    import ray

    from vime.ray.hosting import described

    try:
        taken: Taken = await depot.write.remote(name, offset, source, hand_on)
    except ray.exceptions.RayError as error:
        return Taken(described(error))
    return taken


def _put(data: Any) -> Any:
    """Copy data into this node's object store."""
    import ray

    return ray.put(data)


def _word_in(path: Path) -> str:
    return read_small_file(path, _MAX_WORD_BYTES, follow_link=False).decode(errors="replace")


def travelling_files(path: Path, owned: bool) -> dict[str, FileFacts]:
    """Path within a checkpoint → the file, of what an engine needs.

    Of a snapshot everything but its manifest, which the receiver makes anew from what it got; of
    somebody else's directory the weights and the JSON files beside them.
    """
    from vime.eval.snapshot.files import list_files
    from vime.eval.snapshot.manifest import FILE

    if owned:
        return {n: FileFacts.of(path / n) for n in list_files(path)[0] if n != FILE}
    return {
        entry.name: FileFacts.of(entry)
        for entry in sorted(path.iterdir())
        if entry.suffix in (".safetensors", ".json") and entry.is_file()
    }


def fingerprint(path: Path) -> str:
    """What tells one directory of weights from another without reading all of it.

    Returns:
        Hexadecimal BLAKE3 over name, size, first and last bytes of each weight file; of a
        directory that is not there, over nothing. What an engine loads is digested in full.
    """
    hasher = blake3()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
        size = file.stat().st_size
        hasher.update(f"{file.name}\0{size}\0".encode())
        with suppress(ValueError), open_regular(file) as stream:  # a pipe is no weight file
            hasher.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            hasher.update(stream.read(_EDGE_BYTES))
    return hasher.hexdigest()


def node_name(facts: Facts) -> str:
    """A node's name in traces, and in the names of their files."""
    return f"{facts.address.replace(':', '-')}-{facts.node_id[:8]}"
