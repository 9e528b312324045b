"""All benchmarks in one go: one that fails costs its own figures, and the tables follow the JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import cli, suite, tables
from bench.machine import describe_machine

SMALL = {"trace": ("--points", "20", "--repeat", "2", "--records", "130")}


def test_the_suite_has_every_benchmark_and_only_arguments_that_they_take() -> None:
    assert set(suite.SUITE) == set(cli.BENCHMARKS)
    parser = cli.make_parser()
    for name, arguments in suite.SUITE.items():
        assert parser.parse_args([name, *arguments]).bench == name


@pytest.mark.slow
def test_one_that_fails_costs_the_others_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {"dispatch": ("--points", "none"), **SMALL}
    assert suite.run_suite(wanted, tmp_path, 100.0) == {"dispatch": "ended with status 2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.png"]
    assert "dispatch: ended with status 2" in capfd.readouterr().out


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert suite.run_suite(SMALL, tmp_path, 0.01) == {"trace": "took more than 0.01 s"}
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["dispatsch"])
    assert "expected one of dispatch" in capsys.readouterr().err


# -- tables --------------------------------------------------------------------------------------


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """The repository's own documents, to be written into."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/bench.md"):
        shutil.copy(tables.ROOT / name, tmp_path / name)
    return tmp_path


def result(**changes: Any) -> dict[str, Any]:
    figure = {"unit": "ms", "p50": 0.15, "p90": 0.3, "p99": 1.7, "max": 2.0, "n": 1000}
    machine = describe_machine([])
    return {
        "bench": "dispatch",
        "machine": machine,
        "figures": {"vime/hold": figure},
        "ratios": {"hold_over_handover": 1.4},
    } | changes


def test_the_documents_say_what_the_results_say(documents: Path) -> None:
    results = documents / "results"
    results.mkdir()
    (results / "dispatch.json").write_text(json.dumps(result()))
    changed = tables.write_tables(documents, results)
    assert [path.name for path in changed] == ["README.md", "bench.md"]
    readme = (documents / "README.md").read_text()
    assert "| `dispatch` with nothing to copy, median | **0.150 ms** | ≤ 0.2 ms |" in readme
    assert "| **1.70 ms** | ≤ 1 ms (missed) |" in readme
    page = (documents / "docs" / "bench.md").read_text()
    assert "| `vime/hold` | 0.150 | 0.300 | 1.70 | 2.00 | ms | 1000 |" in page
    assert "`hold_over_handover` = 1.40" in page
    assert tables.write_tables(documents, results, check=True) == []


def test_without_results_the_documents_say_how_to_get_them(documents: Path) -> None:
    tables.write_tables(documents, documents / "none")
    assert tables.NOTHING in (documents / "README.md").read_text()


def test_the_committed_documents_are_of_the_committed_results() -> None:
    assert tables.main(["--check"]) == 0
