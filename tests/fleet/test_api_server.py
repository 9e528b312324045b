"""The main program of an engine: it is vLLM's, and what it spawns starts as lightly as it does."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.eval.fleet import api_server

#: In the place of vLLM's server: says what a process is like, and spawns one.
VLLM = """
import json, multiprocessing, sys
from vllm.entrypoints.openai.child import describe

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as child:
        print(json.dumps([sys.argv[1:], describe(), child.apply(describe)]))
"""
CHILD = """
import gc, importlib.util, sys

def describe():
    imported = "vllm.entrypoints.openai.api_server" in sys.modules
    return [gc.get_threshold(), imported, importlib.util.find_spec("sklearn") is not None]
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--trust-remote-code"]])
def test_the_server_takes_vllms_words_and_its_children_import_no_more_than_it(
    more: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "api_server.py").write_text(VLLM)
    (package / "child.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "-m", api_server.__name__, "--port", "1", *more],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words, server, child = json.loads(done.stdout)
    assert words == ["--port", "1", *more]
    assert server == child == [list(api_server.THRESHOLDS), False, bool(more)]


def test_importing_it_changes_nothing_in_the_driver() -> None:
    before = gc.get_threshold(), sys.modules.get("sklearn")
    importlib.reload(api_server)
    assert (gc.get_threshold(), sys.modules.get("sklearn")) == before
