"""The manifest of a snapshot: what is in it, and the digests that name its content.

It is the file ``.complete`` inside the snapshot, written last: a directory with a sound manifest
was finished. :func:`combined_digest` is what a snapshot and an engine must agree on.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import orjson
from blake3 import blake3

from vime.eval.contracts import Content
from vime.eval.snapshot.files import (
    json_object,
    list_files,
    read_small_file,
    write_new,
)
from vime.eval.snapshot.pages import CHUNK_BYTES, Pages, digest_of
from vime.eval.snapshot.stamps import FULL, MODES, stamps
from vime.eval.snapshot.weights import DTYPES, TensorInfo, read_weights

FILE = ".complete"
SCHEMA = 1

MAX_BYTES = 256 << 20
"""A manifest larger than this (about a million tensors) is refused unread."""

_MAX_COUNT = 2**63 - 1
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A ``.complete`` file that is no sound manifest: missing, torn, foreign or crafted."""


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor: its safetensors dtype, shape, digest and file, and whether it holds a NaN.

    The digest is the BLAKE3 of its raw bytes, or its stamp where the manifest says so. Where nobody
    has looked for NaNs, ``with_nan`` is ``None``.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str
    with_nan: bool | None = None


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: its size in bytes, and the BLAKE3 of its content (weight files have none)."""

    size: int
    digest: str | None


@dataclass(frozen=True)
class Manifest:
    """What a snapshot holds.

    Attributes:
        run_id: the run that wrote it.
        rollout_id: the training step whose weights they are.
        digest: :func:`combined_digest` of ``tensors``.
        tensors: name → what it is.
        files: path within the snapshot → what it is; the manifest itself is not among them.
        verify: what the tensors' digests are made of, one of
            :data:`vime.eval.snapshot.stamps.MODES`.
    """

    run_id: str
    rollout_id: int
    digest: str
    tensors: Mapping[str, ManifestTensor]
    files: Mapping[str, ManifestFile]
    verify: str = FULL

    @property
    def weight_version(self) -> str:
        """``{run_id}:{rollout_id}:{digest[:12]}``."""
        return f"{self.run_id}:{self.rollout_id}:{self.digest[:12]}"

    @property
    def num_bytes(self) -> int:
        """Size of the weight files in bytes."""
        return sum(self.files[name].size for name in {t.file for t in self.tensors.values()})

    @property
    def with_nan(self) -> tuple[str, ...] | None:
        """The tensors that hold a NaN; ``None`` where none is known, and not all were looked at."""
        found = tuple(name for name, tensor in self.tensors.items() if tensor.with_nan)
        all_seen = all(tensor.with_nan is not None for tensor in self.tensors.values())
        return found if found or all_seen else None

    @classmethod
    def of_directory(
        cls,
        directory: Path,
        run_id: str,
        rollout_id: int,
        *,
        owned: bool = True,
        known: Mapping[str, str | Content] | None = None,
        verify: str = FULL,
    ) -> Manifest:
        """Read a checkpoint through, and describe it.

        Args:
            directory: the checkpoint.
            run_id: which run wants it; see :func:`check_run_id`.
            rollout_id: the training step.
            owned: vime had it written: every file in it counts. Of somebody else's directory
                only the weights do.
            known: tensor → content, or hexadecimal BLAKE3, of those that whoever wrote them has
                looked at; only the others are read.
            verify: ``headers`` leaves the weights unread.

        Raises:
            vime.eval.snapshot.weights.WeightsError: its weight files are not whole.
            OSError: a file cannot be read.
        """
        infos = read_weights(directory, alone=owned)
        tensors = name_tensors(directory, infos, verify, known or {})
        weight_files = {info.file for info in infos.values()}
        sizes = {name: (directory / name).stat().st_size for name in weight_files}
        if owned:
            sizes |= list_files(directory)[0]
        sizes.pop(FILE, None)
        files = {
            name: ManifestFile(size, None if name in weight_files else digest_of(directory / name))
            for name, size in sorted(sizes.items())
        }
        return cls(run_id, rollout_id, combined_digest(tensors), tensors, files, verify)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a snapshot directory.

        Raises:
            ManifestError: there is none, or it is not sound.
        """
        try:
            content = read_small_file(directory / FILE, MAX_BYTES, follow_link=False)
        except ValueError as error:
            raise ManifestError(str(error)) from None
        return cls.parse(content)

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """Decode a manifest, believing nothing: types, names, sizes and digests are checked.

        Raises:
            ManifestError: says what is wrong with it.
        """
        try:
            fields = json_object(content, FILE, unique=True)
            schema = fields.get("schema")
            _expect(type(schema) is int and schema == SCHEMA, "schema", schema)
            verify = fields.get("verify", FULL)
            _expect(verify in MODES, "verify", verify)
            tensors = {n: _tensor(n, e) for n, e in _object(fields, "tensors").items()}
            weight_files = {tensor.file for tensor in tensors.values()}
            files = {
                name: _file(name, entry, holds_tensors=name in weight_files)
                for name, entry in _object(fields, "files").items()
            }
            manifest = cls(
                run_id=_run_id(fields.get("run_id")),
                rollout_id=_rollout_id(fields.get("rollout_id")),
                digest=_digest("digest", fields.get("digest")),
                tensors=tensors,
                files=files,
                verify=str(verify),
            )
        except ValueError as error:
            raise ManifestError(str(error)) from None
        manifest._check_sums(fields.get("weight_version"))
        return manifest

    def _check_sums(self, weight_version: object) -> None:
        """The parts must agree: a torn or edited manifest is none."""
        homeless = sorted(n for n, t in self.tensors.items() if t.file not in self.files)
        if homeless:
            raise ManifestError(f"{FILE}: {homeless[0]} is in a file that it does not list")
        if combined_digest(self.tensors) != self.digest:
            raise ManifestError(f"{FILE}: its digest is not that of its tensors")
        if weight_version != self.weight_version:
            raise ManifestError(
                f"{FILE}: weight_version is {weight_version!r}; expected {self.weight_version!r}"
            )

    def encode(self) -> bytes:
        """The content of the manifest's file."""
        fields = {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "rollout_id": self.rollout_id,
            "weight_version": self.weight_version,
            "digest": self.digest,
            "verify": self.verify,
            "tensors": dict(sorted(self.tensors.items())),
            "files": dict(sorted(self.files.items())),
        }
        return orjson.dumps(fields, option=orjson.OPT_INDENT_2)

    def write(self, directory: Path) -> None:
        """Write the manifest into its snapshot, where there must be none yet.

        Raises:
            OSError: it exists, or the disk is full.
        """
        write_new(directory / FILE, [self.encode()])


