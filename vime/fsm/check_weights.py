"""Invariants 4, 5, 6 and 8: weights, snapshots and engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vime.fsm.check_rule import Context, Rule, Run, Violation, run_of
from vime.fsm.lives import Key, key_of
from vime.fsm.record import Record
from vime.fsm.tables import NEW, POINT, SNAPSHOT
from vime.fsm.text import clean, count


@dataclass(slots=True)
class _Use:
    """A point that runs on some engines."""

    record: Record
    engines: frozenset[str] | None


class ProofRule(Rule):
    """4: engines serve what they were pinned to, and a point is scored on what was proven."""

    invariant = 4
    machines = ("point", "engine")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pins: dict[Key, Record] = {}
        self._serves: dict[Run, dict[str, Record | None]] = {}
        self._uses: dict[Run, dict[str, _Use]] = {}
        self._pinned: set[Key] = set()

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        if record.machine == "engine":
            return self._engine(record)
        key = key_of(record)
        if record.trigger == "pin":
            self._pinned.add(key)
        elif record.trigger == "run":
            return self._begin(record)
        elif record.dest in POINT.terminal:
            use = self._uses.get(run_of(record), {}).pop(record.id, None)
            was_pinned = key in self._pinned
            self._pinned.discard(key)
            if record.trigger == "finish":
                return self._finish(record, use, was_pinned)
        return ()

    def _engine(self, record: Record) -> Iterator[Violation]:
        key, run = key_of(record), run_of(record)
        version = record.weight_version
        self._serves.setdefault(run, {})[record.id] = record if record.dest == "serving" else None
        if record.trigger == "pin":
            self._pins[key] = record
            for point, use in self._uses.get(run, {}).items():
                asked = use.engines is None or record.id in use.engines
                if asked and version and use.record.weight_version not in (None, version):
                    text = f"engine {_short(record.id)} is pinned to {_short(version)} while "
                    text += f"point {_short(point)} runs on {_short(use.record.weight_version)}"
                    yield self.broken(text, use.record, record)
        elif record.trigger == "serve":
            pin = self._pins.get(key)
            pinned = None if pin is None else pin.weight_version
            if pinned and version and pinned != version:
                text = f"engine {_short(record.id)} was pinned to {_short(pinned)} and serves "
                yield self.broken(text + _short(version), pin, record)

    def _begin(self, record: Record) -> Iterator[Violation]:
        named = record.detail.get("engines") if record.detail else None
        engines = frozenset(map(str, named)) if isinstance(named, list) else None
        self._uses.setdefault(run_of(record), {})[record.id] = _Use(record, engines)
        serving = self._serves.get(run_of(record), {})
        version = record.weight_version
        if not serving or version is None:
            return
        late = run_of(record) in self.context.late
        for engine in sorted(engines or ()):
            if late and engine not in serving:
                continue
            serve = serving.get(engine)
            if serve is None or serve.weight_version not in (None, version):
                what = _short(serve.weight_version) if serve else "nothing"
                text = f"point {_short(record.id)} runs on {_short(version)}, and engine "
                yield self.broken(f"{text}{_short(engine)} serves {what}", serve, record)
        if (
            engines is None
            and not late
            and not any(serve and serve.weight_version == version for serve in serving.values())
        ):
            text = f"point {_short(record.id)} runs on {_short(version)}, and no engine serves it"
            yield self.broken(text, record)

    def _finish(self, record: Record, use: _Use | None, was_pinned: bool) -> Iterator[Violation]:
        version = record.weight_version
        ran_on = None if use is None else use.record.weight_version
        if was_pinned and version is None:
            text = f"point {_short(record.id)} was pinned and is scored without a weight version"
            yield self.broken(text, record)
        elif use is not None and ran_on != version:
            text = f"point {_short(record.id)} ran on {_short(ran_on)} and is scored as "
            yield self.broken(text + _short(version), use.record, record)
        metrics = record.detail.get("metrics") if record.detail else None
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if name.endswith("weight_version/mixed_ratio") and value:
                text = f"point {_short(record.id)} is scored on mixed weights: {_short(name)} is "
                yield self.broken(f"{text}{_short(str(value))}", record)


class VerifiedRule(Rule):
    """5: when an engine is pinned to a version, a snapshot of that version is verified."""

    invariant = 5
    machines = ("snapshot", "engine")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._snapshots: dict[tuple[Run, str], dict[str, Record]] = {}
        self._saw_snapshots: set[Run] = set()

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        run, version = run_of(record), record.weight_version
        if record.machine == "snapshot":
            self._saw_snapshots.add(run)
            if version is not None:
                known = self._snapshots.setdefault((run, version), {})
                known[record.id] = record
                if record.dest in SNAPSHOT.terminal:  # keep the memory of a long run small
                    del known[record.id]
                    if not known:
                        del self._snapshots[run, version]
            return ()
        if record.trigger != "pin" or version is None or run not in self._saw_snapshots:
            return ()
        known = self._snapshots.get((run, version), {})
        if any(snapshot.dest == "verified" for snapshot in known.values()):
            return ()
        if not known and run in self.context.late:
            return ()
        text = f"engine {_short(record.id)} is given {_short(version)}, which is not verified"
        return [self.broken(text, *known.values(), record)]


@dataclass(slots=True)
class _Leased:
    """A snapshot on disk."""

    last: Record
    owned: bool
    readers: list[Record] = field(default_factory=list)


class LeaseRule(Rule):
    """6: no snapshot goes while it is read, and none that vime did not write is deleted.

    Attributes:
        snapshots: those on disk.
    """

    invariant = 6
    machines = ("snapshot",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.snapshots: dict[Key, _Leased] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        key = key_of(record)
        leased = self.snapshots.get(key)
        if leased is None:
            leased = self.snapshots[key] = _Leased(record, record.trigger != "adopt")
        if record.source == NEW:
            leased.owned = record.trigger != "adopt"
        leased.last = record
        if record.trigger == "lease":
            leased.readers.append(record)
        elif record.trigger == "leave":
            if not leased.readers and run_of(record) not in self.context.late:
                return [self.broken(f"snapshot {_short(record.id)} is left by nobody", record)]
            del leased.readers[:1]
        if record.dest not in SNAPSHOT.terminal:
            return ()
        del self.snapshots[key]
        return self._gone(record, leased)

    def _gone(self, record: Record, leased: _Leased) -> Iterator[Violation]:
        name = _short(record.id)
        if leased.readers:
            text = f"snapshot {name} is {record.dest} under {count(len(leased.readers), 'reader')}"
            yield self.broken(text, *leased.readers, record)
        if record.trigger == "delete" and not leased.owned:
            yield self.broken(f"snapshot {name} is deleted and was never vime's", record)


class RemainsRule(Rule):
    """8: when the run has ended every engine is stopped, and no snapshot is read."""

    invariant = 8
    machines = ("engine", "snapshot")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._engines: dict[Key, Record] = {}
        self._leases = LeaseRule(context)

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        if record.machine == "snapshot":
            for _ in self._leases.feed(record):  # told by invariant 6
                pass
        else:
            self._engines[key_of(record)] = record
        return ()

    def end(self, ended: bool) -> Iterable[Violation]:
        """Engines that are up, snapshots that are read or written, when the run is over."""
        if not ended:
            return
        for last in self._engines.values():
            if last.dest != "stopped" and self.context.is_latest(last):
                text = f"engine {_short(last.id)} was {last.dest} when the run had ended"
                yield self.broken(text, last)
        for leased in self._leases.snapshots.values():
            in_use = leased.readers or leased.last.dest == "writing"
            if in_use and self.context.is_latest(leased.last):
                what = "read" if leased.readers else "written"
                text = f"snapshot {_short(leased.last.id)} was being {what} when the run had ended"
                yield self.broken(text, *leased.readers, leased.last)


def _short(text: str | None) -> str:
    return "no version" if text is None else clean(text, 80)
