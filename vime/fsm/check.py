"""The ten invariants of an evaluated run, as far as its trace shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vime.fsm.check_canary import CanaryRule
from vime.fsm.check_disk import DiskRule
from vime.fsm.check_life import LifeRule, VersionRule
from vime.fsm.check_points import EndsRule, HoldRule, StepRule, WaitRule, WindowRule
from vime.fsm.check_record import OrderRule
from vime.fsm.check_rule import Context, Rule, Violation
from vime.fsm.check_weights import LeaseRule, ProofRule, RemainsRule, VerifiedRule
from vime.fsm.record import Record

#: What each number stands for; the dispatcher's docstring has the same list.
INVARIANTS = {
    1: "every dispatched point reaches exactly one end",
    2: "at most --eval-max-in-flight points are pending",
    3: "dispatch holds the caller for a bounded time",
    4: "a score belongs to exactly the point's weights",
    5: "no engine is given a snapshot that was not verified",
    6: "a snapshot is deleted by its owner, after its last reader",
    7: "every wait has a deadline",
    8: "nothing of the run is left when it has ended",
    9: "the trace is gapless and says what the tables say",
    10: "a result lands at its own step",
}

RULES: tuple[type[Rule], ...] = (
    OrderRule,  # the first: it finds out which runs began before the trace
    LifeRule,
    EndsRule,
    WindowRule,
    HoldRule,
    ProofRule,
    CanaryRule,
    VersionRule,
    VerifiedRule,
    LeaseRule,
    DiskRule,
    WaitRule,
    RemainsRule,
    StepRule,
)


class Check:
    """Every rule at work on one trace; feed it records in the order of the trace.

    Args:
        ended: the run is over, so that whatever is unfinished is a fault. Without it that is
            known only of a run whose engines were all stopped.

    Attributes:
        num_rejected: how many illegal triggers were refused; they changed nothing.
        num_unchanged: how many points had exactly the canary answers of other weights.
        num_pending: after :meth:`end`: how many points had no end when the trace ended.
    """

    def __init__(self, *, ended: bool = False) -> None:
        self._ended = ended
        context = Context()
        self._rules = [rule(context) for rule in RULES]
        self._by_machine: dict[str, list[Rule]] = {}
        self._engines: dict[tuple[str, str, str], str] = {}
        self.num_rejected = 0
        self.num_pending = 0
        self.num_unchanged = 0

    def feed(self, record: Record) -> list[Violation]:
        """What ``record`` violates."""
        rules = self._by_machine.get(record.machine)
        if rules is None:
            rules = [r for r in self._rules if not r.machines or record.machine in r.machines]
            self._by_machine[record.machine] = rules
        if record.machine == "engine":
            self._engines[record.run_id, record.node, record.id] = record.dest
        self.num_rejected += record.rejected
        found: list[Violation] = []
        for rule in rules:
            if not record.rejected or rule.reads_rejected:
                broken = rule.feed(record)
                if broken != ():
                    found += broken
        return found

    def end(self) -> Iterator[Violation]:
        """What is wrong now that the trace has ended."""
        stopped = bool(self._engines) and set(self._engines.values()) == {"stopped"}
        for rule in self._rules:
            if isinstance(rule, EndsRule):
                self.num_pending = len(rule.pending)
            if isinstance(rule, CanaryRule):
                self.num_unchanged = rule.num_unchanged
            yield from rule.end(self._ended or stopped)


def check(records: Iterable[Record], *, ended: bool = False) -> Iterator[Violation]:
    """Every violation of an invariant that ``records`` show, in the order of the trace."""
    run = Check(ended=ended)
    for record in records:
        yield from run.feed(record)
    yield from run.end()
