"""Compares a checkpoint with its base: the same tensors, the same architecture, a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vime.eval.snapshot.weights import TensorInfo, dtype_name

NAMED = 5
"""How many of many tensors a message names."""

#: The settings that decide which tensors there are and how large they are. Others (how rotary
#: embeddings are written down, say) take another form with each version of transformers: to
#: compare them would refuse sound snapshots.
SETTINGS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_embd",
    "n_layer",
    "n_head",
    "d_model",
    "tie_word_embeddings",
)

_OUTPUT_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def named(names: Iterable[str]) -> str:
    """The first few of ``names``, and how many there are when that is not all."""
    names = sorted(names)
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more ({len(names)} in all)"


def tensor_problems(
    tensors: Mapping[str, TensorInfo], base: Mapping[str, TensorInfo], tied_head: str | None
) -> list[str]:
    """What makes the tensors of a checkpoint differ from those of its base, but for dtypes.

    Args:
        tensors: those of the checkpoint.
        base: those of the base.
        tied_head: an output head that may be there or not, from :func:`tied_head`.
    """
    problems = []
    optional = {tied_head} - {None}
    missing = base.keys() - tensors.keys() - optional
    extra = tensors.keys() - base.keys() - optional
    if missing:
        problems.append(f"tensors missing: {named(missing)}")
    if extra:
        problems.append(f"tensors that the base does not have: {named(extra)}")
    if missing and extra:
        problems.append(
            "if these are other names for the same tensors, save the base once with the "
            "transformers that trains, and name that copy in --hf-checkpoint"
        )
    reshaped = [n for n in tensors.keys() & base.keys() if tensors[n].shape != base[n].shape]
    if reshaped:
        shapes = [
            f"{name} has {list(tensors[name].shape)} instead of {list(base[name].shape)}"
            for name in reshaped
        ]
        problems.append(f"wrong shapes: {named(shapes)}")
    return problems


def dtype_problems(tensors: Mapping[str, TensorInfo], base: Mapping[str, TensorInfo]) -> list[str]:
    """One sentence for each pair of dtypes that differ: ``float32 instead of bfloat16``."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in tensors.keys() & base.keys():
        pair = tensors[name].dtype, base[name].dtype
        if pair[0] != pair[1]:
            pairs.setdefault(pair, []).append(name)
    return [
        f"{dtype_name(is_now)} instead of {dtype_name(was)}: {named(names)}"
        for (is_now, was), names in sorted(pairs.items())
    ]


def config_problems(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """The settings that differ; one that either side leaves open has its default there."""
    problems = [
        f"config.json: {key} is {config[key]!r}, and {base[key]!r} in the base"
        for key in SETTINGS
        if config.get(key) is not None
        and base.get(key) is not None
        and (type(config[key]), config[key]) != (type(base[key]), base[key])  # 1 is not true
    ]
    if ("quantization_config" in config) != ("quantization_config" in base):
        holder = "the snapshot" if "quantization_config" in config else "the base"
        problems.append(f"config.json: only {holder} has a quantization_config")
    for key, part in config.items():
        other = base.get(key)
        if key.endswith("_config") and isinstance(part, dict) and isinstance(other, dict):
            problems += [f"{key} in {p}" for p in config_problems(part, other)]
    return problems


def tied_head(
    tensors: Mapping[str, TensorInfo],
    base: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    base_config: Mapping[str, Any],
) -> tuple[str | None, str | None]:
    """An output head that only one side holds although the embedding stands for it.

    Some writers store a tied head twice, some once; engines with a tied configuration use the
    embedding and never load the head. That is believed only where both configurations say
    ``tie_word_embeddings: true`` themselves.

    Returns:
        The head's name and a sentence on the decision; two ``None`` where there is none such.
    """
    heads = [n for n in tensors.keys() ^ base.keys() if is_head(n)]
    if len(heads) != 1 or not (_is_tied(config) and _is_tied(base_config)):
        return None, None
    head = heads[0]
    holder = "the snapshot" if head in tensors else "the base"
    decision = (
        f"only {holder} holds {head}; accepted: both config.json say tie_word_embeddings, so "
        "the embedding is the output head"
    )
    return head, decision


def is_head(name: str) -> bool:
    """Whether ``name`` is that of an output head."""
    return name == _OUTPUT_HEAD or name.endswith(f".{_OUTPUT_HEAD}")


def untied_problems(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Of a tied model that stores its head twice: the two must hold the same bytes.

    Args:
        tensors: name → anything with ``digest``, the BLAKE3 of the tensor's bytes.
        config: the checkpoint's configuration.
    """
    if not _is_tied(config):
        return []
    heads = [n for n in tensors if is_head(n)]
    embeddings = [n for n in tensors if n.endswith(_EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return []
    if tensors[heads[0]].digest == tensors[embeddings[0]].digest:
        return []
    return [
        f"{heads[0]} differs from {embeddings[0]}, and config.json says tie_word_embeddings: "
        "an engine would use only one of them"
    ]


def _is_tied(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return config.get("tie_word_embeddings", nested) is True
