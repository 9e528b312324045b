"""Runs every benchmark, one after the other, and writes figures, pictures and tables.

``python -m bench.suite [NAME ...]``: what ``make bench`` does. Each runs in a process of its own,
under a limit: one that fails or hangs costs its own figures, and the older ones of its name stay.
Status 1 when any has failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cli import BENCHMARKS
from bench.tables import write_tables

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

#: Benchmark → its arguments: shorter than by default, so that all take some fifteen minutes.
SUITE: Mapping[str, Sequence[str]] = {
    "dispatch": ("--points", "1000"),
    "trace": ("--points", "2000"),
    "scale": (),
    "stall": ("--gigabytes", "1", "--seconds", "30", "--points", "3"),
    "interference": ("--rounds", "5"),
    "tracing": (),
    "runner": ("--repeat", "7"),
    "latency": ("--gigabytes", "0.2", "--points", "6"),
    "ray": ("--gigabytes", "2", "--repeat", "1", "--points", "500"),
    "pin": ("--engines", "1", "2", "--gigabytes", "0.5", "--repeat", "5"),
}
LIMIT_S = 300.0
_GRACE_S = 30.0


def run_one(name: str, arguments: Sequence[str], results: Path, limit_s: float) -> str | None:
    """Run one benchmark; what is wrong with how it ended, or ``None``."""
    targets = ("--json", str(results / f"{name}.json"), "--png", str(results / f"{name}.png"))
    argv = [sys.executable, "-m", "bench", name, *arguments, *targets]
    with subprocess.Popen(argv, cwd=ROOT) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # it leaves through its own clean-up
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return f"took more than {limit_s:g} s"
        except BaseException:
            process.terminate()
            raise
    return None if status == 0 else f"ended with status {status}"


def run_suite(suite: Mapping[str, Sequence[str]], results: Path, limit_s: float) -> dict[str, str]:
    """Run them all; name → what is wrong, of those that failed."""
    results.mkdir(parents=True, exist_ok=True)
    failures = {}
    for number, (name, arguments) in enumerate(suite.items(), 1):
        print(f"\n[{number}/{len(suite)}] {name} {' '.join(arguments)}", flush=True)
        begun = time.monotonic()
        problem = run_one(name, arguments, results, limit_s)
        if problem is not None:
            failures[name] = problem
        print(f"{name}: {problem or 'fine'}, after {time.monotonic() - begun:.0f} s", flush=True)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite, or the benchmarks that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="of each, in s")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"{unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}")
    chosen = {name: SUITE[name] for name in args.names or SUITE}
    failures = run_suite(chosen, args.results, args.limit)
    if args.results == RESULTS:
        write_tables(ROOT, RESULTS)
    for name, problem in failures.items():
        print(f"bench.suite: {name} {problem}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