def combined_digest(tensors: Mapping[str, Any]) -> str:
    """One digest of all tensors: whoever holds the same names, types, shapes and bytes has it.

    Args:
        tensors: name → anything with ``dtype`` (as safetensors writes it), ``shape`` (a sequence
            of ints) and ``digest`` (hexadecimal BLAKE3 of the raw bytes).

    Returns:
        Hexadecimal BLAKE3 over one JSON array ``[name, dtype, shape, digest]`` and a line feed a
        tensor, sorted by name.
    """
    hasher = blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        line = [name, tensor.dtype, list(tensor.shape), tensor.digest]
        hasher.update(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    return hasher.hexdigest()


def name_tensors(
    directory: Path,
    infos: Mapping[str, TensorInfo],
    verify: str,
    known: Mapping[str, str | Content],
) -> dict[str, ManifestTensor]:
    """Every tensor with its content, or with its stamp; raises as :func:`digest_tensors`."""
    if verify == FULL:
        contents = {n: c if isinstance(c, Content) else Content(c) for n, c in known.items()}
        return digest_tensors(directory, infos, contents, nans=True)
    return {
        name: ManifestTensor(infos[name].dtype, infos[name].shape, stamp, infos[name].file)
        for name, stamp in sorted(stamps(directory, infos).items())
    }


def digest_tensors(
    directory: Path,
    infos: Mapping[str, TensorInfo],
    known: Mapping[str, Content] = MappingProxyType({}),
    *,
    nans: bool = False,
) -> dict[str, ManifestTensor]:
    """Digest every tensor's bytes, file by file in the order in which they lie there.

    Tensors whose content is ``known`` are not read. NaNs are looked for where ``nans`` says so.

    Reading and hashing release the interpreter lock, and go through one small buffer: mapping
    the files would turn a disk's read error into a signal that kills the process.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is shorter than its header said, or has vanished.
    """
    by_file: dict[str, list[tuple[int, str]]] = {}
    for name, info in infos.items():
        if name not in known:
            by_file.setdefault(info.file, []).append((info.start, name))
    contents = dict(known)
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        for file_name, spans in sorted(by_file.items()):
            with Pages(directory / file_name, buffer) as pages:
                for start, name in sorted(spans):
                    dtype = infos[name].dtype if nans else None
                    contents[name] = pages.inspect(start, infos[name].end, dtype)
    return {name: _entry(info, contents[name]) for name, info in sorted(infos.items())}


def _entry(info: TensorInfo, content: Content) -> ManifestTensor:
    return ManifestTensor(info.dtype, info.shape, content.digest, info.file, content.with_nan)


def check_run_id(run_id: object) -> str:
    """``run_id``, when it may be part of a file's name and of a weight version.

    Raises:
        ValueError: it is no string of 1 to 128 letters, digits, ``.``, ``_`` and ``-`` that
            begins with a letter or digit.
    """
    if type(run_id) is not str or not _RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"run_id={run_id!r}: expected 1 to 128 letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit"
        )
    return run_id


