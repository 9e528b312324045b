"""Models and checkpoints for the benchmarks, made from seeds: nothing is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NUM_BYTES = 256
_SPECIAL = ("<bos>", "<eos>", "<pad>")
VOCABULARY = 264

#: Sizes of a layer by the total to be reached: a model of 1 GB is made of layers as a real one is.
_WIDTHS = ((0.02, 128), (0.2, 512), (0.8, 1024), (float("inf"), 2048))


def _no_progress_bars() -> None:
    """The terminal is for figures."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bos, eos, pad = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad
    )


def make_model(width: int, num_layers: int, dtype: torch.dtype | None = None) -> Any:
    """A Llama with random weights over the vocabulary of :func:`make_tokenizer`.

    Args:
        width: its hidden size; a multiple of 32.
        num_layers: how many layers.
        dtype: of its weights; bfloat16 if absent.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _no_progress_bars()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=max(width // 64, 2),
        num_key_value_heads=max(width // 64, 2),
        max_position_embeddings=512,
        bos_token_id=_NUM_BYTES,
        eos_token_id=_NUM_BYTES + 1,
        pad_token_id=_NUM_BYTES + 2,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.bfloat16)  # no moment with twice the memory
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def make_model_of(gigabytes: float) -> Any:
    """A model of about so many bytes (10⁹) in bfloat16, at least two layers."""
    width = next(width for limit, width in _WIDTHS if gigabytes <= limit)
    layer_bytes = 2 * (4 * width * width + 3 * width * 3 * width)
    return make_model(width, max(2, round(gigabytes * 1e9 / layer_bytes)))


def num_bytes(model: Any) -> int:
    """Bytes of all its parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def write_checkpoint(model: Any, directory: Path) -> Path:
    """Save a model with the tokenizer of all benchmarks; returns ``directory``."""
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def write_tiny_checkpoint(directory: Path) -> Path:
    """Save a model of 0.2 MB and its tokenizer; returns ``directory``."""
    return write_checkpoint(make_model(64, 2), directory)


class FromShelf:
    """An exporter with nothing to copy: what it writes lies ready, and is linked.

    Args:
        checkpoint: whole, on the file system of the staging directory.
    """

    needs_directory = False

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def capture(self, rollout_id: int, directory: Path) -> FromShelf:  # noqa: ARG002 -- the contract
        """Hold nothing."""
        return self

    def write(self, directory: Path) -> None:
        """Copy the files; a snapshot must not share its bytes with anybody."""
        shutil.copytree(self._checkpoint, directory, dirs_exist_ok=True)

    def release(self) -> None:
        """Let nothing go."""
