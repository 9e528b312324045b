"""``python -m bench.chaos``: a run full of faults, and the proof that it told nothing wrong.

Statuses: 0 fine, 1 something that must be none was found, 2 bad usage, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.chaos import private
from bench.chaos.faults import (
    KINDS,
    NEED_ROOM,
    NUM_SHORT_POINTS,
    draw_schedule,
    draw_short_schedule,
)

FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description="Breaks engines, router, runner, snapshots and disk of a real run, by a "
        "seeded schedule, and recomputes every score that it reports.",
        epilog="faults:\n" + "\n".join(f"  {name:<12} {k.what}" for name, k in KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="of schedule and weights; drawn if absent")
    parser.add_argument("--points", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND",
        help="faults to draw from, each at least once; see below",
    )  # fmt: skip
    parser.add_argument("--min-engines", type=int, help="--eval-min-engines of the run")
    parser.add_argument(
        "--kills", type=int, default=2,
        help="further runs that are killed as a whole, in a drawn order; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--cold-engines", type=int, default=2,
        help="scores that are recomputed by a cold engine too; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--short", action="store_true",
        help=f"{NUM_SHORT_POINTS} points with three faults, then the kill of all: about a minute",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the evidence there")
    args = parser.parse_args(argv)
    if args.keep is not None and args.keep.exists():
        parser.error(f"--keep {args.keep}: it exists; name a new directory")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1_000_000)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, audit, print; returns the status."""
    args = parse(argv)
    refusal = private.enter()  # before anything starts a thread
    try:
        if args.short:
            schedule = draw_short_schedule(args.seed)
        else:
            schedule = draw_schedule(
                args.seed, args.points, NEED_ROOM if refusal else (), args.only
            )
    except ValueError as error:
        sys.stderr.write(f"python -m bench.chaos: {error}\n")
        return USAGE_ERROR
    from bench.chaos.auditor import Auditor
    from bench.chaos.report import print_report

    # A short path: sockets below it have names of their own.
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    auditor = Auditor(root, args.seed, schedule, refusal, args.min_engines)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        report = auditor.short() if args.short else auditor.long(
            args.points, args.kills, args.cold_engines
        )  # fmt: skip
        print_report(report)
        return 0 if report.passed else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        auditor.close()
        if args.keep is not None:  # also of a run that was interrupted
            auditor.copy_evidence(args.keep)
        shutil.rmtree(root, ignore_errors=True)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """End in an orderly way, once; the driver ends with this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
