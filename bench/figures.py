"""What a benchmark comes to: figures with their spread, and ratios between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the samples lie, interpolated linearly.

    Args:
        samples: in any order; at least one.
        share: from 0 (the least) to 1 (the greatest).
    """
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


@dataclass(frozen=True)
class Figure:
    """One thing that was measured again and again.

    Attributes:
        unit: of the samples: ``ms``, ``s``, ``records/s`` …
        samples: in the order in which they were taken; at least one, all finite.
    """

    unit: str
    samples: tuple[float, ...]

    def at(self, share: float) -> float:
        """The percentile at ``share`` (0 to 1)."""
        return percentile(self.samples, share)

    @property
    def p50(self) -> float:
        """The median."""
        return self.at(0.5)

    @property
    def spread(self) -> float:
        """The middle half of the samples, as a part of the median."""
        return (self.at(0.75) - self.at(0.25)) / self.p50 if self.p50 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Unit, percentiles, greatest sample and number of samples."""
        return {
            "unit": self.unit,
            "p50": self.p50,
            "p90": self.at(0.9),
            "p99": self.at(0.99),
            "max": max(self.samples),
            "n": len(self.samples),
        }


@dataclass
class Report:
    """The result of one benchmark.

    Attributes:
        bench: its name.
        figures: ``<subject>/<what>`` → figure.
        ratios: name → a median over that of the baseline measured in the same run.
        notes: what a reader of the figures should know, a sentence each.
    """

    bench: str
    figures: dict[str, Figure] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, subject: str, what: str, unit: str, samples: Iterable[float]) -> Figure:
        """Enter a figure; returns it.

        Raises:
            ValueError: there are no samples, or one of them is no finite number.
        """
        figure = Figure(unit, tuple(map(float, samples)))
        if not figure.samples or not all(map(math.isfinite, figure.samples)):
            raise ValueError(
                f"{subject}/{what}: {figure.samples}: expected at least one finite number"
            )
        self.figures[f"{subject}/{what}"] = figure
        return figure

    def as_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """The object that ``--json`` writes."""
        return {
            "bench": self.bench,
            "machine": machine,
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
            "ratios": self.ratios,
        }


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of neighbours in time, which a slow minute changes little."""
    pairs = zip(numerators, denominators, strict=True)
    return percentile([above / below for above, below in pairs], 0.5)


def paired_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Where the true median of the ratios of neighbours lies, whatever their distribution.

    Between two of the ratios in order: the number of those below the true median is that of heads
    among as many fair coins, so that both ends together are missed with a probability of at most
    ``1 - confidence``. Of fewer than six pairs (at 95 %) it is the least and the greatest.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    n, missed, at = len(ratios), 0.0, 0
    while at < n // 2:
        missed += math.comb(n, at) / 2**n
        if 2 * missed > 1 - confidence:
            break
        at += 1
    lower = max(at - 1, 0)
    return ratios[lower], ratios[n - 1 - lower]
