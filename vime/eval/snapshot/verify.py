"""The verifier: says whether a directory is a whole checkpoint of the model that is trained.

It reads headers and small files only; the tensors' bytes are read once, when they are digested
(:meth:`vime.eval.snapshot.manifest.Manifest.of_directory`). Whether the numbers in them are sane
(a NaN, say) is for the probe of the engine that loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.eval.snapshot.base import (
    TOKENIZER_CONFIG,
    BaseSpec,
    has_tokenizer_config,
    has_vocabulary,
    loadable,
    read_config,
)
from vime.eval.snapshot.compare import (
    config_problems,
    dtype_problems,
    named,
    tensor_problems,
    tied_head,
    untied_problems,
)
from vime.eval.snapshot.files import list_files
from vime.eval.snapshot.manifest import (
    FILE,
    Manifest,
    ManifestError,
    ManifestTensor,
    digest_tensors,
)
from vime.eval.snapshot.pages import digest_of
from vime.eval.snapshot.side_files import irregular_files
from vime.eval.snapshot.stamps import FULL
from vime.eval.snapshot.weights import TensorInfo, WeightsError, read_weights

EXPORTER = "vime.eval.snapshot.export.TransformersExporter"


class SnapshotInvalid(ValueError):
    """A directory is no whole checkpoint of the trained model.

    Attributes:
        directory: which one.
        problems: one sentence for each fault.
    """

    def __init__(self, directory: Path, problems: list[str]) -> None:
        super().__init__(f"{directory.name}: {'; '.join(problems)}")
        self.directory = directory
        self.problems = problems


@dataclass(frozen=True)
class Verified:
    """What the verifier found in a directory that passed.

    Attributes:
        tensors: name → what it is.
        num_bytes: size of the tensors.
        notes: decisions that a reader of the trace may want to know.
    """

    tensors: Mapping[str, TensorInfo]
    num_bytes: int
    notes: tuple[str, ...]

    def detail(self, path: Path, manifest: Manifest, base: BaseSpec | None) -> dict[str, Any]:
        """Facts for the trace."""
        return {
            "path": str(path),
            "digest": manifest.digest,
            "num_tensors": len(manifest.tensors),
            "num_bytes": manifest.num_bytes,
            "base": None if base is None else str(base.directory),
            "notes": list(self.notes),
        }


def verify(
    directory: Path,
    against: BaseSpec | None,
    *,
    manifest: Manifest | None = None,
    owned: bool = True,
    digests: bool = False,
    allow_cast: bool = False,
) -> Verified:
    """Check a checkpoint directory.

    Args:
        directory: the checkpoint.
        against: the base that it must look like; ``None`` checks that it is whole, no more.
        manifest: what it must hold; of an owned one, its own ``.complete`` if absent.
        owned: vime had it written: it must be a real directory with a manifest, with nothing in
            it but what the manifest says. Somebody else's may hold whatever it likes beside a
            checkpoint, and links (the Hugging Face cache is made of links).
        digests: read all the bytes, and check them against the manifest's digests.
        allow_cast: other dtypes than the base's are noted instead of refused; engines cast.

    Raises:
        SnapshotInvalid: with every fault that was found.
    """
    problems = _directory_problems(directory, owned)
    notes: list[str] = []
    if not problems:
        if owned and manifest is None:
            manifest = _own_manifest(directory, problems)
        if owned and manifest is not None:
            problems += _file_problems(directory, manifest)
        problems += irregular_files(directory)
        tensors = _tensors(directory, owned, problems)
        config = _config(directory, problems)
        if manifest is not None and tensors is not None:
            problems += _manifest_problems(directory, tensors, manifest, digests)
        if manifest is not None and config is not None:
            problems += untied_problems(manifest.tensors, config)
        if against is not None:
            problems += _base_problems(tensors, config, against, allow_cast, notes)
            problems += _tokenizer_problems(directory, against)
    if problems:
        raise SnapshotInvalid(directory, list(dict.fromkeys(problems)))
    assert tensors is not None
    return Verified(tensors, sum(t.num_bytes for t in tensors.values()), tuple(notes))


def _directory_problems(directory: Path, owned: bool) -> list[str]:
    if owned and directory.is_symlink():
        return [f"it is a link, to {directory.readlink()}; a real directory was expected"]
    if not directory.is_dir():
        return ["no such directory"]
    return []


def _own_manifest(directory: Path, problems: list[str]) -> Manifest | None:
    try:
        return Manifest.read(directory)
    except ManifestError as error:
        problems.append(str(error))
        return None


def _file_problems(directory: Path, manifest: Manifest) -> list[str]:
    """What lies there against what the manifest lists: nothing more, nothing less."""
    found, problems = list_files(directory)
    found.pop(FILE, None)
    listed = {name: file.size for name, file in manifest.files.items()}
    missing, extra = listed.keys() - found.keys(), found.keys() - listed.keys()
    if missing:
        problems.append(f"files missing: {named(missing)}")
    if extra:
        problems.append(f"files that the manifest does not list: {named(extra)}")
    problems += [
        f"{name}: {found[name]} bytes instead of {listed[name]}"
        for name in sorted(listed.keys() & found.keys())
        if found[name] != listed[name]
    ]
    return problems


def _tensors(directory: Path, owned: bool, problems: list[str]) -> dict[str, TensorInfo] | None:
    try:
        return read_weights(directory, alone=owned)
    except WeightsError as error:
        problems += error.problems
        return None


def _config(directory: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        return read_config(directory)
    except ValueError as error:
        problems.append(str(error))
        return None


def _manifest_problems(
    directory: Path, tensors: Mapping[str, TensorInfo], manifest: Manifest, digests: bool
) -> list[str]:
    def layout(entries: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], str]]:
        return {name: (e.dtype, e.shape, e.file) for name, e in entries.items()}

    is_now, was = layout(tensors), layout(manifest.tensors)
    changed = [n for n in is_now.keys() | was.keys() if is_now.get(n) != was.get(n)]
    if changed:
        return [f"tensors that are not as the manifest says: {named(changed)}"]
    if digests and manifest.verify != FULL:
        return [f"sealed with --eval-verify {manifest.verify}: there are no digests to check"]
    return _digest_problems(directory, tensors, manifest) if digests else []


def _digest_problems(
    directory: Path, tensors: Mapping[str, TensorInfo], manifest: Manifest
) -> list[str]:
    known = {name: file.digest for name, file in manifest.files.items() if file.digest is not None}
    try:
        fresh = digest_tensors(directory, tensors, nans=manifest.with_nan is not None)
        files = {n: digest_of(directory / n) for n in known if (directory / n).is_file()}
    except (OSError, ValueError) as error:
        return [f"cannot be read through: {error}"]
    changed = {
        "tensors": [n for n, t in fresh.items() if not _agree(t, manifest.tensors[n])],
        "files": [name for name, digest in files.items() if digest != known[name]],
    }
    return [
        f"{what} whose bytes are not those of the manifest: {named(names)}"
        for what, names in changed.items()
        if names
    ]


def _agree(found: ManifestTensor, told: ManifestTensor) -> bool:
    """Whether the bytes are those that the manifest tells of, as far as it does."""
    return found.digest == told.digest and told.with_nan in (None, found.with_nan)


def _base_problems(
    tensors: dict[str, TensorInfo] | None,
    config: dict[str, Any] | None,
    base: BaseSpec,
    allow_cast: bool,
    notes: list[str],
) -> list[str]:
    problems = [] if config is None else config_problems(config, base.config)
    if tensors is None:
        return problems
    mine = loadable(tensors)
    head, decision = tied_head(mine, base.tensors, config or {}, base.config)
    if decision is not None:
        notes.append(decision)
    problems += tensor_problems(mine, base.tensors, head)
    casts = dtype_problems(mine, base.tensors)
    if allow_cast:
        notes += [f"an engine will cast: {cast}" for cast in casts]
    else:
        remedy = f'export in the dtype of the base: {EXPORTER}(model, tokenizer, dtype="…")'
        problems += [f"wrong dtype: {cast}; {remedy}" for cast in casts]
    return problems


def _tokenizer_problems(directory: Path, base: BaseSpec) -> list[str]:
    """Without its tokenizer a checkpoint can be loaded, and cannot be asked anything."""
    problems = []
    if base.has_vocabulary and not has_vocabulary(directory):
        problems.append(
            "the tokenizer is missing (tokenizer.json or the like), and the base has one: pass "
            "the tokenizer along with the model, or save it in the export"
        )
    elif base.has_tokenizer_config and not has_tokenizer_config(directory):
        problems.append(f"{TOKENIZER_CONFIG} is missing, and the base has one")
    return problems
