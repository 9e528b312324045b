"""Figures and ratios: what the numbers of a report mean."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Report, paired_interval, paired_ratio, percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SAMPLES)
def test_the_percentile_at_a_half_is_the_median(samples: list[float]) -> None:
    assert percentile(samples, 0.5) == pytest.approx(statistics.median(samples))


@given(SAMPLES, st.floats(0, 1), st.floats(0, 1))
def test_percentiles_rise_and_stay_among_the_samples(
    samples: list[float], one: float, other: float
) -> None:
    low, high = (percentile(samples, share) for share in sorted((one, other)))
    assert min(samples) <= low <= high + 1e-6 <= max(samples) + 2e-6


def test_a_report_has_the_form_that_readers_of_the_json_rely_on() -> None:
    report = Report("dispatch")
    report.add("vime", "hold", "ms", [4, 1, 3, 2, 5])
    report.ratios["hold_over_handover"] = 2.5
    assert report.as_json({"cores": 2}) == {
        "bench": "dispatch",
        "machine": {"cores": 2},
        "figures": {
            "vime/hold": {
                "unit": "ms", "p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0, "n": 5,
            }
        },
        "ratios": {"hold_over_handover": 2.5},
    }  # fmt: skip


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_number_never_becomes_a_figure(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"vime/hold: .*expected at least one finite number"):
        Report("dispatch").add("vime", "hold", "ms", samples)


def test_a_paired_ratio_is_not_moved_by_a_slow_minute_that_hit_both() -> None:
    fast, slow = [1.0, 1.0, 10.0], [2.0, 2.0, 20.0]
    assert paired_ratio(slow, fast) == 2.0


def test_the_spread_is_the_middle_half_as_a_part_of_the_median() -> None:
    assert Report("x").add("a", "b", "s", [1, 2, 3, 4, 5]).spread == pytest.approx(2 / 3)


def test_the_interval_of_a_ratio_has_the_ranks_of_the_binomial_distribution() -> None:
    ones = [1.0] * 40
    ratios = [float(number) for number in range(1, 41)]
    assert paired_interval(ratios[::-1], ones) == (14.0, 27.0)  # the ranks that tables have
    assert paired_interval(ratios[:6], ones[:6]) == (1.0, 6.0)
    assert paired_interval(ratios[:2], ones[:2]) == (1.0, 2.0)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = paired_interval([rng.lognormvariate(0, 1) for _ in range(15)], [1.0] * 15)
        hits += low <= 1 <= high
    assert 0.95 <= hits / 2000 < 0.98
