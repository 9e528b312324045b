"""What an engine answered to the canary prompts, as a record holds it, and whether two agree.

Engines that hold the same weights and compute alike choose the same greedy tokens, with nearly
the same probabilities. How near depends on the order of additions on their devices, which decides
between two tokens only where both are about as likely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

TOLERANCE = 0.25
"""How far two logarithms of one probability may be apart, in nats.

Twice the spacing of bfloat16 logits between 16 and 32.
"""


@dataclass(frozen=True)
class Canary:
    """The greedy answers of one engine to a few fixed prompts.

    Attributes:
        tokens: the token ids of each prompt's answer.
        logprobs: the natural logarithms of their probabilities.
        gaps: by how much each exceeds that of the next likely token, in nats.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    gaps: tuple[tuple[float, ...], ...]

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits over tokens and logarithms: any change of weights shows."""
        content = json.dumps([self.tokens, self.logprobs], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def as_detail(self) -> dict[str, Any]:
        """For the record."""
        return {
            "digest": self.digest,
            "tokens": [list(answer) for answer in self.tokens],
            "logprobs": [list(answer) for answer in self.logprobs],
            "gaps": [list(answer) for answer in self.gaps],
        }

    @classmethod
    def of_detail(cls, detail: object) -> Canary | None:
        """What :meth:`as_detail` made; ``None`` when it is nothing like that."""
        if not isinstance(detail, Mapping):
            return None
        rows = [_rows(detail.get(name)) for name in ("tokens", "logprobs", "gaps")]
        if any(row is None for row in rows):
            return None
        tokens, logprobs, gaps = (row for row in rows if row is not None)
        if not [*map(len, tokens)] == [*map(len, logprobs)] == [*map(len, gaps)]:
            return None
        return cls(tuple(tuple(map(int, answer)) for answer in tokens), logprobs, gaps)


def difference(one: Canary, other: Canary) -> str | None:
    """The first place where two answers cannot be of the same weights; ``None`` if they agree.

    Up to the first token that differs, the logarithms must be within :data:`TOLERANCE`. A token
    may differ where either engine finds the other's about as likely; what follows it is the
    answer to another prompt and is not compared.
    """
    if [*map(len, one.tokens)] != [*map(len, other.tokens)]:
        return "the answers are of different lengths"
    for prompt, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            p, q = one.logprobs[prompt][at], other.logprobs[prompt][at]
            tied = a == b or max(one.gaps[prompt][at], other.gaps[prompt][at]) <= TOLERANCE
            if not tied or not abs(p - q) <= TOLERANCE:
                return f"canary {prompt}, token {at}: {a} (logprob {p:.4f}) and {b} ({q:.4f})"
            if a != b:
                break
    return None


def _rows(value: object) -> tuple[tuple[float, ...], ...] | None:
    """Rows of finite numbers, or nothing."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in value):
        return None
    numbers = [n for row in value for n in row]
    if not all(type(n) in (int, float) and isfinite(n) for n in numbers):
        return None
    return tuple(tuple(row) for row in value)
