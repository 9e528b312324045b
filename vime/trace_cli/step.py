"""``vime trace replay --step``: walk through the records of a trace by key."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from vime.fsm.filters import Filter
from vime.fsm.lives import Key, TraceClock, key_of
from vime.fsm.read import TraceFile
from vime.fsm.record import Record
from vime.fsm.replay import Divergence, Present, Replay
from vime.fsm.sentences import line
from vime.fsm.text import clean
from vime.trace_cli import common

_KEEP = 1_000
_HELP = "n, space, →: next   p, ←: back   g: first   G: last   q: quit"
_KEYS = {"n": "next", " ": "next", "\x1b[C": "next", "p": "back", "\x1b[D": "back"}
_KEYS |= {"g": "first", "G": "last", "q": "quit", "\x03": "quit", "\x04": "quit", "": "quit"}


class Stop(NamedTuple):
    """Where the walk stands: a record, and what the replay says of it."""

    record: Record
    at_ns: int
    divergence: Divergence | None
    key: Key
    before: Present | None


class Walk:
    """Goes forth and back over a trace; back without reading again, for the latest records.

    Attributes:
        position: how many records have been replayed.
        replay: the machines as they are then.
    """

    def __init__(self, trace: TraceFile, filter: Filter) -> None:
        self._trace = trace
        self._filter = filter
        self._rewind()

    def _rewind(self) -> None:
        self.position = 0
        self.replay = Replay()
        self._clock = TraceClock()
        self._records = iter(self._trace)
        self._past: deque[Stop] = deque(maxlen=_KEEP)
        self._future: list[Stop] = []

    @property
    def here(self) -> Stop | None:
        """The record that was replayed last."""
        return self._past[-1] if self._past else None

    def next(self) -> bool:
        """To the next record that is asked for; ``False`` and unmoved when there is none."""
        start = self.position
        while self._forth():
            if self._is_wanted():
                return True
        self._to(start)
        return False

    def back(self) -> bool:
        """To the one before that is asked for; ``False`` and unmoved when there is none."""
        start = self.position
        while self.position > 1:
            self._to(self.position - 1)
            if self._is_wanted():
                return True
        self._to(start)
        return False

    def first(self) -> None:
        """To the first record that is asked for."""
        start = self.position
        self._rewind()
        if not self.next():
            self._to(start)

    def last(self) -> None:
        """To the last one."""
        while self.next():
            pass

    def _is_wanted(self) -> bool:
        here = self.here
        return here is not None and self._filter.wants(here.record, here.at_ns, self._clock)

    def _to(self, position: int) -> None:
        if position < self.position - len(self._past):  # further back than is kept
            self._rewind()
        while self.position > position:
            self._undo()
        while self.position < position and self._forth():
            pass

    def _forth(self) -> bool:
        record = self._future.pop().record if self._future else next(self._records, None)
        if record is None:
            return False
        key = key_of(record)
        present = self.replay.machines.get(key)
        before = None if present is None else replace(present)
        divergence = self.replay.step(record)
        self._past.append(Stop(record, self._clock.at(record), divergence, key, before))
        self.position += 1
        return True

    def _undo(self) -> None:
        stop = self._past.pop()
        self._future.append(stop)
        self.position -= 1
        if stop.before is None:
            del self.replay.machines[stop.key]
        else:
            self.replay.machines[stop.key] = stop.before


def run(trace: TraceFile, filter: Filter) -> int:
    """Walk until the user quits.

    Raises:
        UsageError: the input is no terminal, or no record is asked for.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise common.UsageError("--step needs a terminal: it waits for keys")
    walk = Walk(trace, filter)
    if not walk.next():
        common.tell_problems(trace)
        raise common.UsageError(f"{trace.path}: no record to step to")
    actions = {"next": walk.next, "back": walk.back, "first": walk.first, "last": walk.last}
    with _single_keys():
        while True:
            _draw(walk)
            name = _KEYS.get(_key())
            if name == "quit":
                break
            if name is not None:
                actions[name]()
    common.tell_problems(trace)
    return common.OK


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one and unseen; the terminal is put back whatever happens."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key() -> str:
    """One key; arrows come as an escape sequence in one read."""
    return os.read(sys.stdin.fileno(), 8).decode(errors="replace")


def _draw(walk: Walk) -> None:
    from vime.fsm.render import plain_table

    here = walk.here
    assert here is not None, "the walk begins at a record"
    rows = [
        [
            "▸" if key == here.key else "",
            *(clean(part, 60) for part in key[2:]),
            clean(present.state, 40),
            str(present.since_seq),
            clean(present.weight_version or "", 80),
        ]
        for key, present in _around(walk.replay.machines, here.key)
    ]
    out = common.console()
    out.clear()
    out.print(f"record {walk.position}   {line(here.record, here.at_ns)}")
    if here.divergence is not None:
        out.print(f"DIVERGES: {here.divergence}", style="red")
    out.print(plain_table(("", "machine", "id", "state", "since seq", "weights"), rows))
    out.print(_HELP)


def _around(machines: dict[Key, Present], key: Key) -> list[tuple[Key, Present]]:
    """As many machines as fit on a screen, that of ``key`` and the latest ones."""
    room = max(os.get_terminal_size(sys.stdout.fileno()).lines - 6, 3)
    shown = list(machines.items())[-room:]
    if all(name != key for name, _ in shown):
        shown[0] = key, machines[key]
    return shown
