"""Asks every engine the same questions, and names the one that answers otherwise.

The load is proven by content; this proves what is computed with it. An engine whose kernels,
caches or packed copies of the weights are not those of the snapshot answers otherwise than its
neighbours, or just as it did before the load.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from vime.eval.contracts import Snapshot
from vime.fsm.canary import Canary, difference

PROMPTS: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (5, 2, 9, 4, 7, 1, 8, 3))
"""Token ids that every vocabulary has. What they mean does not matter."""

NUM_TOKENS = 2
"""Length of each answer: one of reading the prompt, one of going on from what was kept of it."""

_MEMORY = 64


@dataclass(frozen=True)
class Verdict:
    """What the answers of the engines to one snapshot say.

    Attributes:
        wrong: engine → why its answers are no proof; empty when all agree.
        canary: the answers, those of the first engine that is not wrong; ``None`` without one.
        unchanged_since: a version of other weights whose answers were exactly the same, if there
            was one.
    """

    wrong: Mapping[str, str]
    canary: Canary | None = None
    unchanged_since: str | None = None


@dataclass(frozen=True)
class _Heard:
    version: str
    canary: Canary


class Agreement:
    """Compares engines with each other, and with what was answered before in this run."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, _Heard] = OrderedDict()

    def judge(self, snapshot: Snapshot, canaries: Mapping[str, Canary]) -> Verdict:
        """Compare the answers of all engines that have loaded ``snapshot``.

        Args:
            snapshot: what they have loaded.
            canaries: engine → its answers.
        """
        wrong = outliers(canaries) if canaries else {}
        canary = next((c for name, c in canaries.items() if name not in wrong), None)
        if canary is None:
            return Verdict(wrong)
        before = self._heard.pop(snapshot.digest, None)
        if before is not None and (differs := difference(before.canary, canary)) is not None:
            # One of the two was wrong. It is forgotten, so that the next pin decides anew.
            told = f"the same weights answered otherwise as {before.version}: {differs}"
            return Verdict(dict.fromkeys(canaries, told) | wrong)
        unchanged = next(
            (
                heard.version
                for digest, heard in self._heard.items()
                if heard.canary.digest == canary.digest and digest != snapshot.digest
            ),
            None,
        )
        self._heard[snapshot.digest] = _Heard(snapshot.weight_version, canary)
        if len(self._heard) > _MEMORY:
            self._heard.popitem(last=False)
        return Verdict(wrong, canary, unchanged)


def outliers(canaries: Mapping[str, Canary]) -> dict[str, str]:
    """The engines outside the largest group that agrees; all, when it is no majority.

    Engines of one kind answer exactly alike, however many they are: what is compared with each
    other are the different answers.

    Returns:
        engine → where it differs, and from whom.
    """
    heads = Counter(canaries.values())
    groups: dict[Canary, set[Canary]] = {}
    for mine in heads:
        groups[mine] = {other for other in heads if difference(mine, other) is None}
        if len(groups[mine]) == len(heads):
            return {}
    sizes = {mine: sum(heads[other] for other in group) for mine, group in groups.items()}
    speaker = max(sizes, key=lambda mine: sizes[mine])
    has_majority = 2 * sizes[speaker] > len(canaries)
    others = [speaker] if has_majority else list(heads)
    first = {canary: name for name, canary in reversed(list(canaries.items()))}
    told = {}
    for mine in heads:
        if not (has_majority and mine in groups[speaker]):
            found = ((first[other], difference(mine, other)) for other in others)
            against, differs = next((n, d) for n, d in found if d is not None)
            told[mine] = f"it answers otherwise than {against}: {differs}"
    return {name: told[mine] for name, mine in canaries.items() if mine in told}
