"""What belongs into a checkpoint beside its weights: the model's settings, its tokenizer."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.eval.snapshot.base import TOKENIZER_CONFIG, VOCABULARIES
from vime.eval.snapshot.files import write_new

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = (
    *VOCABULARIES,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Settings:
    """The model's configuration as it was when its weights were captured."""

    config: Any
    generation_config: Any | None

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype | None) -> Settings:
        """Copy them; ``dtype`` is the one that the weights are written in, if not their own."""
        config = copy.deepcopy(model.config)
        name = str(dtype or model.dtype).removeprefix("torch.")
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", name)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        generation_config = None
        if model.can_generate():
            generation_config = copy.deepcopy(model.generation_config)
        return cls(config, generation_config)

    def write(self, directory: Path) -> None:
        """Write ``config.json`` and, of a model that generates, ``generation_config.json``."""
        self.config.save_pretrained(directory)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(directory)


class TokenizerFiles:
    """The files of a tokenizer, read once: it does not change, and threads must not share it.

    Args:
        model: without a tokenizer, the local directory that it was loaded from is looked at.
        tokenizer: a tokenizer or processor.

    Raises:
        ValueError: the tokenizer is none.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._files = _files_of_origin(model) if tokenizer is None else _files_of(tokenizer)

    def write(self, directory: Path) -> None:
        """Write them into a checkpoint."""
        for name, content in self._files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_new(directory / name, [content])


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ValueError(f"tokenizer={tokenizer!r}: expected one with save_pretrained(directory)")
    with tempfile.TemporaryDirectory(prefix="vime-tokenizer-") as scratch:
        tokenizer.save_pretrained(scratch)
        root = Path(scratch)
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


def _files_of_origin(model: Any) -> dict[str, bytes]:
    name = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not name or not Path(name, "config.json").is_file():
        return {}
    origin = Path(name)
    files = [origin / name for name in _TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in files if path.is_file()}
