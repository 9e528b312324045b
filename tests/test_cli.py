"""The ``vime`` command: quick to start, light, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fsm.traces import Run, healthy_run, pinned_point
from vime import __version__
from vime.cli import main

HEAVY = (
    *("torch", "transformers", "vllm", "ray", "numpy", "matplotlib", "safetensors", "structlog"),
    "aiohttp",
)


def vime(
    *args: object, module: str = "vime", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A run with a score, a busy skip, and a skip because an engine hung."""
    path = tmp_path / "trace.jsonl"
    run = Run(path)
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready", 30)
    pinned_point(run, 10, score=0.25)
    run.fire("point", 20, "dispatch")
    run.fire("point", 20, "skip", reason="busy", detail={"message": "two evals\nwere pending"})
    run.fire("point", 30, "dispatch")
    run.fire("point", 30, "export")
    run.fire("point", 30, "pin", 4)
    suspect = run.fire("engine", "eval-0", "suspect", 3, reason="hung")
    run.fire("point", 30, "skip", reason="unhealthy", cause_seq=suspect)
    run.fire("point", 40, "dispatch")
    run.trace.close()
    return path


def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vime {__version__}\n"
    assert main(["--help"]) == 0
    assert "trace" in capsys.readouterr().out
    assert main(["trace", "--help"]) == 0
    assert "show" in capsys.readouterr().out


def test_python_m_vime_is_the_command_and_loads_nothing_more() -> None:
    out = vime("--version")
    assert (out.returncode, out.stdout, out.stderr) == (0, f"vime {__version__}\n", "")
    wrong = ("trace", "show", "nowhere")
    assert vime(*wrong).stderr == vime(*wrong, module="vime.cli").stderr
    program = f"""
import runpy, sys
sys.argv = ["vime", "--help"]
try:
    runpy.run_module("vime", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0
sys.exit(str([name for name in {HEAVY!r} if name in sys.modules]))
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert out.stdout.startswith("usage: vime ")
    assert out.stderr == "[]\n"


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "trace show {trace}",
        *(
            pytest.param(f"trace {command}", marks=pytest.mark.slow)
            for command in (
                "timeline {trace}",
                "check {trace}",
                "why {trace} 30",
                "stats {trace}",
                "replay {trace}",
                "rerun {trace}",
                "diff {trace} {trace}",
                "follow --idle 0.01 {trace}",
                "merge {trace} {trace}",
                "export {trace} --format perfetto",
                "export {trace} --format mermaid",
                "export {trace} --format html",
            )
        ),
    ],
)
def test_nothing_heavy_is_loaded_and_the_command_starts_at_once(trace: Path, command: str) -> None:
    program = f"""
