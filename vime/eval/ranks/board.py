"""Notes that the ranks of a run leave for each other, without a collective.

A collective waits for its slowest rank, and for ever when that has died. Here a rank only writes
notes and looks for notes, in the store by which ``torch.distributed`` has brought the ranks
together, and everything that waits has a deadline.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import torch.distributed as dist

_REPLY_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.01
_num_boards: Counter[tuple[int, ...]] = Counter()


class BoardClosed(RuntimeError):
    """Nobody will write the note any more."""


class Board:
    """The notes of one dispatcher; every rank makes its boards in the same order.

    Args:
        group: its ranks share the board; all of them if ``None``.

    Attributes:
        rank: the place of this process in the group; 0 leads.
        size: how many ranks there are.

    Raises:
        ValueError: ``torch.distributed`` has not been initialised, or this rank is not in the
            group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "torch.distributed is not initialised: call init_process_group first, as torchrun "
                "expects; a single process uses EvalDispatcher"
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: this rank does not belong to it")
        ranks = tuple(dist.get_process_group_ranks(group))
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
        distributed: Any = dist
        store = distributed.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # torch 2.8 and later
            # A connection of its own: others wait on theirs for minutes, and hold it meanwhile.
            store = store.clone()
            store.set_timeout(timedelta(seconds=_REPLY_TIMEOUT_S))
        self._store: Any = distributed.PrefixStore(f"vime/{name}/{_num_boards[ranks]}", store)
        _num_boards[ranks] += 1
        self._closed = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that evaluates."""
        return self.rank == 0

    def post(self, key: str, note: Mapping[str, Any]) -> None:
        """Leave a note, in the place of an older one of that key.

        Raises:
            RuntimeError: the store is gone, and with it the rank or the agent that has it.
        """
        self._store.set(key, orjson.dumps(note))

    def read(self, key: str) -> dict[str, Any] | None:
        """The note of a key, if it is there."""
        if not self._store.check([key]):
            return None
        note: dict[str, Any] = orjson.loads(self._store.get(key))
        return note

    def remove(self, *keys: str) -> None:
        """Take notes away; they may as well stay when the store is gone."""
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def wait_for_any(
        self, keys: Sequence[str], deadline: float, *, ends_with: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Wait until at least one of the notes is there.

        Args:
            keys: of the notes.
            deadline: on the monotonic clock, in seconds.
            ends_with: a note after which none of them will come.

        Returns:
            Key → note, of those that are there; nothing after the deadline.

        Raises:
            BoardClosed: this rank closes, or ``ends_with`` is there.
            RuntimeError: the store is gone.
        """
        while True:
            ended = ends_with is not None and self._store.check([ends_with])
            found = {key: note for key in keys if (note := self.read(key)) is not None}
            if found or time.monotonic() >= deadline:
                return found
            if ended or self._closed.wait(_LOOK_EVERY_S):
                raise BoardClosed(
                    "rank 0 has closed its dispatcher" if ended else "this rank is closing"
                )

    def close(self) -> None:
        """End every wait of this rank."""
        self._closed.set()
