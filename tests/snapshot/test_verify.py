"""The verifier: the right answer for each kind of snapshot, and a message that says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.snapshots import CHANGES, FINAL_NORM, change_tensors, make_model, write_checkpoint
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.manifest import FILE, Manifest
from vime.eval.snapshot.verify import SnapshotInvalid, verify
from vime.eval.snapshot.weights import SINGLE


def seal(directory: Path) -> Manifest:
    """Give a directory the manifest that an owned snapshot has."""
    manifest = Manifest.of_directory(directory, "run-1", 40)
    manifest.write(directory)
    return manifest


def refusal(directory: Path, base: BaseSpec | None, **how: Any) -> str:
    with pytest.raises(SnapshotInvalid) as caught:
        verify(directory, base, **how)
    assert directory.name in str(caught.value)
    return str(caught.value)


# -- against the base ----------------------------------------------------------------------------

REFUSED = {
    "missing_layer": ["missing", "model.layers.1.input_layernorm.weight", "and 4 more (9 in all)"],
    "missing_fused_part": ["missing", "model.layers.0.self_attn.v_proj.weight"],
    "extra_tensor": ["does not have", "model.layers.9.mlp.extra.weight"],
    "wrong_shape": [FINAL_NORM, "[32] instead of [64]"],
    "float32": ["float32 instead of bfloat16", "lm_head.weight", "(21 in all)", 'dtype="…"'],
    "truncated": ["model.safetensors: truncated: 117112 bytes", "234224"],
    "no_weights": ["model.safetensors: missing"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_snapshot_is_refused_and_its_fault_named(
    name: str, checkpoints: Path, base: BaseSpec
) -> None:
    message = refusal(checkpoints / name, base, owned=False)
    for part in REFUSED[name]:
        assert part in message


@pytest.mark.parametrize("name", ["whole", "base", "not_finite"])
def test_a_whole_snapshot_passes_whatever_its_numbers_are(
    name: str, checkpoints: Path, base: BaseSpec
) -> None:
    verified = verify(checkpoints / name, base, owned=False)
    assert verified.tensors.keys() == base.tensors.keys()
    assert verified.num_bytes == base.num_bytes == 232064
    assert verified.notes == ()


def test_every_kind_of_snapshot_has_an_answer(checkpoints: Path) -> None:
    assert {p.name for p in checkpoints.iterdir()} == {*REFUSED, "whole", "base", "not_finite"}
    assert CHANGES.keys() <= {*REFUSED, "not_finite"}


def test_another_dtype_passes_with_a_note_where_the_user_chose_so(
    checkpoints: Path, base: BaseSpec
) -> None:
    verified = verify(checkpoints / "float32", base, owned=False, allow_cast=True)
    assert "an engine will cast: float32 instead of bfloat16" in verified.notes[0]


def test_every_fault_is_reported_at_once(whole: Path, base: BaseSpec) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return CHANGES["extra_tensor"](CHANGES["missing_layer"](CHANGES["wrong_shape"](tensors)))

    spoilt = change_tensors(whole, whole.parent / "spoilt", change)
    (spoilt / "config.json").write_text("{")
    (spoilt / "tokenizer.json").unlink()
    message = refusal(spoilt, base, owned=False)
    for part in ("missing", "does not have", "wrong shapes", "not JSON", "tokenizer is missing"):
        assert part in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 128),
        ("num_hidden_layers", 3),
        ("num_key_value_heads", 1),
        ("vocab_size", 265),
        ("architectures", ["MistralForCausalLM"]),
        ("model_type", "mistral"),
        ("tie_word_embeddings", True),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_another_architecture_is_refused(key: str, value: Any, whole: Path, base: BaseSpec) -> None:
    edit_config(whole, {key: value})
    message = refusal(whole, base, owned=False)
    assert key in message
    assert "config.json" in message


@pytest.mark.parametrize(
    "change", [{"use_cache": False}, {"head_dim": None}, {"transformers_version": "4.53.0"}]
)
def test_settings_that_do_not_change_the_tensors_may_differ(
    change: dict[str, Any], whole: Path, base: BaseSpec
) -> None:
    edit_config(whole, change)
    verify(whole, base, owned=False)


def edit_config(directory: Path, change: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_nested_configuration_is_compared_too(whole: Path, checkpoints: Path) -> None:
    twin = Path(shutil.copytree(whole, whole.parent / "twin"))
    edit_config(whole, {"text_config": {"hidden_size": 64}})
    edit_config(twin, {"text_config": {"hidden_size": 32}})
    message = refusal(twin, BaseSpec.read(whole), owned=False)
    assert "text_config in config.json: hidden_size is 32, and 64 in the base" in message


def test_a_snapshot_without_a_tokenizer_is_refused_when_the_base_has_one(
    whole: Path, base: BaseSpec
) -> None:
    (whole / "tokenizer.json").unlink()
    assert "the tokenizer is missing" in refusal(whole, base, owned=False)
    (whole / "tokenizer.model").touch()  # another form of it will do
    verify(whole, base, owned=False)
    (whole / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json is missing" in refusal(whole, base, owned=False)


def test_computed_tables_of_old_checkpoints_do_not_count(whole: Path, base: BaseSpec) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        return tensors | {name: tensors[FINAL_NORM].float()}

    verify(change_tensors(whole, whole.parent / "old", change), base, owned=False)


def test_without_a_base_only_wholeness_counts(checkpoints: Path) -> None:
    verify(checkpoints / "missing_layer", None, owned=False)
    assert "truncated" in refusal(checkpoints / "truncated", None, owned=False)


# -- tied output heads ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``once``: a tied model as transformers saves it; ``twice``: with its head beside it."""
    root = tmp_path_factory.mktemp("tied")
    write_checkpoint(root / "once", seed=3, tie_word_embeddings=True)
    change_tensors(
        root / "once",
        root / "twice",
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    )
    return root


