"""``trace``: what a transition costs, and how fast a trace is replayed, checked and counted.

The trace is that of a run as it is written: points, snapshots and engines through their real
machines, into a real file. Baselines: one bare ``write`` of a line as long, and one bare decoding
of the same lines. ``vime trace stats`` reads a trace of its own, a long one, in a process of its
own, whose start and greatest memory count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from bench.cli import positive
from bench.figures import Report
from bench.scratch import scratch
from vime.fsm.check import check
from vime.fsm.machine import TracedMachine
from vime.fsm.read import TraceFile
from vime.fsm.record import Record
from vime.fsm.replay import replay
from vime.fsm.tables import ENGINE, POINT, SNAPSHOT
from vime.fsm.trace import Trace

_RECORDS_A_POINT = 13


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--points", type=positive, default=5000, metavar="N",
        help="points in the trace, of 13 records each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive, default=5, metavar="N",
        help="readings of the trace (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--records", type=positive, default=1_000_000, metavar="N",
        help="records of the long trace that stats reads (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    report = Report("trace")
    with scratch() as places:
        path = places.disk / "trace.jsonl"
        transitions = _write(path, args.points)
        report.add("vime", "transition", "µs", transitions)
        lines = path.read_bytes().splitlines(keepends=True)
        report.add("bare", "write", "µs", _bare_writes(places.disk / "bare.jsonl", lines))
        rates: dict[str, list[float]] = {"vime/replay": [], "vime/check": [], "bare/decode": []}
        for _ in range(1 + args.repeat):  # the first is the warm-up
            for name, read in _readers(path).items():
                rates[name].append(_rate(read, len(lines)))
        path.unlink()
        num_points = max(args.records // _RECORDS_A_POINT, 1)
        _write(path, num_points)
        seconds, peak_mb = _stats(path)
    for name, samples in rates.items():
        subject, _, what = name.partition("/")
        report.add(subject, what, "records/s", samples[1:])
    num_records = num_points * _RECORDS_A_POINT
    report.add("vime", "stats", "records/s", [num_records / seconds])
    report.add("vime", "stats_memory", "MB", [peak_mb])
    p50 = {name: figure.p50 for name, figure in report.figures.items()}
    report.ratios = {
        "transition_over_write": p50["vime/transition"] / p50["bare/write"],
        "replay_over_decode": p50["vime/replay"] / p50["bare/decode"],
        "check_over_decode": p50["vime/check"] / p50["bare/decode"],
        "stats_of_a_million_s": 1e6 * seconds / num_records,
    }
    report.notes.append(
        f"the trace: {len(lines)} records of {_mean_length(lines):.0f} bytes; the long one: "
        f"{num_records} records"
    )
    return report


def _mean_length(lines: list[bytes]) -> float:
    return sum(map(len, lines)) / len(lines)


def _write(path: Path, num_points: int) -> list[float]:
    """Write the trace of a run; returns the µs of each transition, without the first tenth."""
    took: list[float] = []

    def fire(machine: TracedMachine, trigger: str, **facts: Any) -> Record:
        began = time.perf_counter_ns()
        record = machine.fire(trigger, **facts)
        took.append((time.perf_counter_ns() - began) / 1e3)
        return record

    with Trace(path, "bench") as trace:
        engine = TracedMachine(ENGINE, "engine_0", trace)
        fire(engine, "start")
        fire(engine, "ready", weight_version="default")
        for number in range(num_points):
            _live(trace, engine, number, fire)
        fire(engine, "stop")
    return took[len(took) // 10 :]


def _live(trace: Trace, engine: TracedMachine, number: int, fire: Callable[..., Record]) -> None:
    """One point from its dispatch to its score, with the facts that a run writes."""
    version = f"bench:{number}:{number:012x}"
    point = TracedMachine(POINT, str(number), trace)
    snapshot = TracedMachine(SNAPSHOT, f"step_{number}", trace)
    admitted = {"force": False, "hf_dir": None, "max_in_flight": 2, "pending": 0}
    fire(point, "dispatch", detail={**admitted, "policy": "backpressure"})
    cause = fire(point, "export")
    fire(snapshot, "write", cause_seq=cause.seq)
    fire(snapshot, "seal", weight_version=version, detail={"write_s": 0.1, "digest_s": 0.1})
    fire(snapshot, "verify", weight_version=version, detail={"num_tensors": 100, "notes": []})
    fire(snapshot, "lease", weight_version=version)
    fire(point, "pin", weight_version=version)
    fire(engine, "pin", weight_version=version)
    evidence = {"digest": "0" * 64, "ranks": 1, "token": 7, "logprob": -1.5}
    cause = fire(engine, "serve", weight_version=version, detail=evidence)
    fire(
        point, "run", weight_version=version, cause_seq=cause.seq, detail={"engines": ["engine_0"]}
    )
    metrics = {"eval/sums": 0.5, "eval/step": float(number), "eval/lag_steps": 1.0}
    fire(
        point, "finish", weight_version=version,
        detail={"metrics": metrics, "duration_s": 4.2, "stall_s": 0.01, "lag_steps": 1},
    )  # fmt: skip
    fire(snapshot, "leave", weight_version=version)
    fire(snapshot, "delete", weight_version=version)


def _bare_writes(path: Path, lines: list[bytes]) -> list[float]:
    """µs of one ``write`` a line."""
    took = []
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        for line in lines:
            began = time.perf_counter_ns()
            os.write(descriptor, line)
            took.append((time.perf_counter_ns() - began) / 1e3)
    finally:
        os.close(descriptor)
    return took[len(took) // 10 :]


def _readers(path: Path) -> dict[str, Callable[[], object]]:
    return {
        "vime/replay": lambda: _replay(path),
        "vime/check": lambda: _check(path),
        "bare/decode": lambda: sum(1 for _ in _decoded(path)),
    }


def _replay(path: Path) -> None:
    _, divergence = replay(TraceFile(path))
    assert divergence is None, f"the trace replays to its own states: {divergence}"


def _check(path: Path) -> None:
    violations = list(check(TraceFile(path), ended=True))
    assert not violations, f"the trace of a sound run: {violations[0]}"


_STATS = """
import sys
from vime.cli import main
status = main(["trace", "stats", sys.argv[1]])
with open("/proc/self/status") as file:
    print(next(line for line in file if line.startswith("VmHWM:")), file=sys.stderr)
sys.exit(status)
"""


def _stats(path: Path) -> tuple[float, float]:
    """Seconds of the whole command, and its greatest memory in MB.

    The process says by itself what its greatest memory was: what the system tells its parent
    counts what the parent had when it forked.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _STATS, str(path)], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - began
    kilobytes = next(
        line.split()[1] for line in done.stderr.splitlines() if line.startswith("VmHWM:")
    )
    return seconds, int(kilobytes) * 1024 / 1e6


def _decoded(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            yield orjson.loads(line)


def _rate(read: Callable[[], object], num_records: int) -> float:
    """Records a second."""
    began = time.perf_counter()
    read()
    return num_records / (time.perf_counter() - began)
