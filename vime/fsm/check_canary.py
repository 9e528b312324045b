"""Invariant 4 again: engines that serve the same weights answer the canary prompts alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vime.fsm.canary import Canary, difference
from vime.fsm.check_rule import Context, Rule, Run, Violation, run_of
from vime.fsm.record import Record
from vime.fsm.text import clean

_MEMORY = 256


@dataclass(frozen=True, slots=True)
class _Served:
    """What an engine proved when it began to serve."""

    record: Record
    digest: str
    canary: Canary


class CanaryRule(Rule):
    """4: a point is scored by engines that answered alike, and as ever to the same weights.

    Attributes:
        num_unchanged: how many points were answered exactly as one with other weights was: a load
            that did nothing, or weights that differ where no canary looks.
    """

    invariant = 4
    machines = ("point", "engine")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._serving: dict[Run, dict[str, _Served]] = {}
        self._heard: dict[Run, OrderedDict[str, _Served]] = {}
        self.num_unchanged = 0

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        if record.machine == "engine":
            serving = self._serving.setdefault(run_of(record), {})
            serving.pop(record.id, None)
            served = _served(record)
            if served is not None:
                serving[record.id] = served
        elif record.trigger == "finish":
            return self._finish(record)
        return ()

    def _finish(self, record: Record) -> Iterator[Violation]:
        serving = self._serving.get(run_of(record), {})
        mine = [s for s in serving.values() if s.record.weight_version == record.weight_version]
        if not mine:
            return
        first, heard = mine[0], self._heard.setdefault(run_of(record), OrderedDict())
        before = heard.get(first.digest)
        for other in (*mine[1:], *([before] if before is not None else [])):
            differs = difference(first.canary, other.canary)
            if differs is not None and first.digest == other.digest:
                text = f"point {_short(record.id)} is scored on weights that "
                text += f"{_short(first.record.id)} answers otherwise than "
                text += f"{_short(other.record.id)} did: {differs}"
                yield self.broken(text, other.record, first.record, record)
        self.num_unchanged += any(
            served.canary.digest == first.canary.digest and digest != first.digest
            for digest, served in heard.items()
        )
        heard[first.digest] = first
        if len(heard) > _MEMORY:
            heard.popitem(last=False)


def _served(record: Record) -> _Served | None:
    detail = record.detail or {}
    digest, canary = detail.get("digest"), Canary.of_detail(detail.get("canary"))
    if record.trigger != "serve" or not isinstance(digest, str) or canary is None:
        return None
    return _Served(record, digest, canary)


def _short(text: str) -> str:
    return clean(text, 80)