@pytest.mark.parametrize(
    ("snapshot", "base", "holder"),
    [("once", "twice", "the base"), ("twice", "once", "the snapshot")],
)
def test_a_tied_head_may_be_stored_once_or_twice(
    snapshot: str, base: str, holder: str, tied: Path
) -> None:
    verified = verify(tied / snapshot, BaseSpec.read(tied / base), owned=False)
    assert verified.notes == (
        f"only {holder} holds lm_head.weight; accepted: both config.json say "
        "tie_word_embeddings, so the embedding is the output head",
    )


def test_a_missing_head_is_refused_where_the_configuration_does_not_tie_it(
    checkpoints: Path, base: BaseSpec, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return {n: t for n, t in tensors.items() if n != "lm_head.weight"}

    headless = change_tensors(checkpoints / "whole", tmp_path / "headless", change)
    assert "tensors missing: lm_head.weight" in refusal(headless, base, owned=False)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tied: Path, tmp_path: Path) -> None:
    torn = change_tensors(
        tied / "twice", tmp_path / "torn", lambda t: t | {"lm_head.weight": t["lm_head.weight"] + 1}
    )
    manifest = Manifest.of_directory(torn, "run-1", 1, owned=False)
    message = refusal(torn, None, owned=False, manifest=manifest)
    assert "lm_head.weight differs from model.embed_tokens.weight" in message
    twice = Manifest.of_directory(tied / "twice", "run-1", 1, owned=False)
    verify(tied / "twice", None, owned=False, manifest=twice)


# -- owned: against the manifest, and nothing more -----------------------------------------------


def test_an_owned_snapshot_passes_as_it_was_sealed(whole: Path, base: BaseSpec) -> None:
    seal(whole)
    verify(whole, base, digests=True)


def test_an_owned_snapshot_without_its_manifest_is_refused(whole: Path, base: BaseSpec) -> None:
    assert ".complete: missing" in refusal(whole, base)


def add_file(snapshot: Path) -> None:
    (snapshot / "notes.txt").write_text("x")


def add_weights(snapshot: Path) -> None:
    shutil.copy(snapshot / SINGLE, snapshot / "consolidated.safetensors")


def remove_file(snapshot: Path) -> None:
    (snapshot / "tokenizer.json").unlink()


def lengthen_file(snapshot: Path) -> None:
    with (snapshot / "config.json").open("a") as file:
        file.write("\n")


def replace_weights(snapshot: Path) -> None:
    tensors = load_file(snapshot / SINGLE)
    norm = tensors.pop(FINAL_NORM)
    save_file(tensors | {"model.room.weight": norm}, snapshot / SINGLE)


def link_out(snapshot: Path) -> None:
    outside = snapshot.parent / "outside.json"
    shutil.copy(snapshot / "config.json", outside)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(outside)


def link_directory_out(snapshot: Path) -> None:
    (snapshot / "more").symlink_to(snapshot.parent)


def link_nowhere(snapshot: Path) -> None:
    (snapshot / "more").symlink_to("nothing")


def add_pipe(snapshot: Path) -> None:
    os.mkfifo(snapshot / "pipe")


