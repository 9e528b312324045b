"""Eval sets: reads them, and names every line that is wrong before a run begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vime.eval.config import EvalConfig
from vime.eval.config.datasets import DatasetSettings
from vime.eval.runner.rows import kind, read_rows

Messages = list[dict[str, Any]]
Prompt = str | Messages

#: So many problems are listed in one error; the rest are counted.
MAX_PROBLEMS_SHOWN = 20


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
        prompt: the text, or chat messages (``{"role": str, "content": str}`` each), with the
            system message that the settings ask for.
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
        settings: how it is asked and scored.
    """

    name: str
    examples: tuple[Example, ...]
    settings: DatasetSettings


def check_datasets(config: EvalConfig) -> None:
    """Read every eval set of ``config`` and keep none of it.

    Raises:
        DatasetError: naming each bad line by file, line and key.
    """
    load_datasets(config)


def load_datasets(config: EvalConfig) -> tuple[Dataset, ...]:
    """Read every eval set of ``config``, in the order of ``--eval-prompt-data``.

    Raises:
        DatasetError: naming each bad row by file, line and key.
    """
    problems: list[str] = []
    datasets = []
    for settings in config.datasets:
        before = len(problems)
        examples = tuple(_examples(settings, problems))
        if not examples and len(problems) == before:
            problems.append(f"{settings.path}: no examples in it")
        datasets.append(Dataset(settings.name, examples, settings))
    if problems:
        raise DatasetError(problems)
    return tuple(datasets)


def _examples(settings: DatasetSettings, problems: list[str]) -> Iterator[Example]:
    index = 0
    take = None if settings.take is None else min(settings.take, sys.maxsize)
    for where, row in islice(read_rows(settings.path, problems), take):
        found = _row_problems(where, row, settings)
        problems += found
        if not found:
            prompt = _as_asked(row[settings.input_key], settings)
            yield Example(index, prompt, row[settings.label_key], where)
            index += 1


def _row_problems(where: str, row: dict[str, Any], settings: DatasetSettings) -> list[str]:
    found = []
    for flag, key in (
        ("--eval-input-key", settings.input_key),
        ("--eval-label-key", settings.label_key),
    ):
        if key not in row:
            keys = ", ".join(map(repr, row)) or "none"
            found.append(f"{where}: no key {key!r} ({flag}); its keys: {keys}")
    if settings.input_key in row:
        prompt = row[settings.input_key]
        problem = _prompt_problem(prompt)
        if problem is None and isinstance(prompt, str) and not settings.apply_chat_template:
            problem = _system_problem(settings)
        if problem:
            found.append(f"{where}: key {settings.input_key!r} {problem}")
    return found


def _system_problem(settings: DatasetSettings) -> str | None:
    if settings.system_prompt is None:
        return None
    return "is a text, and --eval-system-prompt is for chat: add --apply-chat-template"


def _as_asked(prompt: Prompt, settings: DatasetSettings) -> Prompt:
    """The prompt as chat messages where the settings want that, with their system message."""
    if isinstance(prompt, str):
        if not settings.apply_chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if settings.system_prompt is not None and prompt[0]["role"] != "system":
        return [{"role": "system", "content": settings.system_prompt}, *prompt]
    return prompt


def _prompt_problem(prompt: Any) -> str | None:
    """What is wrong with a prompt, as the end of a sentence; ``None`` when nothing is."""
    if isinstance(prompt, str):
        return None if prompt else "is an empty text; expected a prompt"
    if not isinstance(prompt, list):
        return f"is a JSON {kind(prompt)}; expected a text or a list of chat messages"
    if not prompt:
        return "is an empty list; expected chat messages"
    for position, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"has a JSON {kind(message)} as message {position}; expected an object"
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                return f"has message {position} without a text {field!r}"
    return None
