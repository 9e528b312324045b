"""The settings of a fleet's engines: where each comes from, and how vLLM is told.

Three sources, the later ones stronger: ``--vllm-*`` (the rollout engines' settings, which the
fleet inherits), ``--eval-vllm-*`` (for the fleet alone), and the ``overrides`` of a server
group in the ``--vllm-config`` YAML. A setting is named as vLLM names it, with underscores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from vime.eval.config.flags import shown
from vime.limits import LARGEST_64_BIT

_INHERITED, _OWN = "vllm_", "eval_vllm_"

#: Flags of the framework that begin like an engine's setting and are none.
_NO_SETTINGS = ("router_", "server_")

#: What vime says on the command line of its engines; nobody else may.
OWNED = frozenset({
    "model", "served_model_name", "host", "port", "uds", "api_key", "generation_config",
    "enable_scale_out", "middleware", "worker_extension_cls", "tensor_parallel_size",
    # All GPUs of an eval engine are one tensor-parallel group on one node.
    "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size",
    "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank",
    "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend",
    "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb", "data_parallel_supervisor_port",
    "nnodes", "node_rank", "master_addr", "master_port", "device_ids", "headless",
    "api_server_count",
})  # fmt: skip

#: How rollout engines get their weights and share out their work; an eval engine does neither.
ROLLOUT_ONLY = frozenset({
    "load_format", "model_loader_extra_config", "weight_transfer_config", "kv_transfer_config",
    "kv_events_config", "ec_transfer_config", "enable_sleep_mode",
})  # fmt: skip

#: Settings that are right for one tensor-parallel size only: how an engine's GPUs work together,
#: and amounts of memory for each of them.
BOUND_TO_TP_SIZE = frozenset({
    "decode_context_parallel_size", "dcp_comm_backend", "dcp_q_replicate",
    "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "enable_expert_parallel",
    "enable_eplb", "eplb_config", "expert_placement_strategy", "enable_ep_weight_filter",
    "enable_elastic_ep", "elastic_ep_max_dp_size", "all2all_backend", "enable_dbo",
    "distributed_executor_backend", "disable_custom_all_reduce", "mm_encoder_tp_mode",
    "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "speculative_config",
})  # fmt: skip


def inherited_settings(args: argparse.Namespace, *, same_tp_size: bool) -> dict[str, Any]:
    """What an engine inherits of the rollout engines' ``--vllm-*``.

    Args:
        args: any namespace; ``None`` means that a flag was not given.
        same_tp_size: whether the engine has as many GPUs as a rollout engine.
    """
    left_out = OWNED | ROLLOUT_ONLY | (frozenset() if same_tp_size else BOUND_TO_TP_SIZE)
    found = _with_prefix(args, _INHERITED)
    return {name: value for name, value in found.items() if name not in left_out}


def own_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What ``--eval-vllm-*`` says for the fleet alone."""
    return _with_prefix(args, _OWN)


def _with_prefix(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in (
            (dest.removeprefix(prefix), value)
            for dest, value in sorted(vars(args).items())
            if dest.startswith(prefix)
        )
        if value is not None and _is_setting(name) and not _is_default(value)
    }


def _is_setting(name: str) -> bool:
    return name != "config" and not name.startswith(_NO_SETTINGS)


def _is_default(value: Any) -> bool:
    """Whether it is one of vLLM's own config objects as vLLM makes it.

    A framework that takes all of vLLM's flags over has them in its namespace, asked for or not.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    try:
        return bool(value == type(value)())
    except (TypeError, ValueError):  # it cannot be made of nothing: somebody has chosen it
        return False


def owned_problems(settings: Iterable[str], where: str) -> list[str]:
    """One sentence for each setting that is vime's to make; ``where`` says who wants it."""
    return [
        f"{where} sets {name}, which the eval fleet sets itself: remove it"
        for name in sorted(set(settings) & OWNED)
    ]


def number_problems(settings: Mapping[str, Any], where: str) -> list[str]:
    """One sentence for each setting with a number that no engine takes; ``where`` said it."""
    return [
        f"{where} sets {name} to {wrong}: expected finite numbers of at most 64 bits"
        for name, value in settings.items()
        if (wrong := _wrong_number(value)) is not None
    ]


def _wrong_number(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return next((w for item in value.values() if (w := _wrong_number(item))), None)
    if isinstance(value, (list, tuple)):
        return next((w for item in value if (w := _wrong_number(item))), None)
    if isinstance(value, (int, float)) and not -LARGEST_64_BIT <= value <= LARGEST_64_BIT:
        return shown(value)
    return None


def command_line(settings: Mapping[str, Any]) -> list[str]:
    """The words that give ``settings`` to vLLM's server.

    ``True`` and ``False`` become ``--name`` and ``--no-name``, lists several words, mappings
    JSON; ``None`` leaves a setting out.

    Raises:
        ValueError: a value is none of these, nor a number or a word.
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", *_words(name, value)]
    return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, (str, int, float, PurePath)):
        return [str(value)]
    if isinstance(value, (list, tuple)):
        return [word for item in value for word in _words(name, item)]
    try:
        if isinstance(value, Mapping):
            return [json.dumps(dict(value))]
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"engine setting {name}={value!r:.200}: expected a number, a word, a list or a mapping "
        f"of these; say it with --eval-vllm-{name.replace('_', '-')}"
    )


def mirror_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--eval-vllm-X`` for every ``--vllm-X`` of ``parser`` that lacks it.

    The words are passed on as they are: vLLM reads them, in the engine. Switches can be said
    both ways.
    """
    present = {option for action in parser._actions for option in action.option_strings}
    group = parser.add_argument_group("vime: the eval engines, where they differ from --vllm-*")
    for action in list(parser._actions):
        name = next((o[7:] for o in action.option_strings if o.startswith("--vllm-")), None)
        if name is None or f"--eval-vllm-{name}" in present:
            continue
        setting = name.replace("-", "_")
        if not _is_setting(setting) or setting in OWNED:
            continue
        text = f"--vllm-{name} of the eval engines (default: the same)"
        if action.nargs == 0:
            group.add_argument(
                f"--eval-vllm-{name}",
                action=argparse.BooleanOptionalAction,
                default=None,
                help=text,
            )
        else:
            kind = action.type if action.type in (int, float) else str
            group.add_argument(
                f"--eval-vllm-{name}", type=kind, nargs=action.nargs, default=None, help=text
            )
