"""``vime snapshot verify``: says whether a directory is a whole checkpoint, and what is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.fsm.text import clean
from vime.trace_cli.common import UsageError, a_path, write_json

WHOLE, NOT_WHOLE = 0, 1


@dataclass
class Finding:
    """What was found out about one directory.

    Attributes:
        path: the directory.
        problems: one sentence for each fault; none when it is whole.
        notes: what a reader may want to know besides.
        num_tensors, num_bytes: of a whole one.
        weight_version, digest: as its manifest says, where vime wrote it.
    """

    path: Path
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_bytes: int = 0
    weight_version: str | None = None
    digest: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything, as one JSON object."""
        return {"whole": not self.problems, **vars(self), "path": str(self.path)}


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime snapshot verify``."""
    parser.add_argument(
        "directory", type=a_path, metavar="DIR", help="a Hugging Face checkpoint, vime's or not"
    )
    parser.add_argument(
        "--against",
        type=a_path,
        metavar="BASE",
        help="a checkpoint that it must look like: names, shapes, dtypes, configuration, tokenizer",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not read the weights through; their digests stay unchecked",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify, and print; status 1 when the directory is no whole checkpoint."""
    directory = Path(args.directory)
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise UsageError(f"{directory}: {what}; expected a Hugging Face checkpoint")
    finding = examine(directory, args.against, digests=not args.quick)
    if args.json:
        write_json(finding.as_json())
    else:
        sys.stdout.writelines(f"{clean(line)}\n" for line in _lines(finding))
    return NOT_WHOLE if finding.problems else WHOLE


def examine(directory: Path, against: str | Path | None, *, digests: bool) -> Finding:
    """Verify a directory; one that has a manifest must be exactly what that says.

    Args:
        directory: it exists.
        against: the base that it must look like, if any.
        digests: read all its bytes, and compare them with the manifest's digests.

    Raises:
        UsageError: the base itself cannot be used.
    """
    from vime.eval.snapshot.base import BaseSpec
    from vime.eval.snapshot.manifest import FILE, Manifest, ManifestError
    from vime.eval.snapshot.side_files import unreadable_json
    from vime.eval.snapshot.verify import SnapshotInvalid, verify

    try:
        base = None if against is None else BaseSpec.read(Path(against))
    except (ValueError, OSError) as error:
        message = str(error).replace("--hf-checkpoint", "--against", 1)
        raise UsageError(message) from error
    finding = Finding(directory)
    owned = os.path.lexists(directory / FILE)
    if owned:
        try:
            manifest = Manifest.read(directory)
            finding.weight_version, finding.digest = manifest.weight_version, manifest.digest
        except (ManifestError, OSError):
            pass  # the verifier says what is wrong with it, among the rest
    else:
        finding.notes.append(f"no {FILE}: vime did not write it; there are no digests to compare")
    try:
        verified = verify(directory, base, owned=owned, digests=digests)
    except SnapshotInvalid as error:
        finding.problems = error.problems
    except OSError as error:
        finding.problems = [f"cannot be read: {error.strerror or error}"]
    else:
        finding.num_tensors, finding.num_bytes = len(verified.tensors), verified.num_bytes
        finding.notes += verified.notes
    known = {problem.partition(":")[0] for problem in finding.problems}
    finding.problems = [
        *finding.problems,
        *(p for p in unreadable_json(directory) if p.partition(":")[0] not in known),
    ]
    return finding


def _lines(finding: Finding) -> list[str]:
    if finding.problems:
        head = f"{finding.path}: not whole, {len(finding.problems)} problem(s)"
        return [head, *(f"  {problem}" for problem in finding.problems)]
    named = "" if finding.weight_version is None else f", {finding.weight_version}"
    size = f"{finding.num_tensors} tensors, {finding.num_bytes / 2**20:.1f} MiB"
    return [f"{finding.path}: whole: {size}{named}", *(f"  {note}" for note in finding.notes)]
