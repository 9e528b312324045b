"""Loads what a user named by its dotted path."""

from __future__ import annotations

import importlib
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