import sys, time
from vime.cli import main
assert main({command.format(trace=trace).split()!r}) in (0, 1)
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.stderr.write(f"{{time.process_time()}} {{heavy}}")
"""
    # The rerun loads the dispatcher and trio: 0.26 s on an idle core, more beside other work.
    limit_s = 0.5 if "rerun" in command else 0.3
    for is_last in (False, False, False, True):
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        seconds, heavy = out.stderr.decode().splitlines()[-1].split(" ", 1)
        assert heavy == "[]"
        if float(seconds) < limit_s:
            break
        assert not is_last, f"{seconds} s of processor time"


def test_show_prints_points_engines_and_bars(trace: Path) -> None:
    out = vime("trace", "show", trace, COLUMNS="100")
    assert (out.returncode, out.stderr) == (0, "")
    lines = out.stdout.splitlines()
    assert lines[0].startswith("run-1: ")
    rows = {line.split()[0]: line for line in lines if line[:2].isdigit()}
    assert rows["10"].split() == [
        *("10", "done", "1.0", "s", "5.0", "s", "3.0", "s", "5.0", "s", "0.25", "00000000000a")
    ]
    assert rows["30"].split()[-1] == "unhealthy"
    assert "20: busy: two evals\n" in out.stdout
    (engine,) = [line for line in lines if line.startswith("eval-0")]
    assert engine.split()[:4] == ["eval-0", "suspect", "1", "1"]
    assert "10:00000000000a" in engine
    bars = [line for line in lines if line.startswith(("point ", "engine eval"))]
    assert "█✓" in bars[1]
    assert all(len(line) <= 100 for line in lines)


def test_show_takes_a_run_directory_and_gives_json(trace: Path) -> None:
    out = vime("trace", "show", trace.parent, "--json")
    shown = json.loads(out.stdout)
    assert [(point["id"], point["state"]) for point in shown["points"]] == [
        ("10", "done"),
        ("20", "skipped"),
        ("30", "skipped"),
        ("40", "queued"),
    ]
    first, second, *_ = shown["points"]
    assert first["scores"] == {"sums": 0.25}
    assert first["weight_version"] == "run-1:10:00000000000a"
    assert first["dwell_s"] == {"queued": 1, "exporting": 5, "pinning": 3, "running": 5}
    assert (second["reason"], second["message"]) == ("busy", "two evals\nwere pending")
    assert shown["engines"][0]["state"] == "suspect"


@pytest.mark.parametrize(
    ("filters", "points", "engines"),
    [
        (["--point", "20"], ["20"], []),
        (["--point", "20", "--point", "10"], ["10", "20"], []),
        (["--engine", "eval-0"], [], ["eval-0"]),
        (["--state", "skipped"], ["20", "30"], []),
        (["--state", "running"], ["10"], []),
        (["--reason", "unhealthy"], ["30"], []),
        (["--until", "35"], ["10"], ["eval-0"]),
        (["--since", "59500ms"], ["40"], ["eval-0"]),
        (["--since", "2000-01-01"], ["10", "20", "30", "40"], ["eval-0"]),
        (["--until", "2000-01-01"], [], []),
    ],
)
def test_filters_choose_lives(
    trace: Path, filters: list[str], points: list[str], engines: list[str]
) -> None:
    shown = json.loads(vime("trace", "show", trace, "--json", *filters).stdout)
    assert [life["id"] for life in shown["points"]] == points
    assert [life["id"] for life in shown["engines"]] == engines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "vime: the following arguments are required: COMMAND"),
        (["frobnicate"], "vime: argument COMMAND: invalid choice: 'frobnicate'"),
        (["trace", "show"], "vime trace show: the following arguments are required: FILE"),
        (["trace", "show", "nowhere"], "vime: nowhere: no such file or run directory"),
        (["trace", "show", "no\nwhere"], r"vime: no\nwhere: no such file or run directory"),
        (["trace", "show", "x", "--since", "noon"], "vime trace show: argument --since: 'noon'"),
        (["trace", "show", "x", "--since", "9" * 400], "vime trace show: argument --since: "),
        (["trace", "show", "/dev/null"], "vime: /dev/null: not a file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(args: list[str], message: str) -> None:
    out = vime(*args)
    assert (out.returncode, out.stdout) == (2, "")
    (line,) = out.stderr.splitlines()
    assert line.startswith(message)


def test_a_file_without_any_record_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\x00\xff\n" * 1000)
    out = vime("trace", "show", path)
    assert out.returncode == 2
    (line,) = out.stderr.splitlines()
    assert "holds no trace record; 1000 lines left out: line 1 is not JSON" in line
    path.write_bytes(b"")
    out = vime("trace", "show", path)
    assert (out.returncode, out.stdout) == (0, "no run: 0 records over 0\n")
    assert out.stderr.endswith("t: empty: its run has not written a record yet\n")


def test_what_could_not_be_used_is_told_on_stderr_and_the_rest_is_shown(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-10])
    out = vime("trace", "show", trace)
    assert out.returncode == 0
    assert out.stderr.endswith("is torn: the trace is valid up to there\n")
    assert "\n30 " in out.stdout


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=2000)
    out = subprocess.run(
        f"set -o pipefail; {sys.executable} -m vime.cli trace show --last 0 {path} | head -n 2",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert len(out.stdout.splitlines()) == 2


def test_an_output_that_cannot_be_written_is_one_line_and_status_2(trace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        out = subprocess.run(
            [sys.executable, "-m", "vime.cli", "trace", "show", trace],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert out.returncode == 2
    assert out.stderr == "vime: the output: No space left on device\n"


def test_a_terminal_without_unicode_gets_letters_for_blocks(trace: Path) -> None:
    out = vime("trace", "show", trace, PYTHONIOENCODING="ascii")
    assert out.returncode == 0
    assert out.stdout.isascii()
    assert "eee" in out.stdout


def test_what_a_trace_holds_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\n[bold]"
    run = Run(tmp_path / "t", run_id=evil)
    run.fire("engine", evil, "start", reason=evil)
    run.fire("point", evil, "dispatch", weight_version=evil)
    run.fire("point", evil, "skip", reason=evil, detail={"message": evil})
    run.trace.close()
    out = vime("trace", "show", run.path)
    assert out.returncode == 0
    assert not set("\x1b\x07\r\u202e") & set(out.stdout)
    assert "[bold]" in out.stdout
