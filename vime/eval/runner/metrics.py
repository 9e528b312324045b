"""Metrics of an eval set: mean reward, its standard error, pass@k, lengths and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

#: A sample with at least this reward counts as correct for pass@k.
CORRECT_REWARD = 1.0


@dataclass(frozen=True)
class Scored:
    """What the metrics need to know of one sample.

    Attributes:
        prompt_index: which prompt it answers; samples of one prompt form a cluster.
        reward: 0.0 where the sample failed.
        failed: it has no answer or no reward.
        num_tokens: length of its answer in tokens; ``None`` without an answer.
        truncated: the answer was cut off at the length limit.
        foreign_weights: a part of the answer came from other weights than the point's.
    """

    prompt_index: int
    reward: float
    failed: bool = False
    num_tokens: int | None = None
    truncated: bool = False
    foreign_weights: bool = False


def dataset_metrics(name: str, samples: Sequence[Scored], duration_s: float) -> dict[str, float]:
    """Every metric of one eval set.

    A failed sample counts with reward 0 in the mean and as incorrect in pass@k, so that a
    failure can lower a score and never raise it, and every step has the same denominator;
    ``failed_ratio`` says how many there were.

    Args:
        name: of the set.
        samples: at least one; the same number for each prompt.
        duration_s: from its first request to its last answer, in seconds.

    Returns:
        ``eval/{name}`` (mean reward) and, below it, ``stderr`` (absent with a single prompt),
        ``pass@k`` for k = 1, 2, 4 … and the number of samples a prompt, ``failed_ratio``; and,
        where at least one sample has an answer, ``response_len/mean`` (tokens),
        ``truncated_ratio``, ``weight_version/mixed_ratio`` and ``tokens_per_second``.
    """
    rewards = [s.reward for s in samples]
    clusters = [s.prompt_index for s in samples]
    root = f"eval/{name}"
    metrics = {root: math.fsum(rewards) / len(rewards)}
    error = clustered_stderr(rewards, clusters)
    if error is not None:
        metrics[f"{root}/stderr"] = error
    for k, value in pass_at_ks(samples).items():
        metrics[f"{root}/pass@{k}"] = value
    metrics[f"{root}/failed_ratio"] = _ratio([s.failed for s in samples])
    answered = [s for s in samples if s.num_tokens is not None]
    if answered:
        num_tokens = sum(s.num_tokens or 0 for s in answered)
        metrics[f"{root}/response_len/mean"] = num_tokens / len(answered)
        metrics[f"{root}/truncated_ratio"] = _ratio([s.truncated for s in answered])
        metrics[f"{root}/weight_version/mixed_ratio"] = _ratio(
            [s.foreign_weights for s in answered]
        )
        metrics[f"{root}/tokens_per_second"] = num_tokens / max(duration_s, 1e-9)
    return metrics


def clustered_stderr(values: Sequence[float], clusters: Sequence[int]) -> float | None:
    """Standard error of the mean of ``values``, clustered by prompt.

    Samples of one prompt are not independent. With residuals r = value − mean, G clusters and
    N values in all: ``sqrt(G/(G−1) · Σ_c (Σ_{i∈c} r_i)²) / N``, the cluster-robust error of a
    mean (Miller, "Adding Error Bars to Evals", arXiv:2411.00640, section 2.2; Liang and Zeger
    1986), with the usual small-sample factor G/(G−1). With one sample a prompt that is the
    familiar s/√N; with equally many it is the standard error of the prompts' means.

    Returns:
        ``None`` with fewer than two clusters: nothing is known of the spread.
    """
    num_values = len(values)
    mean = math.fsum(values) / num_values
    sums: dict[int, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + (value - mean)
    num_clusters = len(sums)
    if num_clusters < 2:
        return None
    spread = math.fsum(total * total for total in sums.values())
    return math.sqrt(num_clusters / (num_clusters - 1) * spread) / num_values


def pass_at_ks(samples: Sequence[Scored]) -> dict[int, float]:
    """k → mean of :func:`pass_at_k` over the prompts, for the ks of :func:`ks_for`."""
    correct: dict[int, list[bool]] = {}
    for sample in samples:
        correct.setdefault(sample.prompt_index, []).append(sample.reward >= CORRECT_REWARD)
    num_samples = min(map(len, correct.values()))
    return {
        k: math.fsum(pass_at_k(len(c), sum(c), k) for c in correct.values()) / len(correct)
        for k in ks_for(num_samples)
    }


def ks_for(num_samples: int) -> list[int]:
    """The powers of two up to ``num_samples``, and ``num_samples`` itself, ascending."""
    powers = [1 << i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


@lru_cache(maxsize=4096)  # most prompts of a set have as many right answers as others
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate that at least one of k answers is correct: 1 − C(n−c, k)/C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374,
    equation 1; computed in integers, so that large n lose nothing.

    Args:
        num_samples: n, the answers of one prompt.
        num_correct: c of them are correct.
        k: from 1 to n.
    """
    assert 1 <= k <= num_samples, "k answers are drawn from n without replacement"
    missing = math.comb(num_samples - num_correct, k)
    return float(1 - Fraction(missing, math.comb(num_samples, k)))


def _ratio(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)
