"""Finds out what of a model belongs into its checkpoint, and refuses what cannot be captured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from vime.eval.snapshot.compare import named

if TYPE_CHECKING:
    import torch

_COMPILED = "_orig_mod"
_REPLICATED = ("DistributedDataParallel", "DataParallel")
_INSTEAD = (
    "gather the weights yourself: pass a callable export(rollout_id, directory) that writes the "
    "checkpoint"
)


def unwrap(model: Any) -> Any:
    """The ``transformers`` model below ``torch.compile`` and data parallelism.

    Raises:
        ValueError: it is no ``transformers`` model, or one whose weights are quantised, adapted
            or sharded, so that its state is not a checkpoint of the base's kind.
    """
    while True:
        if hasattr(model, _COMPILED):
            model = getattr(model, _COMPILED)
        elif type(model).__name__ in _REPLICATED:
            model = model.module
        else:
            break
    kind = type(model).__name__
    if any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules()):
        raise ValueError(f"exporter={kind}: it is sharded by FullyShardedDataParallel; {_INSTEAD}")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(f"exporter={kind}: it is sharded by DeepSpeed ZeRO-3; {_INSTEAD}")
    if not (hasattr(model, "config") and hasattr(model, "save_pretrained")):
        raise ValueError(
            f"exporter={kind}: expected a transformers model (with config and save_pretrained), "
            "or a callable export(rollout_id, directory)"
        )
    if getattr(model, "hf_quantizer", None) is not None or _is_quantized(model.config):
        raise ValueError(f"exporter={kind}: its weights are quantised; {_INSTEAD}")
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"exporter={kind}: it has adapters; merge them in the export: {_INSTEAD}")
    return model


def _is_quantized(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def checkpoint_tensors(model: Any, *, sharded: bool = False) -> dict[str, torch.Tensor]:
    """The live tensors of an unwrapped model that ``save_pretrained`` would write.

    Names are those of the model's own state, before ``transformers`` turns them into those of
    the checkpoint. Of tensors tied by the model's own account only the source is kept.

    Args:
        model: from :func:`unwrap`.
        sharded: accept ``DTensor``, of which this rank may hold a part only.

    Raises:
        ValueError: a tensor is not in memory, or is of a kind that cannot be copied as it is.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {
        name.replace(f"{_COMPILED}.", ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    _refuse_unusual(state, sharded)
    for name in _tied_duplicates(state, _tied_patterns(model)):
        del state[name]
    return state


def as_saved(model: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The names and shapes of the checkpoint, where the model in memory has others.

    Since transformers 5 models fuse experts when they are loaded, for example.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps models in memory as they are on disk
        return tensors
    return cast("Mapping[str, torch.Tensor]", revert_weight_conversion(model, dict(tensors)))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``, of which this rank may hold a part only."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _refuse_unusual(state: dict[str, Any], sharded: bool) -> None:
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    parts = [name for name, tensor in state.items() if is_sharded(tensor)]
    if parts and not sharded:
        raise ValueError(
            f"{named(parts)}: sharded over ranks; dispatch on every rank, by "
            "vime.eval.DistributedEvalDispatcher"
        )
    odd = {n: type(t).__name__ for n, t in state.items() if type(t) not in plain and n not in parts}
    if odd:
        kinds = ", ".join(sorted(set(odd.values())))
        raise ValueError(f"{named(odd)}: of the kind {kinds}, not plain tensors; {_INSTEAD}")
    absent = [name for name, tensor in state.items() if tensor.device.type == "meta"]
    if absent:
        raise ValueError(
            f"{named(absent)}: on the meta device, without values: offloaded, or never "
            f"initialised. Load the model into memory before training, or {_INSTEAD}"
        )
    odd_layouts = [
        name
        for name, tensor in state.items()
        if tensor.layout is not torch.strided or tensor.is_quantized
    ]
    if odd_layouts:
        raise ValueError(f"{named(odd_layouts)}: sparse or quantised tensors; {_INSTEAD}")


def _tied_patterns(model: Any) -> list[re.Pattern[str]]:
    """What the model and its parts call copies: a list or, since transformers 5, a mapping."""
    patterns = []
    for prefix, module in model.named_modules():
        prefix = prefix.replace(f"{_COMPILED}.", "").removesuffix(f".{_COMPILED}")
        for key in getattr(module, "_tied_weights_keys", None) or ():
            patterns.append(re.compile(f"{prefix}.{key}" if prefix else key))
    return patterns


def _tied_duplicates(
    state: dict[str, torch.Tensor], patterns: Iterable[re.Pattern[str]]
) -> list[str]:
    """Names whose tensor is, byte for byte of memory, that of another name.

    Only what the model declares as tied is left out: a reader ties that again by itself. Tensors
    that merely happen to share memory are written once for each name.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state.items():
        if is_sharded(tensor):  # a rank's own part may be empty: ask for the object itself
            groups.setdefault((id(tensor),), []).append(name)
        elif tensor.numel():
            place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            groups.setdefault(place, []).append(name)
    duplicates = []
    for names in groups.values():
        tied = [n for n in sorted(names) if any(pattern.search(n) for pattern in patterns)]
        # One of them must stay, even when the model calls all of them copies.
        duplicates += tied[: len(names) - 1]
    return duplicates
