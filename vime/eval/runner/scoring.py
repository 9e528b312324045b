"""The stock rewards that need no package: functions of an answer and its label, from 0 to 1."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from typing import Any

#: How far a number may be from the right one and still be it, relatively and absolutely.
REL_TOLERANCE = 1e-6
ABS_TOLERANCE = 1e-9

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+\u2212]?)\$?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\d))?(?:\s*/\s*(?P<divisor>[1-9]\d*)(?![\d.]))?"
)
_NAMED_CHOICE = re.compile(
    r"\b(?i:answer|option|choice)\b(?i:\s+is)?\s*[:=]?\s*[\"'*_$]*"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?![\w'\u2019]))"
)
_LEADING_CHOICE = re.compile(r"[\s\"'*_]*(?:\(\s*([A-Za-z])\s*\)|([A-Z])\s*(?:[).:]|\Z))")
_BRACKETED_CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class LabelError(ValueError):
    """The label of a sample is none that its reward can compare with."""


def exact_match(answer: str, label: Any) -> float:
    """1.0 when both are the same text once white space around them is dropped, else 0.0.

    A label that is no text is compared by ``str(label)``.
    """
    return float(answer.strip() == str(label).strip())


def choice(answer: str, label: Any) -> float:
    """1.0 when the letter that the answer chooses is the label's, whatever its case, else 0.0.

    The chosen letter is, the first of these that is there: the last ``\\boxed{B}``; the last
    one that is named ("the answer is B", "Answer: (b)", "option B"); the one that the answer
    begins with or consists of ("B", "(b) because ...", "B. Paris"); the last in brackets.

    Args:
        answer: the text.
        label: a letter, bare or in brackets, or the index of the choice from 0 (0 is A).

    Raises:
        LabelError: the label is neither.
    """
    return float(chosen_letter(answer) == _label_letter(label))


def chosen_letter(answer: str) -> str | None:
    """The capital letter that an answer chooses; see :func:`choice`."""
    boxed = [text for text in _BOXED.findall(answer) if len(_bare(text)) == 1]
    if boxed:
        return _bare(boxed[-1]).upper()
    if len(_bare(answer)) == 1 and _bare(answer).isalpha():
        return _bare(answer).upper()
    named = _NAMED_CHOICE.findall(answer)
    if named:
        return "".join(named[-1]).upper()
    leading = _LEADING_CHOICE.match(answer)
    if leading:
        return "".join(letter or "" for letter in leading.groups()).upper()
    bracketed: list[str] = _BRACKETED_CHOICE.findall(answer)
    return bracketed[-1].upper() if bracketed else None


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    return text.strip().strip("()[].:,*_$\"' ")


def _label_letter(label: Any) -> str:
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < 26:
        return chr(ord("A") + label)
    letter = _bare(label) if isinstance(label, str) else ""
    if len(letter) == 1 and letter.isascii() and letter.isalpha():
        return letter.upper()
    raise LabelError(
        f"the label is {label!r:.100}: expected a letter, or the index of a choice from 0"
    )


def numeric(answer: str, label: Any) -> float:
    """1.0 when the last number of the answer equals the label's, else 0.0.

    Numbers within ``\\boxed{}`` come first. Thousands may be separated by commas, ``3/4`` is a
    fraction, and currency and percent signs are passed over (50% is 50). Equal is what
    differs by less than 1e-6 of the larger, or by 1e-9.

    Args:
        answer: the text.
        label: a number, or a text whose last number is it.

    Raises:
        LabelError: there is no number in the label.
    """
    right = _label_number(label)
    boxed = _BOXED.findall(answer)
    found = last_number(boxed[-1]) if boxed else None
    if found is None:
        found = last_number(answer)
    if found is None:
        return 0.0
    return float(math.isclose(found, right, rel_tol=REL_TOLERANCE, abs_tol=ABS_TOLERANCE))


def last_number(text: str) -> float | None:
    """The last number in a text, as a float; ``None`` when there is none."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    value = Fraction(last["digits"].replace(",", "") + (last["exponent"] or ""))
    value /= int(last["divisor"] or 1)
    try:
        return float(-value if last["sign"] in ("-", "\u2212") else value)
    except OverflowError:
        return math.inf


def _label_number(label: Any) -> float:
    found = last_number(label) if isinstance(label, str) else None
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            found = float(label) if math.isfinite(label) else None
    if found is None:
        raise LabelError(f"the label is {label!r:.100}: expected a number, or a text with one")
    return found


def f1(answer: str, label: Any) -> float:
    """The F1 of the words of answer and label: 2PR/(P + R), the best one of several labels.

    Words are compared without case, punctuation and articles, as often as they occur; two
    texts without any word are equal. Rajpurkar et al., "SQuAD", arXiv:1606.05250, section 6.1.

    Args:
        answer: the text.
        label: a text, or a list of texts that are all right.
    """
    labels: Iterable[Any] = label if isinstance(label, (list, tuple)) else [label]
    scores = [_f1(_words(answer), _words(str(one))) for one in labels]
    if not scores:
        raise LabelError("the label is an empty list: expected a text, or several")
    return max(scores)


def _f1(mine: list[str], right: list[str]) -> float:
    if not mine or not right:
        return float(mine == right)
    common = (Counter(mine) & Counter(right)).total()
    return 2 * common / (len(mine) + len(right))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def regex(answer: str, label: Any) -> float:
    """1.0 when the label, a regular expression of Python, is found in the answer, else 0.0.

    Raises:
        LabelError: the label is no regular expression.
    """
    if not isinstance(label, str):
        raise LabelError(f"the label is {label!r:.100}: expected a regular expression")
    try:
        return float(re.search(label, answer) is not None)
    except re.error as error:
        raise LabelError(f"the label {label!r:.100} is no regular expression: {error}") from None
