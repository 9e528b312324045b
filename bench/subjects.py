"""What is measured: dispatchers behind three calls, vime's own and those that a user names."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.cli import UsageError

VIME = "vime"


class Subject(Protocol):
    """A dispatcher under measurement; vime's ``EvalDispatcher`` is one."""

    def dispatch(self, rollout_id: int) -> object:
        """Hand over the evaluation of the present weights; how long this takes is measured."""

    def drain(self) -> object:
        """Wait until every evaluation so far has ended."""

    def close(self) -> object:
        """Let go of everything."""


@dataclass(frozen=True)
class Setup:
    """What a benchmark asks a subject to do.

    Attributes:
        bench: ``dispatch``, ``stall`` or ``interference``.
        scratch: a directory of the subject's own, for logs and the like.
        staging: another one, in memory where the machine allows it, for snapshots.
        checkpoint: a whole Hugging Face checkpoint: the base of the run.
        eval_seconds: how long the evaluation of one point is to take, beside training.
        model: the ``transformers`` model in training; ``None`` in ``dispatch``, where there is
            nothing to export.
        engine_url: ``interference``: a server that answers ``POST /inference/v1/generate``.
    """

    bench: str
    scratch: Path
    staging: Path
    checkpoint: Path
    eval_seconds: float
    model: Any = None
    engine_url: str | None = None


Factory = Callable[[Setup], Subject]


def add_subject_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--subject``."""
    parser.add_argument(
        "--subject",
        action="append",
        default=[],
        metavar="PATH.py:FACTORY",
        help="measure another dispatcher in the same run: FACTORY() or FACTORY(setup) returns an "
        "object with dispatch(rollout_id), drain() and close(); may be repeated",
    )


def load_factories(specs: list[str]) -> dict[str, Factory]:
    """The factories that ``--subject`` names, by the subject's name: that of its file.

    Raises:
        UsageError: one of them cannot be had.
    """
    found: dict[str, Factory] = {}
    for spec in specs:
        path_text, _, factory_name = spec.rpartition(":")
        path = Path(path_text)
        if not path_text or not factory_name:
            raise UsageError(f"--subject {spec}: expected PATH.py:FACTORY")
        if not path.is_file():
            raise UsageError(f"--subject {spec}: {path} is no file")
        name = path.stem
        if name == VIME or name in found:
            name = f"{path.stem}.{factory_name}"
        if name in found:
            raise UsageError(f"--subject {spec}: named twice")
        found[name] = _factory(spec, path, factory_name)
    return found


def _factory(spec: str, path: Path, name: str) -> Factory:
    module_spec = importlib.util.spec_from_file_location(f"bench_subject_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"--subject {spec}: {path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.append(str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"--subject {spec}: running {path} failed: {type(error).__name__}: {error}"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageError(f"--subject {spec}: {path} has no function {name!r}")
    return _adapted(spec, factory)


def _adapted(spec: str, factory: Callable[..., Any]) -> Factory:
    """Call the factory with the setup if it takes an argument, and look at what it returns."""
    takes_setup = _takes_an_argument(factory)

    def make(setup: Setup) -> Subject:
        try:
            subject: Subject = factory(setup) if takes_setup else factory()
        except Exception as error:
            raise UsageError(
                f"--subject {spec}: the factory failed: {type(error).__name__}: {error}"
            ) from error
        missing = [
            call
            for call in ("dispatch", "drain", "close")
            if not callable(getattr(subject, call, None))
        ]
        if missing:
            raise UsageError(
                f"--subject {spec}: the factory returned {type(subject).__name__} without "
                f"{', '.join(missing)}"
            )
        return subject

    return make


def _takes_an_argument(factory: Callable[..., Any]) -> bool:
    try:
        inspect.signature(factory).bind(None)
    except (TypeError, ValueError):
        return False
    return True


@contextmanager
def opened(factory: Factory, setup: Setup) -> Iterator[Subject]:
    """A subject that is closed at the end."""
    subject = factory(setup)
    try:
        yield subject
    finally:
        subject.close()
