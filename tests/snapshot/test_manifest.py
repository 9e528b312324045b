"""The manifest: its digests are the content's, and a crafted one is refused with one message."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.snapshot.interpreter_lock import leaves_the_lock, turns_of_another_thread
from tests.snapshots import FINAL_NORM, change_tensors
from vime.eval.contracts import Content
from vime.eval.snapshot.manifest import (
    FILE,
    MAX_BYTES,
    Manifest,
    ManifestError,
    combined_digest,
    digest_tensors,
)
from vime.eval.snapshot.weights import DTYPES, read_weights


@pytest.fixture
def manifest(checkpoints: Path) -> Manifest:
    return Manifest.of_directory(checkpoints / "whole", "run-1", 40)


def test_it_survives_being_written_and_read(manifest: Manifest, tmp_path: Path) -> None:
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_its_digests_are_those_of_the_bytes_that_torch_loads(
    manifest: Manifest, checkpoints: Path
) -> None:
    import torch

    lines = []
    for name, tensor in sorted(load_file(checkpoints / "whole" / "model.safetensors").items()):
        digest = blake3(bytes(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()
        assert manifest.tensors[name].digest == digest
        dtype = next(k for k, (_, v) in DTYPES.items() if f"torch.{v}" == str(tensor.dtype))
        lines.append(json.dumps([name, dtype, list(tensor.shape), digest], separators=(",", ":")))
    assert manifest.digest == blake3("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    assert manifest.weight_version == f"run-1:40:{manifest.digest[:12]}"


def test_every_file_is_listed_with_its_size_and_small_ones_with_a_digest(
    manifest: Manifest, checkpoints: Path
) -> None:
    on_disk = {p.name: p.stat().st_size for p in (checkpoints / "whole").iterdir()}
    assert {name: file.size for name, file in manifest.files.items()} == on_disk
    config = (checkpoints / "whole" / "config.json").read_bytes()
    assert manifest.files["config.json"].digest == blake3(config).hexdigest()
    assert manifest.files["model.safetensors"].digest is None
    assert manifest.num_bytes == on_disk["model.safetensors"]


def test_it_says_which_tensors_hold_a_nan_where_their_bytes_were_looked_at(
    checkpoints: Path, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[FINAL_NORM][0] = float("nan")
        return tensors

    directory = change_tensors(checkpoints / "whole", tmp_path / "spoilt", spoil)
    sound = Manifest.of_directory(checkpoints / "whole", "run-1", 40)
    spoilt = Manifest.of_directory(directory, "run-1", 40)
    assert (sound.with_nan, spoilt.with_nan) == ((), (FINAL_NORM,))
    assert Manifest.parse(spoilt.encode()).with_nan == (FINAL_NORM,)
    known: dict[str, str | Content] = {
        name: Content(tensor.digest, tensor.with_nan) for name, tensor in spoilt.tensors.items()
    }
    assert Manifest.of_directory(directory, "run-1", 40, known=known) == spoilt
    other = next(name for name in known if name != FINAL_NORM)
    known[other] = spoilt.tensors[other].digest
    assert Manifest.of_directory(directory, "run-1", 40, known=known).with_nan == (FINAL_NORM,)
    known[FINAL_NORM] = spoilt.tensors[FINAL_NORM].digest
    half = Manifest.of_directory(directory, "run-1", 40, known=known)
    assert (half.with_nan, half.digest) == (None, spoilt.digest)
    headers = Manifest.of_directory(directory, "run-1", 40, verify="headers")
    assert headers.with_nan is None


def test_an_older_one_that_says_nothing_of_nans_is_read_and_nonsense_is_refused(
    manifest: Manifest,
) -> None:
    fields = json.loads(manifest.encode())
    for tensor in fields["tensors"].values():
        del tensor["with_nan"]
    older = Manifest.parse(json.dumps(fields).encode())
    assert (older.with_nan, older.digest) == (None, manifest.digest)
    for nonsense in (0, 1, "no", []):
        fields["tensors"][FINAL_NORM]["with_nan"] = nonsense
        with pytest.raises(ManifestError, match=f"with_nan of {FINAL_NORM}"):
            Manifest.parse(json.dumps(fields).encode())


def test_one_changed_value_a_new_name_or_another_shape_changes_the_digest(
    manifest: Manifest, checkpoints: Path, tmp_path: Path
) -> None:
    def flip(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[FINAL_NORM][0] += 1
        return tensors

    changes = {
        "value": flip,
        "name": lambda t: {f"{k}.x" if k == FINAL_NORM else k: v for k, v in t.items()},
        "shape": lambda t: t | {FINAL_NORM: t[FINAL_NORM].reshape(8, 8)},
    }
    digests = {manifest.digest}
    for name, change in changes.items():
        directory = change_tensors(checkpoints / "whole", tmp_path / name, change)
        digests.add(Manifest.of_directory(directory, "run-1", 40).digest)
    assert len(digests) == 4


# -- bulk work -----------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """One tensor of 64 MiB, most of it a hole of the file."""
    size = 64 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    text = header.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    return tmp_path


def test_digesting_does_not_copy_tensors_into_python_memory(large: Path) -> None:
    infos = read_weights(large)
    tracemalloc.start()
    try:
        digest_tensors(large, infos)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_hashing_leaves_the_interpreter_lock_to_training() -> None:
    data = memoryview(bytes(32 << 20))
    assert turns_of_another_thread(lambda: sum(range(1 << 20))) == 0, "plain Python keeps it"
    assert leaves_the_lock(lambda: blake3().update(data))


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(large: Path) -> None:
    infos = read_weights(large)
    os.truncate(large / "model.safetensors", 1 << 20)
    with pytest.raises(ValueError, match="became shorter"):
        digest_tensors(large, infos)


# -- crafted manifests ---------------------------------------------------------------------------


def set_in(path: str, value: Any) -> Any:
    def change(fields: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            fields = fields[key]
        fields[last] = value

    return change


def move_file(name: str) -> Any:
    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop("config.json")

    return change


CRAFTED: dict[str, Any] = {
    "a file above the snapshot": move_file("../config.json"),
    "a file above, on the way": move_file("a/../../config.json"),
    "an absolute file": move_file("/etc/passwd"),
    "a file with no name": move_file(""),
    "a file that is the directory": move_file("."),
    "a file in no normal form": move_file("a//b"),
    "a file with a null character": move_file("a\0b"),
    "itself": move_file(FILE),
    "a huge size": set_in("files/config.json/size", 2**63),
    "a huger size": set_in("files/config.json/size", 10**40),
    "a negative size": set_in("files/config.json/size", -1),
    "a size that is text": set_in("files/config.json/size", "7"),
    "a size that is true": set_in("files/config.json/size", True),
    "a file that is a number": set_in("files/config.json", 7),
    "files that are a list": set_in("files", []),
    "no files": set_in("files", {}),
    "tensors that are a list": set_in("tensors", [1]),
    "a tensor that is a list": set_in(f"tensors/{FINAL_NORM}", []),
    "a tensor's unknown dtype": set_in(f"tensors/{FINAL_NORM}/dtype", "F33"),
    "a tensor's size that is text": set_in(f"tensors/{FINAL_NORM}/shape", ["64"]),
    "a tensor's huge size": set_in(f"tensors/{FINAL_NORM}/shape", [2**63]),
    "a tensor's short digest": set_in(f"tensors/{FINAL_NORM}/digest", "ab"),
    "a tensor's digest that is a number": set_in(f"tensors/{FINAL_NORM}/digest", 7),
    "a tensor in a file above": set_in(f"tensors/{FINAL_NORM}/file", "../model.safetensors"),
    "a tensor in a file that is a number": set_in(f"tensors/{FINAL_NORM}/file", 3),
    "a tensor in a file that is not listed": set_in(f"tensors/{FINAL_NORM}/file", "b.safetensors"),
    "a tensor with another digest": set_in(f"tensors/{FINAL_NORM}/digest", "0" * 64),
    "another digest": set_in("digest", "0" * 64),
    "another weight version": set_in("weight_version", "run-1:40:000000000000"),
    "a weight version that is a list": set_in("weight_version", []),
    "a run that is a path": set_in("run_id", "../run"),
    "a run that is a number": set_in("run_id", 5),
    "a step that is text": set_in("rollout_id", "40"),
    "a step that is true": set_in("rollout_id", True),
    "a later schema": set_in("schema", 2),
    "a schema that is true": set_in("schema", True),
    "a schema that is no integer": set_in("schema", 1.0),
    "a step that is no integer": set_in("rollout_id", 40.0),
    "a size that is no integer": set_in("files/config.json/size", 721.0),
    "a tensor's size that is true": set_in(f"tensors/{FINAL_NORM}/shape", [True]),
    "a tensor's size that is no integer": set_in(f"tensors/{FINAL_NORM}/shape", [64.0]),
    "a tensor's negative size": set_in(f"tensors/{FINAL_NORM}/shape", [-64]),
    "a tensor's digest that is null": set_in(f"tensors/{FINAL_NORM}/digest", None),
    "a file's digest that is null": set_in("files/config.json/digest", None),
    "a digest of a file of tensors": set_in("files/model.safetensors/digest", "0" * 64),
    "a kind of digest that is true": set_in("verify", True),
}


@pytest.mark.parametrize("craft", CRAFTED)
def test_a_crafted_manifest_is_refused(craft: str, manifest: Manifest) -> None:
    fields = json.loads(manifest.encode())
    CRAFTED[craft](fields)
    with pytest.raises(ManifestError, match=FILE):
        Manifest.parse(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "key", ["schema", "run_id", "rollout_id", "weight_version", "digest", "tensors", "files"]
)
def test_a_manifest_that_lacks_a_field_is_refused(key: str, manifest: Manifest) -> None:
    fields = json.loads(manifest.encode())
    del fields[key]
    with pytest.raises(ManifestError, match=FILE):
        Manifest.parse(json.dumps(fields).encode())


def test_a_manifest_cut_anywhere_is_refused(manifest: Manifest) -> None:
    content = manifest.encode()
    for end in range(0, len(content) - 1, 37):
        with pytest.raises(ManifestError):
            Manifest.parse(content[:end])


@pytest.mark.parametrize("where", ["schema", "size", FINAL_NORM])
def test_a_manifest_with_a_key_twice_is_refused(where: str, manifest: Manifest) -> None:
    for content in (manifest.encode(), json.dumps(json.loads(manifest.encode())).encode()):
        key = f'"{where}":'.encode()
        assert key in content
        with pytest.raises(ManifestError, match=f"the key '{where}' is there twice"):
            Manifest.parse(content.replace(key, key + b" 1, " + key, 1))


def test_a_manifest_says_what_is_wrong_with_its_digest(manifest: Manifest) -> None:
    fields = json.loads(manifest.encode())
    fields["files"]["config.json"]["digest"] = None
    with pytest.raises(ManifestError, match=r"the digest of config\.json is None"):
        Manifest.parse(json.dumps(fields).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = ("schema", "run_id", "rollout_id", "weight_version", "digest", "tensors", "files")


@settings(max_examples=300)
@given(fields=st.fixed_dictionaries(dict.fromkeys(KEYS, JSON)), schema=st.sampled_from([1, 2]))
def test_no_crafted_manifest_escapes_as_another_error(fields: Any, schema: int) -> None:
    content = json.dumps(fields | {"schema": schema}).encode()
    with pytest.raises(ManifestError):
        Manifest.parse(content)


def test_a_manifest_that_is_missing_a_link_a_pipe_or_too_large_is_refused(
    manifest: Manifest, tmp_path: Path
) -> None:
    with pytest.raises(ManifestError, match="missing"):
        Manifest.read(tmp_path)
    (tmp_path / "elsewhere").write_bytes(manifest.encode())
    (tmp_path / FILE).symlink_to("elsewhere")
    with pytest.raises(ManifestError, match="link"):
        Manifest.read(tmp_path)
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(ManifestError, match="no regular file"):
        Manifest.read(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).touch()
    os.truncate(tmp_path / FILE, MAX_BYTES + 1)
    with pytest.raises(ManifestError, match="at most"):
        Manifest.read(tmp_path)


def test_the_combined_digest_does_not_depend_on_the_order(manifest: Manifest) -> None:
    backwards = dict(reversed(manifest.tensors.items()))
    assert list(backwards) != list(manifest.tensors)
    assert combined_digest(backwards) == manifest.digest
