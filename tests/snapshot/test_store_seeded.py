"""Random schedules of a store's life: after every step the disk and the trace keep their promises.

A failure names its seed; ``SEEDS`` can be set to it alone.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.snapshot.captures import CopiedCapture, Shop
from vime.eval.contracts import Snapshot
from vime.eval.snapshot.verify import verify
from vime.fsm.check import check
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

SEEDS = range(12)
NUM_MOVES = 25


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest whole checkpoint, a truncated one, and one of another model."""
    root = tmp_path_factory.mktemp("tiny")
    for name, num_bytes in {"whole": 8, "truncated": 8, "other": 4}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text("{}")
        entry = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
        header = json.dumps({"w": entry}).encode()
        data = bytes(num_bytes - (name == "truncated"))
        content = len(header).to_bytes(8, "little") + header + data
        (root / name / "model.safetensors").write_bytes(content)
    return root


class Player:
    """Makes random moves, and knows what must be on disk afterwards."""

    def __init__(self, shop: Shop, tiny: Path, keep: int, seed: int) -> None:
        self.shop = shop
        self.tiny = tiny
        self.keep = keep
        self.random = random.Random(seed)
        self.step = 0
        self.waiting: list[Snapshot] = []
        self.leases: list[tuple[Snapshot, ExitStack]] = []
        self.finished: list[int] = []

    async def move(self) -> None:
        moves = [self.seal, self.seal, self.spoil, self.cancel, self.discard, self.adopt]
        moves += [self.lease] * (2 * len(self.waiting)) + [self.leave] * len(self.leases)
        await self.random.choice(moves)()

    def draft(self) -> Any:
        self.step += 1
        return self.shop.store.begin(self.step)

    async def seal(self) -> None:
        self.waiting.append(
            await self.shop.store.seal(self.draft(), CopiedCapture(self.tiny / "whole"))
        )

    async def spoil(self) -> None:
        capture = CopiedCapture(self.tiny / self.random.choice(["truncated", "other"]))
        with pytest.raises(EvalSkip, match="snapshot_invalid"):
            await self.shop.store.seal(self.draft(), capture)
        assert capture.num_released == 1

    async def cancel(self) -> None:
        """At whatever moment the write has come to."""
        capture = CopiedCapture(self.tiny / "whole")
        with anyio.move_on_after(self.random.random() * 0.004):
            self.waiting.append(await self.shop.store.seal(self.draft(), capture))
        await capture.has_ended()

    async def discard(self) -> None:
        self.shop.store.discard(self.draft(), "export_failed: no memory")

    async def adopt(self) -> None:
        self.step += 1
        self.waiting.append(await self.shop.store.adopt(self.step, self.tiny / "whole"))

    async def lease(self) -> None:
        snapshot = self.random.choice(self.waiting)
        stack = ExitStack()
        stack.enter_context(self.shop.store.lease(snapshot))
        self.leases.append((snapshot, stack))
        if self.random.random() < 0.7:
            self.waiting.remove(snapshot)  # nobody else will ask for it

    async def leave(self) -> None:
        snapshot, stack = self.leases.pop(self.random.randrange(len(self.leases)))
        stack.close()
        if all(snapshot != other for other, _ in self.leases):
            if snapshot in self.waiting:
                self.waiting.remove(snapshot)
            if snapshot.owned:
                self.finished.append(snapshot.rollout_id)
        self.finished = sorted(self.finished)[-self.keep :] if self.keep else []

    async def check(self) -> None:
        await until_quiet(self.shop)
        in_use = {s.rollout_id for s in [*self.waiting, *(s for s, _ in self.leases)] if s.owned}
        expected = sorted(f"step_{n}" for n in in_use | set(self.finished))
        assert self.shop.visible() == expected
        for name in expected:
            verify(self.shop.staging / name, self.shop.store.base, digests=True)
        assert list(check(self.shop.records)) == []


async def until_quiet(shop: Shop) -> None:
    with anyio.fail_after(60):
        while shop.drafts():
            await anyio.lowlevel.checkpoint()
        await shop.settle()


@pytest.mark.parametrize("seed", SEEDS)
async def test_only_what_is_read_awaited_or_kept_is_on_disk(
    seed: int, tiny: Path, tmp_path: Path
) -> None:
    keep = seed % 3
    shop = Shop(tmp_path / "staging", tiny / "whole", keep=keep)
    shop.store.open()
    player = Player(shop, tiny, keep, seed)
    for _ in range(NUM_MOVES):
        await player.move()
        await player.check()
    while player.leases:
        await player.leave()
    shop.store.close()
    assert list(check(shop.records, ended=True)) == []
    assert len(shop.visible()) <= keep
    assert not list(shop.staging.glob(".vime*"))
