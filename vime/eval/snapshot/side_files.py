"""The small files beside the weights: the tokenizer and its settings, the generation settings."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from vime.eval.snapshot.files import read_json_object

#: What a checkpoint may hold beside its weights and ``config.json``, in JSON, in the Hugging Face
#: layout. An engine, or whoever makes its prompts, reads each of them that is there.
JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "vocab.json",
)

MAX_BYTES = 512 << 20
"""A side file larger than this is refused unread; the largest tokenizers have some 40 MB."""

#: What engines and tokenizers open: by these names, or by patterns of them.
_IS_READ = re.compile(
    r"[^.].*\.(safetensors|json|jinja|model|tiktoken|py)"
    r"|(tokenizer|vocab|chat_template).*|merges\.txt",
    re.DOTALL,
)


def irregular_files(directory: Path) -> list[str]:
    """One sentence for whatever is no regular file in the place of one that an engine opens.

    A pipe there would have its reader wait for ever, and a device would have it read for ever.
    Links are followed, as readers do; those that lead nowhere are no file for them.

    Raises:
        OSError: the directory cannot be listed.
    """
    problems = []
    for name in sorted(filter(_IS_READ.fullmatch, (path.name for path in directory.iterdir()))):
        try:
            mode = (directory / name).stat().st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and name not in JSON_FILES:  # of these, nobody opens one
            continue
        if not stat.S_ISREG(mode):
            problems.append(f"{name}: no regular file")
    return problems


def unreadable_json(directory: Path) -> list[str]:
    """One sentence for each side file that is there and is no JSON object.

    A tokenizer of many megabytes is parsed whole, with the interpreter lock held: this is for a
    command, not for the thread beside training.
    """
    problems = []
    for name in JSON_FILES:
        if not (directory / name).exists():
            continue
        try:
            read_json_object(directory / name, MAX_BYTES, follow_link=True)
        except ValueError as error:
            problems.append(str(error))
    return problems
