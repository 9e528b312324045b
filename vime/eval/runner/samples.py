"""Samples: the record of each answer, and the file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from vime.eval.contracts import EvalPoint, Snapshot
from vime.eval.runner.datasets import Prompt
from vime.eval.runner.metrics import Scored


@dataclass(slots=True)
class Sample:
    """One answer to one prompt: a line of the samples file, with these names.

    Attributes:
        dataset: name of the eval set.
        prompt_index: which example of the set, from 0.
        sample_index: which of the prompt's answers, from 0.
        prompt: text or chat messages, as in the set.
        label: the right answer, as in the set.
        output: the answer's text, without special tokens; ``None`` without an answer.
        output_token_ids: the answer's tokens, the stop token included.
        reward: what it is worth; 0.0 where it failed.
        finish_reason: as the engine says: ``stop``, ``length`` …
        weight_version: the weights that generated all of it.
        seed: of its sampling.
        failure: a sentence on why it has no answer or no reward.
    """

    dataset: str
    prompt_index: int
    sample_index: int
    prompt: Prompt
    label: Any
    output: str | None = None
    output_token_ids: list[int] | None = None
    reward: float = 0.0
    finish_reason: str | None = None
    weight_version: str | None = None
    seed: int | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.dataset} prompt {self.prompt_index} sample {self.sample_index}"

    def scored(self, expected_version: str) -> Scored:
        """What the metrics need to know of it."""
        return Scored(
            prompt_index=self.prompt_index,
            reward=self.reward,
            failed=self.failure is not None,
            num_tokens=None if self.output_token_ids is None else len(self.output_token_ids),
            truncated=self.finish_reason == "length",
            foreign_weights=self.weight_version != expected_version,
        )


def samples_path(run_dir: Path, point: EvalPoint, snapshot: Snapshot) -> Path:
    """``samples/step_{rollout_id}.jsonl``; an existing checkpoint's has its digest in the name.

    A base evaluation and step 0 may both be called 0, and must not share a file.
    """
    stem = f"step_{point.rollout_id}"
    if point.hf_dir is not None:
        stem += f"-{snapshot.digest[:12]}"
    return run_dir / "samples" / f"{stem}.jsonl"


def write_samples(path: Path, rows: Iterable[Sample | Mapping[str, Any]]) -> None:
    """Write one JSON object a line; the file appears whole under its name, or not at all.

    Values that JSON lacks are written as their ``str``.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            for row in rows:
                file.write(_line(row))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _line(row: Sample | Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=str, option=_OPTIONS)
    except (
        TypeError
    ):  # half of a surrogate pair, a number beyond 64 bits: no reason to lose a score
        plain = asdict(row) if isinstance(row, Sample) else dict(row)
        return json.dumps(plain, default=str, skipkeys=True).encode() + b"\n"


_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
