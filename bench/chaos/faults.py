"""The faults that can be injected, and the seeded schedule that says which point each one hits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

NUM_ENGINES = 2
NUM_PROMPTS = 24
NUM_SHORT_POINTS = 5


@dataclass(frozen=True)
class Kind:
    """One way to break a run.

    Attributes:
        what: a sentence for people.
        moments: when it may strike; one is drawn. ``exporting``: in the user's own export;
            ``verified``: the snapshot has been found whole, and no engine has read it;
            ``pinning``: its turn at the fleet begins; ``loading``: the victim is told to load;
            ``running``: before the first request; ``answer``: at an answer that is drawn.
        reasons: what the point that it hits may be skipped for.
        may_finish: that point may have a score all the same.
        engines: how many engines have to be started again for it, at most.
    """

    what: str
    moments: tuple[str, ...]
    reasons: frozenset[str] = frozenset()
    may_finish: bool = True
    engines: int = 0


_LOST = frozenset({"unhealthy", "timeout_pin", "pin_violation"})
_AT_WORK = ("pinning", "loading", "running", "answer")


def _bad(what: str, moment: str, reason: str, engines: int = 0) -> Kind:
    """A snapshot that must never have a score."""
    return Kind(what, (moment,), frozenset({reason}), may_finish=False, engines=engines)


KINDS: dict[str, Kind] = {
    "kill_server": Kind("SIGKILL of an engine's API server", _AT_WORK, _LOST, engines=1),
    "kill_core": Kind("SIGKILL of an engine's EngineCore", _AT_WORK, _LOST, engines=1),
    "kill_worker": Kind("SIGKILL of an engine's worker", _AT_WORK, _LOST, engines=1),
    "stop_engine": Kind(
        "SIGSTOP of an engine's API server or EngineCore",
        ("running", "answer"),
        _LOST | {"timeout_eval"},
        engines=1,
    ),
    "kill_router": Kind("SIGKILL of the router", ("pinning", "running", "answer"), _LOST),
    "kill_runner": Kind("SIGKILL of the EvalRunner", ("running", "answer"), frozenset({"crashed"})),
    "slow_load": Kind("an engine that stands still for a while as it loads", ("loading",)),
    "truncated": _bad("an export cut in half", "exporting", "snapshot_invalid"),
    "incomplete": _bad("an export that lacks a layer", "exporting", "snapshot_invalid"),
    "foreign": _bad("an export of another model", "exporting", "snapshot_invalid"),
    "not_finite": _bad("an export with NaN", "exporting", "unhealthy"),
    "rotten": _bad("a byte that flips after the check", "verified", "pin_violation", NUM_ENGINES),
    "cut_later": _bad("a file cut after the check", "verified", "pin_violation", NUM_ENGINES),
    "full_before": _bad("staging is full as the export begins", "exporting", "export_failed"),
    "full_after": _bad("staging is full before the manifest", "exporting", "export_failed"),
}

#: What needs a small file system of its own for staging.
NEED_ROOM = frozenset({"full_before", "full_after"})


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    Attributes:
        kind: a key of :data:`KINDS`.
        point: the point that it hits; a fault of a process hits the first one from there on
            that comes as far as ``moment``.
        moment: see :class:`Kind`.
        engine: the victim, where it is an engine.
        answer: which answer of the point, from 1, where the moment is ``answer``.
        part: which process of the engine (``server`` or ``core``), where that is drawn.
    """

    kind: str
    point: int
    moment: str
    engine: int = 0
    answer: int = 0
    part: str = "server"

    @property
    def when(self) -> str:
        """The moment, for people."""
        return f"answer {self.answer}" if self.moment == "answer" else self.moment


def draw_schedule(
    seed: int,
    num_points: int,
    without: Iterable[str] = (),
    only: Sequence[str] = tuple(KINDS),
) -> list[Fault]:
    """Every kind once, in a drawn order and at drawn points; further ones where there is room.

    Every second point at most is hit, so that it can be said which fault a skip is due to.

    Args:
        seed: the same seed draws the same schedule.
        num_points: points 1 to ``num_points``; the first and the last one are left alone.
        without: kinds that this machine cannot inject.
        only: the kinds to draw from.

    Raises:
        ValueError: there are too few points for all the kinds.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind in only and kind not in set(without)]
    slots = list(range(2, num_points, 2))
    if len(slots) < len(kinds):
        raise ValueError(
            f"{num_points} points have room for {len(slots)} faults, and there are {len(kinds)} "
            f"kinds: expected at least {2 * len(kinds) + 1} points"
        )
    rng.shuffle(kinds)
    cheap = [kind for kind in kinds if not KINDS[kind].engines]
    num_more = (len(slots) - len(kinds)) // 2 if cheap else 0
    more = [rng.choice(cheap) for _ in range(num_more)]
    drawn = kinds + more
    rng.shuffle(drawn)
    points = sorted(rng.sample(slots, len(drawn)))
    return [_draw(rng, kind, point) for kind, point in zip(drawn, points, strict=True)]


def draw_short_schedule(seed: int) -> list[Fault]:
    """A bad snapshot, the runner, and last an engine, for whose return nobody waits."""
    rng = random.Random(seed)
    bad = rng.choice(["truncated", "incomplete", "foreign"])
    engine = rng.choice(["kill_server", "kill_core", "kill_worker"])
    first, second, last = (
        _draw(rng, kind, point)
        for kind, point in ((bad, 2), ("kill_runner", 3), (engine, NUM_SHORT_POINTS))
    )
    return [first, second, replace(last, moment="answer")]


def _draw(rng: random.Random, kind: str, point: int) -> Fault:
    return Fault(
        kind,
        point,
        rng.choice(KINDS[kind].moments),
        rng.randrange(NUM_ENGINES),
        rng.randint(2, NUM_PROMPTS // 2),
        rng.choice(["server", "core"]),
    )


def as_json(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """For the driver, which reads them with :func:`from_json`."""
    return [asdict(fault) for fault in faults]


def from_json(rows: Iterable[dict[str, Any]]) -> list[Fault]:
    """The inverse of :func:`as_json`."""
    return [Fault(**row) for row in rows]
