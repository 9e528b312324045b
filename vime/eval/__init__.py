"""Evaluation beside training: what a training loop imports.

Names are loaded when they are first asked for, so that ``import vime.eval`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.eval.config import ConfigError, EvalConfig, add_eval_arguments, validate_eval_args
    from vime.eval.dispatcher import EvalDispatcher
    from vime.eval.ranks.dispatcher import DistributedEvalDispatcher

_HOMES = {
    "ConfigError": "vime.eval.config",
    "DistributedEvalDispatcher": "vime.eval.ranks.dispatcher",
    "EvalConfig": "vime.eval.config",
    "EvalDispatcher": "vime.eval.dispatcher",
    "add_eval_arguments": "vime.eval.config",
    "validate_eval_args": "vime.eval.config",
}

__all__ = [
    "ConfigError",
    "DistributedEvalDispatcher",
    "EvalConfig",
    "EvalDispatcher",
    "add_eval_arguments",
    "validate_eval_args",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
