"""The stock rewards, on what models really write, and against independent formulas."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.eval.runner.scoring import (
    LabelError,
    choice,
    chosen_letter,
    f1,
    last_number,
    numeric,
    regex,
)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        (" b. ", "B"),
        ("(c)", "C"),
        ("**D**", "D"),
        ("B. Paris", "B"),
        ("(b) because it rains", "B"),
        ("The answer is C.", "C"),
        ("the answer is (c), not (d)", "C"),
        ("Answer: A", "A"),
        ("Final answer is: **B**", "B"),
        ("I first thought the answer is A. No: the answer is B.", "B"),
        (r"so \boxed{A} ... no, \boxed{\text{D}}", "D"),
        (r"The answer is A, that is \boxed{(B)}", "B"),
        ("It rains, so (a) is wrong and I take (b)", "B"),
        ("A dog is an animal", None),
        ("The answer is a good question", None),
        ("The answer is Apple", None),
        ("", None),
        ("42", None),
        ("I don't know", None),
    ],
)
def test_the_chosen_letter_is_the_one_that_a_reader_would_take(
    answer: str, letter: str | None
) -> None:
    assert chosen_letter(answer) == letter


@pytest.mark.parametrize("label", ["B", "b", "(B)", " B. ", 1])
def test_the_label_of_a_choice_is_a_letter_or_an_index(label: Any) -> None:
    assert choice("The answer is B", label) == 1.0
    assert choice("The answer is C", label) == 0.0
    assert choice("who knows", label) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4),
        ("It is 1,234,567.5 dollars", 1234567.5),
        ("$12.50", 12.5),
        ("-3", -3),
        ("\u22123", -3),
        ("7-2", 2),
        ("x = -0.25.", -0.25),
        ("3/4 of it", 0.75),
        ("1e-3", 0.001),
        ("50%", 50),
        ("first 5, then 6", 6),
        ("... #### 72", 72),
        (".5", 0.5),
        ("1,23", 23),
        ("no number", None),
        ("x2y", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "label", "worth"),
    [
        ("so it is 42.", 42, 1),
        ("42.0", "She has 42 apples. #### 42", 1),
        (r"\boxed{42}, since 6 * 7 = 42 and 6 < 7", 42, 1),
        (r"\boxed{x}, that is 42", 42, 1),
        ("0.3333333", "1/3", 1),
        ("0.333", "1/3", 0),
        ("forty-two", 42, 0),
        ("1000000", "1,000,000", 1),
    ],
)
def test_a_number_is_right_whatever_its_spelling(answer: str, label: Any, worth: float) -> None:
    assert numeric(answer, label) == worth


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_that_is_written_out_equals_its_quotient(value: Fraction) -> None:
    assert numeric(f"it is {value}", float(value)) == 1.0
    assert numeric(f"it is {float(value)!r}", str(value)) == 1.0


words = st.lists(st.sampled_from(["cat", "dog", "fish", "owl"]), max_size=6)


@given(words, words)
def test_f1_is_twice_the_largest_matching_of_words_over_all_words(
    mine: list[str], right: list[str]
) -> None:
    """Counts a largest matching by trying the orders of the shorter side."""
    short, long = sorted([mine, right], key=len)
    best = 0
    for order in set(itertools.permutations(short)):
        left = list(long)
        matched = 0
        for word in order:
            if word in left:
                left.remove(word)
                matched += 1
        best = max(best, matched)
    total = len(mine) + len(right)
    expected = 2 * best / total if total else 1.0
    assert f1(" ".join(mine), " ".join(right)) == pytest.approx(expected)


def test_f1_passes_over_case_articles_and_punctuation_and_takes_the_best_label() -> None:
    assert f1("The Eiffel Tower!", "eiffel tower") == 1.0
    assert f1("Eiffel", ["Louvre", "the Eiffel tower"]) == pytest.approx(2 / 3)
    assert f1("a the an", "") == 1.0


def test_a_pattern_is_searched_for_anywhere() -> None:
    assert regex("it is 42, I think", r"\b42\b") == 1.0
    assert regex("it is 142", r"\b42\b") == 0.0


@pytest.mark.parametrize(
    ("reward", "label"),
    [
        (choice, "none"), (choice, -1), (choice, True), (choice, None), (choice, "5"),
        (numeric, "none"), (numeric, None), (numeric, float("nan")), (numeric, True), (numeric, 10**400),
        (f1, []), (regex, "("), (regex, 3),
    ],
)  # fmt: skip
def test_a_label_that_a_reward_cannot_compare_with_is_shown(reward: Any, label: Any) -> None:
    with pytest.raises(LabelError, match="label"):
        reward("answer", label)
