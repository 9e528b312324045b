"""What the dispatcher knows of the world: three protocols, and the facts that flow between them.

Data flows one way: weights → :class:`Capture` → :class:`Snapshot` → :class:`PinProof` →
:class:`EvalOutput` → :class:`Outcome`. Real collaborators, gated fakes and replayed ones are
interchangeable behind :class:`Exporter`, :class:`Fleet` and :class:`Evaluator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class EvalPoint:
    """One due evaluation.

    Attributes:
        rollout_id: the training step that names it.
        hf_dir: an existing checkpoint to evaluate instead of an export; never deleted.
        force: it is never dropped (the last point of a run).
    """

    rollout_id: int
    hf_dir: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class Snapshot:
    """One whole Hugging Face checkpoint directory that has been verified.

    Attributes:
        rollout_id: the point that it was made for.
        path: the directory.
        weight_version: ``{run_id}:{rollout_id}:{digest[:12]}``, unique in the world.
        digest: hexadecimal BLAKE3 over the manifest's tensor names and digests.
        owned: vime wrote it and may delete it.
        num_bytes: size of its weight files.
        verify: ``full``, or ``headers`` where the digest is over headers and files' times, not
            over the weights' bytes.
        with_nan: the tensors that hold a NaN; ``None`` where none is known, and nobody has looked
            at all of them when their bytes were digested.
    """

    rollout_id: int
    path: Path
    weight_version: str
    digest: str
    owned: bool
    num_bytes: int = 0
    verify: str = "full"
    with_nan: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """What is known of a tensor's bytes.

    Attributes:
        digest: their hexadecimal BLAKE3.
        with_nan: whether a NaN is among the numbers; ``None`` where nobody has looked.
    """

    digest: str
    with_nan: bool | None = None


@dataclass(frozen=True)
class EngineProof:
    """What one engine answered when its weights were checked.

    Attributes:
        engine: its name in the trace.
        weight_version: what was read back from it after the load.
        evidence: further facts (digests, canary answers), for the trace; JSON values only.
    """

    engine: str
    weight_version: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PinProof:
    """Proof that a fleet serves one snapshot: where to ask, and what to expect.

    Attributes:
        base_url: where to send generation requests, without a path or a trailing slash.
        model: the served model's name.
        weight_version: what every answer must carry.
        engines: one proof an engine.
        num_gpus_per_engine: tensor-parallel size of each engine.
        pin_seconds: how long the pin took, from its turn at the fleet.
        canary: digest of the engines' answers to the canary prompts: other weights, other digits.
        unchanged_since: a version of other weights that was answered exactly alike, if one was.
        cause_seq: the trace record that completed the pin.
        api_key: bearer token for the generation routes; kept out of ``repr`` and the trace.
        transfer_seconds: how long the snapshot was under way to the last of the engines' nodes; 0
            where all of them saw it.
        transfer_bytes: what travelled, over all nodes.
    """

    base_url: str
    model: str
    weight_version: str
    engines: tuple[EngineProof, ...] = ()
    num_gpus_per_engine: int = 1
    pin_seconds: float = 0.0
    canary: str | None = None
    unchanged_since: str | None = None
    cause_seq: int | None = None
    api_key: str | None = field(default=None, repr=False)
    transfer_seconds: float = 0.0
    transfer_bytes: int = 0


@dataclass(frozen=True)
class EvalOutput:
    """What an evaluation of one snapshot came to.

    Attributes:
        metrics: metric name → number, with the names of the docs (``eval/<dataset>`` …).
        samples_path: the file that holds every sample, if one was written.
        detail: further facts for the trace; JSON values only.
    """

    metrics: dict[str, float]
    samples_path: Path | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The one report on a dispatched point.

    Attributes:
        rollout_id: the step where it lands, whenever it arrives.
        state: ``done`` or ``skipped``.
        reason: why it was skipped; ``None`` when done.
        detail: a sentence on the reason.
        weight_version: the weights that were scored; ``None`` where none were pinned.
        metrics: metric name → number; ``eval/skipped_<reason>`` for a skipped point.
        lag_steps: how many steps training was ahead when the result landed.
        duration_s: seconds from dispatch to the result.
        stall_s: seconds that the training thread waited in ``dispatch``.
        hf_dir: the checkpoint that the caller gave (the baseline before training, say); ``None``
            for the weights of training. A baseline and step 0 may have the same ``rollout_id``.
        canary: digest of what the fleet answered to the canary prompts with these weights.
    """

    rollout_id: int
    state: str
    reason: str | None
    detail: str | None
    weight_version: str | None
    metrics: dict[str, float]
    lag_steps: int
    duration_s: float
    stall_s: float
    hf_dir: str | None = None
    canary: str | None = None


class Capture(Protocol):
    """Weights held still at one moment of training; written to disk later, elsewhere."""

    def write(self, directory: Path) -> Mapping[str, str | Content] | None:
        """Write a whole Hugging Face checkpoint into the empty ``directory``.

        Called once, on a worker thread. Bulk work should release the interpreter lock.

        Returns:
            What it knows of the bytes: tensor of the checkpoint → their :class:`Content`, or
            their hexadecimal BLAKE3 alone. The others are read from the files.

        Raises:
            EvalSkip: the point is skipped with its reason.
            Exception: any other; the point is skipped as ``export_failed``. What was written
                into ``directory`` is removed.
        """

    def release(self) -> None:
        """Give the held memory back; called exactly once, after ``write`` or instead of it."""


class Exporter(Protocol):
    """Weights → snapshot, in two phases.

    An exporter whose ``capture`` looks at no directory says ``needs_directory = False``: then
    training need not wait until there is one.
    """

    def capture(self, rollout_id: int, directory: Path) -> Capture:
        """Hold the present weights still; called on the training thread, which waits for it.

        Args:
            rollout_id: the training step.
            directory: the empty staging directory that the capture will be written to, for
                exporters that can only do both at once.

        Raises:
            Exception: any; the point is skipped as ``export_failed``.
        """


class Fleet(Protocol):
    """Engines that can be made to serve one snapshot, provably."""

    def pin(
        self, snapshot: Snapshot, cause_seq: int | None = None
    ) -> AbstractAsyncContextManager[PinProof]:
        """Hold the fleet, with every engine proven to serve ``snapshot``.

        Entering waits for the fleet's turn, then pins; leaving lets the next point have it.

        Args:
            snapshot: verified.
            cause_seq: the trace record that asks for it: the cause of the engines' own.

        Raises:
            EvalSkip: ``pin_violation``, ``unhealthy`` or ``timeout_pin``; its ``cause_seq`` is the
                engine's record that decided it, where one did.
        """


class Evaluator(Protocol):
    """Scores a snapshot."""

    async def evaluate(
        self, point: EvalPoint, snapshot: Snapshot, proof: PinProof | None
    ) -> EvalOutput:
        """Generate and score; ``proof`` is ``None`` when the user's backend pins by itself.

        Raises:
            EvalSkip: with the reason (``version_mixed``, ``crashed``, or the user's own).
        """


@runtime_checkable
class Tracker(Protocol):
    """Where outcomes go. Called on a worker thread, one call at a time."""

    def log(self, outcome: Outcome) -> None:
        """Record one outcome at its own step (``outcome.rollout_id``)."""

    def close(self) -> None:
        """Flush; nothing is logged afterwards."""
