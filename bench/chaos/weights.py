"""The model of a chaos run: other weights at each point, and every way to damage a snapshot.

A two-layer Llama in float32 over bytes, about 0.7 MB. Its weights are drawn anew for each point,
large enough that every layer has a say in each greedy token: two points never answer alike.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.models import VOCABULARY, make_tokenizer

NAME = "chaos"
WEIGHTS = "model.safetensors"
MAX_TOKENS = 512
NUM_ANSWER_TOKENS = 16
_FINAL_NORM = "model.norm.weight"

Tensors = dict[str, Any]


def warm_up() -> None:
    """Import what :func:`write_checkpoint` needs: that takes seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401


def write_checkpoint(directory: Path, seed: int, step: int, width: int = 64) -> Path:
    """Save the weights of a step, with the tokenizer; returns ``directory``.

    Args:
        directory: made if need be.
        seed: of the run.
        step: 0 is the base.
        width: the hidden size; another one makes another model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed * 100_003 + step)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def prompts(seed: int, num_prompts: int) -> list[str]:
    """Texts that begin alike, for longer than a block of the prefix cache, and end differently."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    beginning = "".join(rng.choice(letters) for _ in range(200))
    return [
        beginning + "".join(rng.choice(letters) for _ in range(rng.randint(5, 60)))
        for _ in range(num_prompts)
    ]


def write_eval_set(path: Path, seed: int, num_prompts: int) -> None:
    """Write :func:`prompts` as JSON lines."""
    rows = [{"input": prompt, "label": ""} for prompt in prompts(seed, num_prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint's files into an existing directory."""
    shutil.copytree(source, target, dirs_exist_ok=True)


def truncate(directory: Path) -> None:
    """Leave half of the weights' file."""
    path = directory / WEIGHTS
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_byte(directory: Path, rng: random.Random) -> None:
    """Change one byte in the second half of the weights' file, where there are numbers only."""
    path = directory / WEIGHTS
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(rng.randrange(size // 2, size))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def drop_layer(directory: Path) -> None:
    """Leave out everything of layer 1."""
    _change(directory, lambda t: {name: x for name, x in t.items() if ".layers.1." not in name})


def put_nan(directory: Path) -> None:
    """Make the last norm's weights no numbers."""
    _change(directory, lambda t: t | {_FINAL_NORM: t[_FINAL_NORM] * float("nan")})


def _change(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / WEIGHTS
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