def _run_id(value: object) -> str:
    try:
        return check_run_id(value)
    except ValueError as error:
        raise ManifestError(f"{FILE}: {error}") from None


def _rollout_id(value: object) -> int:
    _expect(type(value) is int and abs(value) <= _MAX_COUNT, "rollout_id", value)
    assert type(value) is int
    return value


def _tensor(name: str, entry: object) -> ManifestTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "digest": digest, "file": file, **others}:
            _expect(dtype in DTYPES, f"the dtype of {name}", dtype)
            _expect(all(map(_is_count, shape)), f"the shape of {name}", shape)
            _expect("/" not in _safe_name(file), f"the file of {name}", file)
            with_nan = others.get("with_nan")
            _expect(with_nan is None or type(with_nan) is bool, f"with_nan of {name}", with_nan)
            assert with_nan is None or type(with_nan) is bool
            digest = _digest(f"the digest of {name}", digest)
            return ManifestTensor(dtype, tuple(shape), digest, file, with_nan)
    raise ValueError(f"{FILE}: the entry of the tensor {name} makes no sense")


def _file(name: str, entry: object, *, holds_tensors: bool) -> ManifestFile:
    _safe_name(name)
    what = f"the digest of {name}"
    match entry:
        case {"size": size, "digest": digest}:
            _expect(_is_count(size), f"the size of {name}", size)
            assert type(size) is int
            if holds_tensors:  # each of them has its own
                _expect(digest is None, what, digest)
                return ManifestFile(size, None)
            return ManifestFile(size, _digest(what, digest))
    raise ValueError(f"{FILE}: the entry of the file {name} makes no sense")


def _safe_name(name: object) -> str:
    """A path that stays within the snapshot, in its one normal form."""
    sound = (
        type(name) is str
        and name != FILE
        and "\0" not in name
        and str(PurePosixPath(name)) == name
        and not PurePosixPath(name).is_absolute()
        and not {"..", "."} & set(PurePosixPath(name).parts or ("..",))
    )
    _expect(sound, "a file's name", name)
    assert type(name) is str
    return name


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _digest(what: str, value: object) -> str:
    _expect(type(value) is str and _DIGEST.fullmatch(value) is not None, what, value)
    assert type(value) is str
    return value


def _object(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    _expect(type(value) is dict and bool(value), key, type(value).__name__)
    assert type(value) is dict
    return value


def _expect(sound: bool, what: str, value: object) -> None:
    if not sound:
        raise ValueError(f"{FILE}: {what} is {value!r}, which no manifest of vime holds")
