"""The small files beside the weights: the tokenizer and its settings, the generation settings."""

from __future__ import annotations

from pathlib import Path

import orjson

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


def unreadable_json(directory: Path) -> list[str]:
    """One sentence for each side file that is there and is no JSON object.

    A tokenizer of many megabytes is parsed whole, with the interpreter lock held: this is for a
    command, not for the thread beside training.
    """
    problems = []
    for name in JSON_FILES:
        try:
            content = orjson.loads((directory / name).read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"{name}: no JSON: {error}")
        else:
            if not isinstance(content, dict):
                problems.append(f"{name}: expected a JSON object, got {type(content).__name__}")
    return problems
