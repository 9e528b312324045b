"""The table that a chaos run ends with, and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from bench.chaos.audit import Attribution, Evidence
from bench.chaos.faults import Fault
from bench.chaos.leftovers import Leftovers

_WIDTH = 110


@dataclass
class Report:
    """Everything that was found; the lists are what must be empty.

    Attributes:
        seed: repeats the schedule.
        schedule: the faults that were drawn.
        evidence: of the run with the faults.
        attribution: of the same.
        wrong_scores: a sentence for each.
        recomputed: how many scores were recomputed, by ``transformers`` and by a cold engine.
        violations: invariants that a trace breaks.
        leftovers: of all runs.
        broken_off: a run that did not end as it should, one sentence each.
        kills: the orders in which whole runs were killed.
        notes: what could not be done here.
    """

    seed: int
    schedule: Sequence[Fault]
    evidence: Evidence
    attribution: Attribution
    wrong_scores: list[str] = field(default_factory=list)
    recomputed: tuple[int, int] = (0, 0)
    violations: list[str] = field(default_factory=list)
    leftovers: Leftovers = field(default_factory=Leftovers)
    broken_off: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def must_be_none(self) -> dict[str, list[str]]:
        """Heading → what was found of it."""
        survivors = [
            f"{name}, after {hit.fault.kind} at point {hit.fault.point}"
            for hit in self.evidence.injected.values()
            for name in hit.survivors
        ]
        return {
            "wrong scores": self.wrong_scores,
            "unattributed points": self.attribution.unattributed,
            "leaked processes": survivors + self.leftovers.processes,
            "leaked directories": self.leftovers.directories,
            "leaked shared memory": self.leftovers.shared_memory,
            "leaked ports": self.leftovers.ports,
            "broken invariants": self.violations,
            "runs that broke off": self.broken_off,
            "faults not injected": self._missed(),
        }

    def _missed(self) -> list[str]:
        return [
            f"{fault.kind} at point {fault.point} ({fault.when})"
            for number, fault in enumerate(self.schedule)
            if number not in self.evidence.injected
        ]

    @property
    def passed(self) -> bool:
        """Nothing was found that must not be."""
        return not any(self.must_be_none().values())


def print_report(report: Report) -> None:
    """Print the faults, the points, and what must be none."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console = Console(soft_wrap=True, highlight=False, width=_WIDTH)
    console.print(_faults(report))
    console.print(_totals(report))
    for heading, found in report.must_be_none().items():
        for sentence in found:
            console.print(f"{heading}: {sentence}", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    verdict = "passed" if report.passed else "FAILED"
    console.print(f"chaos {verdict}: seed {report.seed}")


def _faults(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, title="faults", title_justify="left")
    for heading in ("point", "when", "fault", "its points", "skipped", "recovery", "cold start"):
        right = heading in ("point", "recovery", "cold start")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for number, hit in report.evidence.injected.items():
        cost = report.attribution.costs[number]
        table.add_row(
            str(hit.fault.point),
            hit.fault.when,
            hit.fault.kind,
            " ".join(map(str, hit.points)),
            " ".join(map(str, cost.skipped)) or "–",
            _seconds(cost.recovery_s),
            _seconds(cost.cold_start_s),
        )
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _totals(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    points, attribution = report.evidence.points.values(), report.attribution
    reasons = attribution.skipped_by_reason
    rows = {
        "faults injected": f"{len(report.evidence.injected)} ({_kinds(report)})",
        "points": f"{len(report.evidence.points)}",
        "done": str(sum("done" in point.ends for point in points)),
        "skipped": f"{reasons.total()} ({_counts(reasons)})",
        "engines restarted": f"{attribution.restarts}, without a fault "
        f"{attribution.restarts_without_fault}",
        "beyond the cold start": _beyond(attribution),
        "most points of one fault": str(
            max((len(cost.skipped) for cost in attribution.costs.values()), default=0)
        ),
        "scores recomputed": f"{report.recomputed[0]} by transformers, {report.recomputed[1]} by "
        "a cold engine too",
        "whole runs killed": "; ".join(report.kills) or "none",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    for name, found in report.must_be_none().items():
        table.add_row(f"{name} (0)", f"[bold]{len(found)}[/bold]")
    return table


def _kinds(report: Report) -> str:
    return _counts(Counter(hit.fault.kind for hit in report.evidence.injected.values()))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _beyond(attribution: Attribution) -> str:
    """From the death of an engine to a whole fleet, less the start that this takes."""
    beyond = [
        cost.recovery_s - cost.cold_start_s
        for cost in attribution.costs.values()
        if cost.recovery_s is not None and cost.cold_start_s is not None
    ]
    return ", ".join(f"{seconds:.1f} s" for seconds in sorted(beyond)) or "–"