CHANGED: dict[Callable[[Path], None], str] = {
    add_file: "the manifest does not list: notes.txt",
    add_weights: "consolidated.safetensors: weights beside the model's",
    remove_file: "files missing: tokenizer.json",
    lengthen_file: "config.json: 722 bytes instead of 721",
    replace_weights: "not as the manifest says: model.norm.weight, model.room.weight",
    link_out: "config.json: a link that leads out of the snapshot",
    link_directory_out: "more: a link that leads out of the snapshot",
    link_nowhere: "more: a link that leads nowhere",
    add_pipe: "pipe: neither a file nor a directory",
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_an_owned_snapshot_that_was_changed_is_refused(
    change: Callable[[Path], None], whole: Path, base: BaseSpec
) -> None:
    seal(whole)
    change(whole)
    assert CHANGED[change] in refusal(whole, base)


@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", 264.0), ("tie_word_embeddings", 0), ("hidden_size", "64")]
)
def test_a_setting_of_another_type_is_another_setting(
    key: str, value: object, whole: Path, base: BaseSpec
) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {key: value}))
    told = refusal(whole, base, owned=False)
    assert f"config.json: {key} is {value!r}, and {base.config[key]!r} in the base" in told


def test_a_link_in_the_place_of_an_owned_snapshot_is_refused(whole: Path, base: BaseSpec) -> None:
    seal(whole)
    link = whole.parent / "step_40"
    link.symlink_to(whole)
    assert "it is a link" in refusal(link, base)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, base: BaseSpec) -> None:
    assert "no such directory" in refusal(tmp_path / "step_1", base, owned=False)


def test_a_flipped_byte_is_found_and_its_tensor_named(whole: Path, base: BaseSpec) -> None:
    seal(whole)
    info = BaseSpec.read(whole).tensors["model.layers.1.mlp.up_proj.weight"]
    with (whole / SINGLE).open("r+b") as file:
        file.seek(info.start + 5)
        byte = file.read(1)[0]
        file.seek(info.start + 5)
        file.write(bytes([byte ^ 1]))
    verify(whole, base)  # headers and sizes are as they were
    message = refusal(whole, base, digests=True)
    assert "bytes are not those of the manifest: model.layers.1.mlp.up_proj.weight" in message


def test_a_snapshot_of_headers_alone_has_no_digests_to_check(whole: Path, base: BaseSpec) -> None:
    Manifest.of_directory(whole, "run-1", 1, verify="headers").write(whole)
    verify(whole, base)
    message = refusal(whole, base, digests=True)
    assert "sealed with --eval-verify headers: there are no digests to check" in message


# -- somebody else's directories -----------------------------------------------------------------


def test_a_hub_cache_made_of_links_may_be_adopted_and_not_owned(
    checkpoints: Path, base: BaseSpec, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for file in (checkpoints / "whole").iterdir():
        shutil.copy(file, tmp_path / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    manifest = Manifest.of_directory(snapshot, "run-1", 0, owned=False)
    verify(snapshot, base, owned=False, manifest=manifest)
    assert manifest.digest == Manifest.of_directory(checkpoints / "whole", "run-2", 7).digest
    seal(snapshot)
    assert "leads out of the snapshot" in refusal(snapshot, base)


def test_whatever_lies_beside_an_adopted_checkpoint_is_left_alone(
    whole: Path, base: BaseSpec
) -> None:
    add_file(whole)
    add_pipe(whole)
    link_nowhere(whole)
    verify(whole, base, owned=False)


# -- the base itself -----------------------------------------------------------------------------


def test_a_base_of_pickles_alone_is_refused_with_a_remedy(whole: Path) -> None:
    (whole / SINGLE).rename(whole / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*whole: .*\.bin.*save_pretrained"):
        BaseSpec.read(whole)


def test_a_base_without_a_configuration_is_refused(whole: Path) -> None:
    (whole / "config.json").unlink()
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*config\.json: missing"):
        BaseSpec.read(whole)


def test_a_sharded_snapshot_equals_an_unsharded_base(base: BaseSpec, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", seed=5)
    (sharded / SINGLE).unlink()
    make_model(5).save_pretrained(sharded, max_shard_size=70_000)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    seal(sharded)
    verify(sharded, base, digests=True)
    assert Manifest.read(sharded).num_bytes == sum(
        path.stat().st_size for path in sharded.glob("*.safetensors")
    )


def test_the_manifest_is_no_part_of_what_it_lists(whole: Path) -> None:
    assert FILE not in seal(whole).files
