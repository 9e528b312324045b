"""Loads what a user named by its dotted path."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def load_object(flag: str, path: str) -> Any:
    """Import ``package.module.name``.

    Args:
        flag: the flag that named it, for the message.
        path: the dotted path.

    Raises:
        ValueError: it cannot be imported, or the module has no such name.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{flag} {path}: expected a dotted path such as package.module.name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{flag} {path}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{flag} {path}: module {module_name!r} has no {name!r}") from None


def eval_function_problem(found: Any) -> str | None:
    """Why what ``--eval-function-path`` names cannot evaluate; ``None`` when it can.

    It may be a concrete ``CheckpointEvalFn``, another class whose instances can be called, or
    a function.
    """
    from vime.rollout.checkpoint_eval import CheckpointEvalFn

    expected = (
        "expected a subclass of vime.rollout.checkpoint_eval.CheckpointEvalFn, a class with "
        "__call__, or a function"
    )
    if not inspect.isclass(found):
        return None if callable(found) else f"a {type(found).__name__}; {expected}"
    if issubclass(found, CheckpointEvalFn):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        return (
            f"{found.__name__} is no concrete CheckpointEvalFn: it lacks {missing}"
            if missing
            else None
        )
    if not any("__call__" in vars(kind) for kind in found.__mro__):
        return f"the class {found.__name__} has no __call__; {expected}"
    return None
