"""Store, fleet and evaluator that answer what was recorded, when the rerun's script says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from vime.eval.contracts import Capture, EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.dispatch.point_life import point_id, point_name
from vime.eval.rerun.parts import Part, given_cause
from vime.eval.rerun.script import Act
from vime.rollout.checkpoint_eval import EvalSkip


class Answer:
    """What a collaborator will say to one question; it is waited for, and given once."""

    def __init__(self) -> None:
        self._given = anyio.Event()
        self._value: Any = None

    def give(self, value: Any) -> None:
        """Let the one who waits go on with ``value``, or raise it there if it is an exception."""
        self._value = value
        self._given.set()

    async def get(self) -> Any:
        """Wait for the answer; for ever, when none was recorded."""
        await self._given.wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Answers:
    """The answers of a run, by what was asked and for which point."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Act, str], Answer] = {}

    def of(self, act: Act, point: str) -> Answer:
        """The answer to one question."""
        return self._answers.setdefault((act, point), Answer())


@dataclass
class HeldCapture:
    """Weights that nobody holds: there is nothing to write, and nothing to give back."""

    def write(self, directory: Path) -> None:
        """Never called: the store of a rerun writes nothing."""
        raise AssertionError(f"a rerun writes no snapshot, and none to {directory}")

    def release(self) -> None:
        """Nothing is held."""


@dataclass
class RecordedDraft:
    """A snapshot that is being written, as far as the trace tells."""

    point: str
    directory: Path = field(default=Path("draft"))


class RecordedStore:
    """Seals, adopts and lends as recorded; writes nothing."""

    def __init__(self, parts: Mapping[str, Part], answers: Answers) -> None:
        self._parts = parts
        self._answers = answers

    def begin(self, rollout_id: int, cause_seq: int | None = None) -> RecordedDraft:  # noqa: ARG002
        """Make no directory, or fail as recorded."""
        part = self._parts.get(str(rollout_id))
        if part is not None and part.begin_error is not None:
            raise part.begin_error
        return RecordedDraft(str(rollout_id))

    async def seal(self, draft: RecordedDraft, capture: Capture) -> Snapshot:
        """Wait for the recorded answer."""
        try:
            snapshot: Snapshot = await self._answers.of(Act.SNAPSHOT, draft.point).get()
        finally:
            capture.release()
        return snapshot

    def discard(self, draft: RecordedDraft, reason: str) -> None:
        """There is nothing to remove."""

    async def adopt(self, rollout_id: int, hf_dir: Path) -> Snapshot:  # noqa: ARG002
        """Wait for the recorded answer."""
        given = point_name(rollout_id, is_given=True)
        snapshot: Snapshot = await self._answers.of(Act.SNAPSHOT, given).get()
        return snapshot

    async def inherit(self, rollout_id: int) -> Snapshot:
        """Wait for the recorded answer."""
        snapshot: Snapshot = await self._answers.of(Act.SNAPSHOT, str(rollout_id)).get()
        return snapshot

    @contextmanager
    def lease(self, snapshot: Snapshot) -> Iterator[None]:
        """Lend it, or fail as recorded."""
        part = self._parts.get(_id_of(snapshot))
        if part is not None and part.lease_error is not None:
            raise part.lease_error
        yield


class RecordedFleet:
    """Pins as recorded; turns are in the recorded moments."""

    def __init__(self, parts: Mapping[str, Part], answers: Answers) -> None:
        self._parts = parts
        self._answers = answers

    @asynccontextmanager
    async def pin(
        self,
        snapshot: Snapshot,
        cause_seq: int | None = None,  # noqa: ARG002
    ) -> AsyncIterator[PinProof]:
        """Wait for the recorded proof; a skip meanwhile is told the recorded cause."""
        proof = await self._answers.of(Act.PROOF, _id_of(snapshot)).get()
        try:
            yield proof
        except EvalSkip as skip:
            part = self._parts.get(_id_of(snapshot))
            if skip.cause_seq is None and part is not None and part.end is not None:
                skip.cause_seq = given_cause(part, part.end)
            raise


class RecordedEvaluator:
    """Scores as recorded."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def evaluate(
        self,
        point: EvalPoint,
        snapshot: Snapshot,  # noqa: ARG002
        proof: PinProof | None,  # noqa: ARG002
    ) -> EvalOutput:
        """Wait for the recorded output."""
        output: EvalOutput = await self._answers.of(Act.OUTPUT, point_id(point)).get()
        return output


def _id_of(snapshot: Snapshot) -> str:
    return point_name(snapshot.rollout_id, is_given=not snapshot.owned)
