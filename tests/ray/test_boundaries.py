"""Ray stays an extra: nothing outside vime.ray imports it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import vime

ROOT = Path(vime.__file__).parent


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_nothing_outside_vime_ray_imports_ray() -> None:
    sources = [path for path in ROOT.rglob("*.py") if path.parent != ROOT / "ray"]
    assert len(sources) > 50
    wrong = {
        str(path.relative_to(ROOT))
        for path in sources
        if any(name == "ray" or name.startswith(("ray.", "vime.ray")) for name in imported(path))
    }
    assert wrong == set()


def test_vime_ray_loads_ray_only_when_it_is_used() -> None:
    code = (
        "import sys, vime.ray.placement, vime.ray.group, vime.ray.actors; "
        "print([name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
