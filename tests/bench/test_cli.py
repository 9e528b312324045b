"""The command: bad usage in one line and status 2, what it writes, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import cli
from bench.figures import Report
from bench.output import number
from bench.scratch import scratch

ROOT = Path(__file__).parents[2]


class Canned:
    """A benchmark that takes no time."""

    def __init__(self, run: object = None) -> None:
        self._run = run

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--points", type=cli.positive, default=1)

    def run(self, args: argparse.Namespace) -> Report:
        if callable(self._run):
            self._run()
        report = Report("trace")
        report.add("vime", "transition", "µs", [17.0, 18.0, 30.0])
        report.add("vime", "replay", "records/s", [150_000.0])
        report.ratios["transition_over_write"] = 18.0
        report.notes.append("a note")
        return report


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "benchmark", lambda name: Canned())


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "the following arguments are required: NAME"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["trace", "--points", "0"], "'0': expected a whole number above 0"),
        (["trace", "--points", "many"], "'many': expected a whole number above 0"),
        (["trace", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["trace", "--json", "/nowhere/figures.json"], "/nowhere is no directory to write into"),
        (["trace", "--json", "/tmp"], "this is a directory; name a file"),
        (["trace", "--png", "figures.doc"], "expected a name that ends in .png, .svg or .pdf"),
        (["stall", "--gigabytes", "nan"], "'nan': expected a number above 0"),
        (["stall", "--gigabytes", "1e9"], "GB of memory are needed"),
        (["dispatch", "--subject", "mine"], "--subject mine: expected PATH.py:FACTORY"),
        (["stall", "--subject", "/nowhere.py:make"], "/nowhere.py is no file"),
        (["runner", "--server", "other"], "invalid choice: 'other'"),
    ],
)
def test_bad_usage_is_one_clear_line_and_status_2(
    argv: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.usefixtures("canned")
def test_a_run_prints_its_figures_and_writes_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, png_path = tmp_path / "figures.json", tmp_path / "figures.png"
    assert cli.main(["trace", "--json", str(json_path), "--png", str(png_path)]) == 0
    shown = capsys.readouterr().out
    for fact in ("vime/transition", "18.0", "150,000", "transition_over_write = 18.0", "a note"):
        assert fact in shown
    written = json.loads(json_path.read_bytes())
    assert list(written) == ["bench", "machine", "figures", "ratios"]
    assert written["figures"]["vime/replay"]["n"] == 1
    assert written["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert written["machine"]["command"] == "python -m bench trace"
    assert png_path.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "figures.png"]


def test_sigterm_leaves_no_directory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def interrupted() -> None:
        with scratch() as found:
            places.extend((found.disk, found.memory))
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    monkeypatch.setattr(cli, "benchmark", lambda name: Canned(interrupted))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["trace"]) == cli.TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(places) == 2
    assert not any(place.exists() for place in places)


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from bench.cli import main; status = main(['--help']); "
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'matplotlib'} & set(sys.modules); "
        "sys.exit(status or sorted(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in cli.BENCHMARKS:
        assert name in done.stdout.split()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.2, "0.200"), (1.234, "1.23"), (56.78, "56.8"), (123456.7, "123,457")],
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text
