"""The settings of one eval set: those of the flags, except where the YAML says otherwise for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Setting of a set → the flag that gives it to all sets.
SETTING_DESTS = {
    "input_key": "eval_input_key",
    "label_key": "eval_label_key",
    "n_samples_per_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "max_response_len": "eval_max_response_len",
    "max_prompt_len": "eval_max_prompt_len",
    "overlong_prompt": "eval_overlong_prompt",
    "apply_chat_template": "apply_chat_template",
    "system_prompt": "eval_system_prompt",
    "reward": "eval_reward",
    "reward_key": "eval_reward_key",
    "custom_rm_path": "custom_rm_path",
}

_NAME_AND_COUNT = re.compile(r"(?P<name>.+)@(?P<count>\d+)", re.DOTALL)


@dataclass(frozen=True)
class DatasetSettings:
    """Everything that is said of one eval set; see ``docs/flags.md`` for each field's flag.

    Attributes:
        name: as in the metric ``eval/NAME``.
        path: a file or a directory.
        take: only so many examples, the first ones; ``None`` for all.
    """

    name: str
    path: Path
    take: int | None = None
    input_key: str = "input"
    label_key: str = "label"
    n_samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_len: int = 256
    max_prompt_len: int | None = None
    overlong_prompt: str = "fail"
    apply_chat_template: bool = False
    system_prompt: str | None = None
    reward: str = "exact"
    reward_key: str | None = None
    custom_rm_path: str | None = None


def name_and_count(word: str) -> tuple[str, int | None]:
    """``NAME@N`` as the name and the number of examples to take; ``None`` where there is no N."""
    found = _NAME_AND_COUNT.fullmatch(word)
    # Twenty digits are too large already; Python reads no more than 4300.
    return (found["name"], int(found["count"].lstrip("0")[:20] or 0)) if found else (word, None)
