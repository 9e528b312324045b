from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.eval.runner.metrics import (
    Scored,
    clustered_stderr,
    dataset_metrics,
    ks_for,
    pass_at_k,
)

answers = st.lists(st.booleans(), min_size=1, max_size=8)
rewards = st.floats(-10, 10)


@given(answers, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(
    correct: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(share, abs=1e-12)


@given(st.integers(1, 300), st.data())
def test_pass_at_k_agrees_with_the_product_form_for_many_samples(
    n: int, data: st.DataObject
) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    product = 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
    assert pass_at_k(n, c, k) == pytest.approx(product, abs=1e-9)


@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_the_clustered_error_of_equal_clusters_is_the_error_of_the_prompts_means(
    num_prompts: int, num_samples: int, data: st.DataObject
) -> None:
    table = np.array(
        data.draw(
            st.lists(
                st.lists(rewards, min_size=num_samples, max_size=num_samples),
                min_size=num_prompts,
                max_size=num_prompts,
            )
        )
    )
    clusters = np.repeat(np.arange(num_prompts), num_samples)
    expected = np.std(table.mean(axis=1), ddof=1) / math.sqrt(num_prompts)
    error = clustered_stderr(table.ravel().tolist(), clusters.tolist())
    assert error == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 3), rewards), min_size=2, max_size=30).filter(
        lambda rows: len({cluster for cluster, _ in rows}) > 1
    )
)
def test_the_clustered_error_of_unequal_clusters_is_the_sandwich_of_a_regression_on_a_constant(
    rows: list[tuple[int, float]],
) -> None:
    groups = np.array([group for group, _ in rows])
    y = np.array([value for _, value in rows])
    x = np.ones((len(y), 1))
    bread = np.linalg.inv(x.T @ x)
    residuals = y - (x @ (bread @ x.T @ y))
    meat = np.zeros((1, 1))
    for group in np.unique(groups):
        score = x[groups == group].T @ residuals[groups == group]
        meat += np.outer(score, score)
    num_groups, (num_rows, num_columns) = len(np.unique(groups)), x.shape
    correction = num_groups / (num_groups - 1) * (num_rows - 1) / (num_rows - num_columns)
    expected = math.sqrt(max((correction * bread @ meat @ bread).item(), 0.0))
    assert clustered_stderr(y.tolist(), groups.tolist()) == pytest.approx(expected, abs=1e-9)


def test_one_prompt_says_nothing_of_the_spread() -> None:
    assert clustered_stderr([0.0, 1.0, 1.0], [7, 7, 7]) is None
    assert "eval/toy/stderr" not in dataset_metrics("toy", [Scored(0, 1.0)], 1.0)


def test_ks_are_the_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_for(n) for n in (1, 2, 3, 4, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8, 10],
    ]


def test_every_metric_of_a_set_has_its_value() -> None:
    samples = [
        Scored(0, 1.0, num_tokens=10),
        Scored(0, 0.0, num_tokens=30, truncated=True),
        Scored(1, 0.5, num_tokens=20),
        Scored(1, 0.0, failed=True),
    ]
    assert dataset_metrics("toy", samples, 2.0) == {
        "eval/toy": 0.375,
        "eval/toy/stderr": pytest.approx(0.125),
        "eval/toy/pass@1": 0.25,
        "eval/toy/pass@2": 0.5,
        "eval/toy/failed_ratio": 0.25,
        "eval/toy/response_len/mean": 20.0,
        "eval/toy/truncated_ratio": pytest.approx(1 / 3),
        "eval/toy/weight_version/mixed_ratio": 0.0,
        "eval/toy/tokens_per_second": 30.0,
    }


def test_an_answer_of_other_weights_shows_in_the_mixed_ratio() -> None:
    samples = [Scored(0, 1.0, num_tokens=1, foreign_weights=True), Scored(1, 1.0, num_tokens=1)]
    assert dataset_metrics("toy", samples, 1.0)["eval/toy/weight_version/mixed_ratio"] == 0.5


def test_without_any_answer_no_length_is_reported() -> None:
    metrics = dataset_metrics("toy", [Scored(0, 0.0, failed=True)], 1.0)
    assert set(metrics) == {"eval/toy", "eval/toy/pass@1", "eval/toy/failed_ratio"}
