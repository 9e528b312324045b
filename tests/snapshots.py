"""Small checkpoints for tests: a base, a whole snapshot, and every kind of broken one.

A two-layer Llama in bfloat16 (about 230 kB) with a byte-level tokenizer, made from seeds. A test
module imports the fixture :func:`checkpoints`, or its ``conftest.py`` does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tensors = dict[str, Any]

NUM_BYTES_VOCABULARY = 256
SPECIAL = ("<bos>", "<eos>", "<pad>")
SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FINAL_NORM = "model.norm.weight"

#: Settings of a model whose head is its embedding, and decides the greedy token: with smaller
#: weights the last input would.
TIED = {"tie_word_embeddings": True, "initializer_range": 0.2}

#: Snapshot → what it changes in a whole one's tensors.
CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "missing_layer": lambda t: _without(t, ".layers.1."),
    "missing_fused_part": lambda t: _without(t, "layers.0.self_attn.v_proj"),
    "extra_tensor": lambda t: t | {"model.layers.9.mlp.extra.weight": t[FINAL_NORM].clone()},
    "wrong_shape": lambda t: t | {FINAL_NORM: t[FINAL_NORM][:32].clone()},
    "float32": lambda t: {name: tensor.float() for name, tensor in t.items()},
    "not_finite": lambda t: t | {FINAL_NORM: t[FINAL_NORM] * float("nan")},
}


def _without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def make_tokenizer() -> Any:
    """A tokenizer whose tokens are the 256 bytes and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES_VOCABULARY
    core = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *SPECIAL])}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def make_model(seed: int = 0, **settings: Any) -> Any:
    """A Llama with random weights; ``settings`` are those of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    first = NUM_BYTES_VOCABULARY
    config = LlamaConfig(
        **SHAPE
        | {
            "head_dim": 32,
            "max_position_embeddings": 512,
            "bos_token_id": first,
            "eos_token_id": first + 1,
            "pad_token_id": first + 2,
        }
        | settings
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write_checkpoint(directory: Path, seed: int = 0, **settings: Any) -> Path:
    """Save a model and its tokenizer as ``transformers`` does; returns ``directory``."""
    make_model(seed, **settings).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def change_tensors(whole: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a checkpoint, with other tensors; returns ``target``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(whole, target)
    tensors = load_file(whole / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors", metadata={"format": "pt"})
    return target


def write_checkpoints(root: Path) -> Path:
    """Write ``base``, ``whole`` and every broken one below ``root``; returns ``root``."""
    write_checkpoint(root / "base", seed=0)
    whole = write_checkpoint(root / "whole", seed=1)
    for name, change in CHANGES.items():
        change_tensors(whole, root / name, change)
    weights = (whole / "model.safetensors").read_bytes()
    shutil.copytree(whole, root / "truncated")
    (root / "truncated" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    shutil.copytree(whole, root / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    return root


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with all of them; to be read only."""
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
