"""The example's task: sums with a right answer, their tokenizer, and a tiny Llama to learn them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # these models are written in milliseconds

NAME = "addition"

NUM_HELD_OUT = 200
_SPLIT_SEED = 2026  # not the run's: runs with different seeds are scored on the same sums

ANSWER_TOKENS = 4
"""Tokens of the longest answer: three digits and the end."""


class Sum(NamedTuple):
    """One problem: ``47+8=`` and ``55``. Every prompt has the same length."""

    prompt: str
    answer: str


def training_and_held_out() -> tuple[list[Sum], list[Sum]]:
    """All sums of a two-digit and a one-digit number, split once and for ever.

    No training prompt is in the second list: what is right there was not learnt by heart.
    """
    sums = [Sum(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10)]
    random.Random(_SPLIT_SEED).shuffle(sums)
    return sums[NUM_HELD_OUT:], sums[:NUM_HELD_OUT]


def write_eval_set(path: Path, sums: Iterable[Sum]) -> None:
    """Write ``sums`` as the JSON lines that ``--eval-prompt-data`` reads."""
    lines = (json.dumps({"input": s.prompt, "label": s.answer}) + "\n" for s in sums)
    path.write_text("".join(lines), encoding="utf-8")


def build_tokenizer() -> Any:
    """One token a character, made here: nothing is downloaded."""
    vocabulary = {token: i for i, token in enumerate([*"0123456789+=", "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",  # noqa: S106 -- no password: a token of the vocabulary
        pad_token="<pad>",  # noqa: S106
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Any, seed: int) -> Any:
    """Some 300 000 parameters in float32, with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,  # the customary 0.02 is for wide models; this one wakes up sooner
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def load_model(directory: str, tokenizer: Any) -> Any:
    """The model of an earlier run, to go on from.

    Raises:
        ValueError: there is none in ``directory``, or it was made for another task.
    """
    try:
        model = LlamaForCausalLM.from_pretrained(
            directory, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf-checkpoint {directory}: cannot be loaded: {error}") from error
    if model.config.vocab_size != len(tokenizer):
        raise ValueError(
            f"--hf-checkpoint {directory}: a vocabulary of {model.config.vocab_size}; expected "
            f"a model that this example made, which has {len(tokenizer)} tokens"
        )
    return model
