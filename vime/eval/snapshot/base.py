"""The base checkpoint: what every snapshot of the run must look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.eval.snapshot.files import read_json_object
from vime.eval.snapshot.side_files import irregular_files
from vime.eval.snapshot.weights import TensorInfo, WeightsError, read_weights

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

#: Files of which one is enough to make a tokenizer; which one is written changes with versions.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "qwen.tiktoken",
)

MAX_CONFIG_BYTES = 64 << 20

#: Tables that old checkpoints carry; they are computed anew at every start, and never loaded.
COMPUTED = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)


@dataclass(frozen=True)
class BaseSpec:
    """What is known of a base checkpoint.

    Attributes:
        directory: where it is.
        tensors: name → what it is; computed tables are left out.
        config: its ``config.json``.
        has_vocabulary: it brings a tokenizer.
        has_tokenizer_config: it brings ``tokenizer_config.json``.
    """

    directory: Path
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    has_vocabulary: bool
    has_tokenizer_config: bool

    @property
    def num_bytes(self) -> int:
        """Size of its weights in bytes."""
        return sum(info.num_bytes for info in self.tensors.values())

    @classmethod
    def read(cls, directory: Path) -> BaseSpec:
        """Read the headers, not the weights, of a checkpoint directory.

        Raises:
            ValueError: it is no whole checkpoint with safetensors weights; says what to do.
        """
        try:
            config = read_config(directory)
            irregular = irregular_files(directory)
            if irregular:
                raise ValueError("; ".join(irregular))
            tensors = loadable(read_weights(directory))
        except ValueError as error:
            problems = error.problems if isinstance(error, WeightsError) else [str(error)]
            raise ValueError(
                f"--hf-checkpoint {directory}: {'; '.join(problems[:5])}. Every snapshot is "
                "checked against it: expected a whole Hugging Face checkpoint with safetensors "
                "weights"
            ) from None
        return cls(
            directory, tensors, config, has_vocabulary(directory), has_tokenizer_config(directory)
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint.

    Raises:
        ValueError: it is missing or no JSON object.
    """
    return read_json_object(directory / CONFIG, MAX_CONFIG_BYTES, follow_link=True)


def loadable(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``tensors`` without the computed tables."""
    return {name: info for name, info in tensors.items() if not name.endswith(COMPUTED)}


def has_vocabulary(directory: Path) -> bool:
    """Whether a tokenizer can be made from the directory."""
    return any((directory / name).is_file() for name in VOCABULARIES)


def has_tokenizer_config(directory: Path) -> bool:
    """Whether the directory has a ``tokenizer_config.json``."""
    return (directory / TOKENIZER_CONFIG).is_file()
