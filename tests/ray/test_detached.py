"""Who owns a fleet that outlives its driver: one at a time, and the next only after a death.

The ledger is the real one, without Ray around it; over a real cluster it is in
``test_driver_dies.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from vime.eval.fleet.settings import FleetSettings
from vime.ray import detached
from vime.ray.detached import Claim, Ledger, fleet_name

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Sign:
    """A driver's sign of life, as the ledger holds it."""

    def __init__(self) -> None:
        self.dead = anyio.Event()
        self.live = SimpleNamespace(remote=lambda: self)

    def __await__(self) -> Any:
        return self.dead.wait().__await__()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_POLL_S", 0.01)


async def claimed(ledger: Ledger, owner: str, sign: Sign) -> Claim:
    found = await ledger.claim(owner, [sign])
    assert isinstance(found, Claim)
    return found


async def test_a_fleet_is_its_owners_until_that_one_is_dead() -> None:
    ledger, first, second = Ledger(), Sign(), Sign()
    claim = await claimed(ledger, "first", first)
    assert claim.placed is None
    assert await ledger.claim("second", [second]) == "first"
    first.dead.set()
    later = await claimed(ledger, "second", second)
    assert later.tokens == claim.tokens, "the engines know no others"
    assert later.epoch == claim.epoch + 1


async def test_of_two_who_claim_at_once_one_is_told_of_the_other() -> None:
    ledger, before = Ledger(), Sign()
    await claimed(ledger, "before", before)
    before.dead.set()
    found: list[Any] = []

    async def claim(owner: str) -> None:
        found.append(await ledger.claim(owner, [Sign()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim, "a")
        tasks.start_soon(claim, "b")
    assert [type(answer) for answer in found].count(Claim) == 1
    assert [answer for answer in found if answer in ("a", "b")]


async def test_only_the_present_owner_says_where_the_fleet_is() -> None:
    ledger, first = Ledger(), Sign()
    early = await claimed(ledger, "first", first)
    assert await ledger.note(early.epoch, ("group", ()))
    first.dead.set()
    late = await claimed(ledger, "second", Sign())
    assert late.placed == ("group", ())
    assert not await ledger.note(early.epoch, ("another", ()))
    assert await ledger.note(late.epoch, ("moved", ()))


def test_only_who_wants_the_same_engines_gets_the_same_fleet() -> None:
    def name(**changes: Any) -> str:
        return fleet_name(FleetSettings(**{"num_engines": 2, "base": Path("/b"), "run_dir": Path("/r")} | changes))  # fmt: skip

    assert name() == name(run_dir=Path("/another"), pin_timeout_s=1.0)
    others = [name(num_engines=3), name(base=Path("/c")), name(num_gpus_per_engine=2), name(vllm={"max_model_len": 8})]  # fmt: skip
    assert len({name(), *others}) == 5


def test_no_token_shows_where_a_claim_is_printed() -> None:
    claim = Claim(Ledger()._tokens, None, 1)
    assert claim.tokens.control not in repr(claim)
    assert claim.tokens.api_key not in repr(claim)
