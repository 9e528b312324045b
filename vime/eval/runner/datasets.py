"""Eval sets: reads them, and names every line that is wrong before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from vime.eval.config import EvalConfig

Messages = list[dict[str, Any]]
Prompt = str | Messages

#: So many problems are listed in one error; the rest are counted.
MAX_PROBLEMS_SHOWN = 20

_UTF8_BOM = b"\xef\xbb\xbf"


class DatasetError(ValueError):
    """One or more eval sets cannot be used; ``problems`` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        shown = problems[:MAX_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more")
        super().__init__("\n".join(shown))
        self.problems = problems


@dataclass(frozen=True)
class Example:
    """One line of an eval set.

    Attributes:
        index: 0, 1, 2 … within its set.
        prompt: the text, or chat messages (``{"role": str, "content": str}`` each).
        label: the right answer, any JSON value.
        where: ``FILE:LINE``, for messages.
    """

    index: int
    prompt: Prompt
    label: Any
    where: str


@dataclass(frozen=True)
class Dataset:
    """One eval set, whole in memory.

    Attributes:
        name: as in ``--eval-prompt-data NAME PATH`` and in the metric ``eval/NAME``.
        examples: at least one.
    """

    name: str
    examples: tuple[Example, ...]


def check_datasets(config: EvalConfig) -> None:
    """Read every eval set of ``config`` and keep none of it.

    Raises:
        DatasetError: naming each bad line by file, line and key.
    """
    load_datasets(config)


def load_datasets(config: EvalConfig) -> tuple[Dataset, ...]:
    """Read every eval set of ``config``, in the order of ``--eval-prompt-data``.

    Raises:
        DatasetError: naming each bad line by file, line and key.
    """
    problems: list[str] = []
    datasets = []
    for name, path in config.prompt_data:
        examples: list[Example] = []
        before = len(problems)
        for where, row in _rows(path, problems):
            example = _example(len(examples), where, row, config, problems)
            if example is not None:
                examples.append(example)
        if not examples and len(problems) == before:
            problems.append(f"{path}: no examples in it; expected one JSON object a line")
        datasets.append(Dataset(name, tuple(examples)))
    if problems:
        raise DatasetError(problems)
    return tuple(datasets)


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(FILE:LINE, object)`` of each line that is a JSON object; blank lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_UTF8_BOM).strip()
                if not text:
                    continue
                where = f"{path}:{number}"
                row = _parsed(where, text, problems)
                if row is not None:
                    yield where, row
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")


def _parsed(where: str, text: bytes, problems: list[str]) -> dict[str, Any] | None:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        problems.append(
            f"{where}: not JSON at column {error.colno}: {error.msg}; expected one JSON object a "
            "line, in UTF-8"
        )
        return None
    if not isinstance(row, dict):
        problems.append(f"{where}: a JSON {_kind(row)}; expected an object")
        return None
    return row


def _example(
    index: int, where: str, row: dict[str, Any], config: EvalConfig, problems: list[str]
) -> Example | None:
    found = []
    for flag, key in (
        ("--eval-input-key", config.input_key),
        ("--eval-label-key", config.label_key),
    ):
        if key not in row:
            keys = ", ".join(map(repr, row)) or "none"
            found.append(f"{where}: no key {key!r} ({flag}); its keys: {keys}")
    if config.input_key in row:
        problem = _prompt_problem(row[config.input_key])
        if problem:
            found.append(f"{where}: key {config.input_key!r} {problem}")
    problems += found
    if found:
        return None
    return Example(index, row[config.input_key], row[config.label_key], where)


def _prompt_problem(prompt: Any) -> str | None:
    """What is wrong with a prompt, as the end of a sentence; ``None`` when nothing is."""
    if isinstance(prompt, str):
        return None if prompt else "is an empty text; expected a prompt"
    if not isinstance(prompt, list):
        return f"is a JSON {_kind(prompt)}; expected a text or a list of chat messages"
    if not prompt:
        return "is an empty list; expected chat messages"
    for position, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"has a JSON {_kind(message)} as message {position}; expected an object"
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                return f"has message {position} without a text {field!r}"
    return None


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "text", list: "list"}
    return "null" if value is None else names.get(type(value), "object")
