"""What fake engines answer: a function of the weights that they compute with, and of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.eval.snapshot.manifest import combined_digest, digest_tensors
from vime.eval.snapshot.weights import WeightsError, read_weights


@dataclass
class Content:
    """What lies in a snapshot's directory."""

    digest: str
    with_nan: list[str] = field(default_factory=list)


def read_content(directory: Path) -> Content | None:
    """What is in the files of a directory; a byte of 255 stands for a NaN."""
    try:
        tensors = digest_tensors(directory, read_weights(directory))
    except (WeightsError, OSError, ValueError):
        return None
    data = b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))
    return Content(combined_digest(tensors), sorted(tensors) if b"\xff" in data else [])


def answer_of(
    digest: str, prompt: Sequence[int], count: int, computes: str = "soundly"
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    dice = random.Random(f"{digest} {list(prompt)} {computes}")
    tokens = [dice.randrange(250) for _ in range(count)]
    return tokens, [-dice.uniform(1, 2) for _ in tokens]
