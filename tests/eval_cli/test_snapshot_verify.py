"""`vime snapshot verify`: the right answer for each kind of directory, quickly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.irregular import IRREGULAR, replace
from tests.snapshots import checkpoints, write_checkpoint
from vime.cli import main
from vime.eval.snapshot.manifest import FILE, Manifest

__all__ = ["checkpoints"]  # a fixture

HEAVY = ("torch", "transformers", "vllm", "ray", "matplotlib", "anyio", "httpx", "aiohttp")


@pytest.fixture
def snapshot(checkpoints: Path, tmp_path: Path) -> Path:
    """A whole snapshot of vime's own, with its manifest."""
    directory = tmp_path / "step_7"
    shutil.copytree(checkpoints / "whole", directory)
    Manifest.of_directory(directory, "run-1", 7).write(directory)
    return directory


def verify(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main(["snapshot", "verify", *map(str, args)])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_whole_snapshot_is_whole_and_named(
    snapshot: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = verify(capsys, snapshot, "--against", checkpoints / "base")
    assert (status, err) == (0, "")
    assert out.startswith(f"{snapshot}: whole: 21 tensors, 0.2 MiB, run-1:7:")


def test_a_checkpoint_that_vime_did_not_write_is_checked_without_digests(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = verify(capsys, checkpoints / "whole")
    assert status == 0
    assert "vime did not write it; there are no digests to compare" in out


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing_layer", "tensors missing"),
        ("missing_fused_part", "model.layers.0.self_attn.v_proj.weight"),
        ("extra_tensor", "model.layers.9.mlp.extra.weight"),
        ("wrong_shape", "model.norm.weight"),
        ("float32", "wrong dtype"),
        ("truncated", "model.safetensors"),
        ("no_weights", "safetensors"),
    ],
)
def test_each_broken_checkpoint_is_not_whole_and_its_fault_is_on_a_line(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    args = (checkpoints / name, "--against", checkpoints / "base")
    status, out, err = verify(capsys, *args)
    assert (status, err) == (1, "")
    head, *problems = out.splitlines()
    assert head == f"{checkpoints / name}: not whole, {len(problems)} problem(s)"
    assert any(problem in line for line in problems)
    status, out, _ = verify(capsys, *args, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["whole"] is False
    assert [f"  {line}" for line in found["problems"]] == problems


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", b'{"model": {"type": "B', "tokenizer.json: not JSON: "),
        ("tokenizer.json", b"", "tokenizer.json: not JSON: "),
        ("generation_config.json", b"[1]", "generation_config.json: a JSON object was expected"),
    ],
)
def test_a_side_file_that_nobody_could_read_is_a_fault(
    name: str,
    content: bytes,
    problem: str,
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / "whole", directory)
    (directory / name).write_bytes(content)
    status, out, _ = verify(capsys, directory)
    assert status == 1
    assert f"  {problem}" in out


def test_one_flipped_byte_is_found_unless_told_to_be_quick(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (snapshot / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        (last,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    status, out, _ = verify(capsys, snapshot)
    assert status == 1
    assert "tensors whose bytes are not those of the manifest" in out
    assert verify(capsys, snapshot, "--quick")[0] == 0


def test_a_side_file_that_was_changed_is_found(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (snapshot / "config.json").read_text()
    (snapshot / "config.json").write_text(config.replace("512", "513"))
    status, out, _ = verify(capsys, snapshot)
    assert status == 1
    assert "files whose bytes are not those of the manifest: config.json" in out
    assert verify(capsys, snapshot, "--quick")[0] == 0


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", FILE])
def test_what_is_no_file_is_named_once_and_not_waited_for(
    name: str, owned: bool, kind: str, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not owned:
        (snapshot / FILE).unlink()
    replace(snapshot / name, kind)
    status, out, _ = verify(capsys, snapshot)
    assert status == 1
    assert len(re.findall(rf"^  {name}: ", out, re.MULTILINE)) in ((1, 2) if owned else (1,))


def test_a_torn_manifest_is_a_fault_among_the_others(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = snapshot / FILE
    manifest.write_bytes(manifest.read_bytes()[:100])
    (snapshot / "config.json").unlink()
    status, out, _ = verify(capsys, snapshot)
    assert status == 1
    assert FILE in out
    assert "config.json" in out


def test_json_of_a_whole_one_has_its_digest_and_sizes(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = verify(capsys, snapshot, "--json")
    found = json.loads(out)
    assert status == 0
    manifest = Manifest.read(snapshot)
    assert found == {
        "whole": True,
        "path": str(snapshot),
        "problems": [],
        "notes": [],
        "num_tensors": 21,
        "num_bytes": found["num_bytes"],
        "weight_version": manifest.weight_version,
        "digest": manifest.digest,
    }
    assert 0 < found["num_bytes"] < manifest.num_bytes


def test_bad_usage_is_one_line_and_status_2(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        ((tmp_path / "nowhere",), "no such directory; expected a Hugging Face checkpoint"),
        ((checkpoints / "whole" / "config.json",), "not a directory"),
        ((checkpoints / "whole", "--against", tmp_path), "--against"),
        ((), "the following arguments are required: DIR"),
    ):
        status, out, err = verify(capsys, *args)
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        assert message in line


def test_it_starts_fast_and_loads_nothing_heavy(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    program = f"""
import sys, time
from vime.cli import main
assert main(["snapshot", "verify", {str(directory)!r}]) == 0
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.stderr.write(f"{{time.process_time()}} {{heavy}}")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    seconds, heavy = out.stderr.decode().split(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 0.5
