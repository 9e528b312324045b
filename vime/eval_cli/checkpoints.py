"""Finds the checkpoints to evaluate: those that were named, and those that appear."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vime.eval.paths import real_path
from vime.eval_cli.snapshot import examine

_STEP = re.compile(r"(?:^|[_-])(?:step|checkpoint|iter|global[_-]step)[_-]?0*(\d{1,15})$")


@dataclass(frozen=True)
class Checkpoint:
    """A directory to evaluate, and the step to report it at."""

    path: Path
    rollout_id: int


class Numbers:
    """Gives each checkpoint a step of its own."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def number(self, path: Path) -> Checkpoint:
        """The step in the directory's name (``step_40``, ``checkpoint-500``), or a free one.

        Two directories of one step cannot share its place: the second has the next free number.
        """
        step = step_of(path.name)
        if step is None or step in self._given:
            step = max(self._given, default=-1) + 1
        self._given.add(step)
        return Checkpoint(path, step)

    def number_all(self, paths: Iterable[Path]) -> list[Checkpoint]:
        """All of them, in the order of their steps; those without one come last."""

        def order(path: Path) -> tuple[bool, int]:
            step = step_of(path.name)
            return step is None, step or 0

        return [self.number(path) for path in sorted(paths, key=order)]


def step_of(name: str) -> int | None:
    """The training step that a directory's name ends with."""
    found = _STEP.search(name)
    return None if found is None else int(found[1])


class Watch:
    """Looks for new checkpoints below a directory.

    One that vime wrote is there whole or not at all. Any other is taken once it is a whole
    checkpoint and nothing of it has changed between two looks.

    Args:
        directory: its subdirectories are the checkpoints; hidden ones are left alone.
        known: directories that are no news.

    Attributes:
        unfinished: what is not whole so far → why not.
    """

    def __init__(self, directory: Path, known: Iterable[Path] = ()) -> None:
        self._directory = directory
        self._known = {real_path(path) for path in known}
        self._last_look: dict[Path, object] = {}
        self.unfinished: dict[Path, list[str]] = {}

    def look(self) -> list[Path]:
        """What has become whole since the last look, in the order of the steps.

        Raises:
            OSError: the directory cannot be read.
        """
        found, looks = [], {}
        for path in self._directory.iterdir():
            if path.name.startswith(".") or not path.is_dir() or real_path(path) in self._known:
                continue
            looks[path] = _state(path)
            if looks[path] != self._last_look.get(path):
                self.unfinished[path] = ["it is still being written"]
                continue
            problems = examine(path, None, digests=False).problems
            if problems:
                self.unfinished[path] = problems
                continue
            self._known.add(real_path(path))
            self.unfinished.pop(path, None)
            found.append(path)
        self._last_look = looks
        self.unfinished = {p: why for p, why in self.unfinished.items() if p in looks}
        return sorted(found, key=lambda path: (step_of(path.name) or 0, path.name))


def _state(directory: Path) -> object:
    """Changes when a file does; ``None`` for what vanishes meanwhile."""
    try:
        return sorted(
            (str(path), status.st_size, status.st_mtime_ns)
            for path in directory.rglob("*")
            for status in (path.stat(),)
        )
    except OSError:
        return None
