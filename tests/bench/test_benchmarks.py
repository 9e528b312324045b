"""Each benchmark, as small as it can be: it runs, and yields the figures and ratios of its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from bench import cli
from bench.runner import _rounds
from bench.tracing import dropped
from vime.fsm.machine import TracedMachine
from vime.fsm.read import read_trace
from vime.fsm.tables import POINT
from vime.fsm.trace import Trace

SUBJECT = """
class Nothing:
    def dispatch(self, rollout_id): pass
    def drain(self): pass
    def close(self): pass
"""


def measured(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """Run the command, and read what it has written."""
    path = tmp_path / "figures.json"
    assert cli.main([*argv, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_bytes())
    assert list(found) == ["bench", "machine", "figures", "ratios"]
    assert found["bench"] == argv[0]
    for figure in found["figures"].values():
        assert list(figure) == ["unit", "p50", "p90", "p99", "max", "n"]
        assert figure["p50"] <= figure["p90"] <= figure["p99"] <= figure["max"]
    assert all(isinstance(ratio, float) for ratio in found["ratios"].values())
    return found


def units(found: dict[str, Any]) -> dict[str, str]:
    return {name: figure["unit"] for name, figure in found["figures"].items()}


@pytest.fixture
def subject(tmp_path: Path) -> str:
    path = tmp_path / "nothing.py"
    path.write_text(SUBJECT)
    return f"{path}:Nothing"


def test_trace(tmp_path: Path) -> None:
    found = measured(tmp_path, "trace", "--points", "20", "--repeat", "2", "--records", "130")
    assert units(found) == {
        "vime/transition": "µs",
        "bare/write": "µs",
        "vime/replay": "records/s",
        "vime/check": "records/s",
        "bare/decode": "records/s",
        "vime/stats": "records/s",
        "vime/stats_memory": "MB",
    }
    assert found["figures"]["vime/replay"]["n"] == 2
    assert 5 < found["figures"]["vime/stats_memory"]["max"] < 200
    rate = found["figures"]["vime/stats"]["p50"]
    assert found["ratios"]["stats_of_a_million_s"] == pytest.approx(1e6 / rate)


@pytest.mark.slow
def test_tracing(tmp_path: Path) -> None:
    found = measured(
        tmp_path, "tracing", "--pairs", "3", "--steps", "4", "--every", "2", "--width", "64"
    )
    assert units(found) == {"vime/traced": "steps/s", "vime/untraced": "steps/s"}
    ratios = found["ratios"]
    low, middle, high = (ratios[f"speed_with_trace{end}"] for end in ("_low", "", "_high"))
    assert 0 < low <= middle <= high


def test_what_is_dropped_for_a_while_is_neither_in_the_trace_nor_in_its_numbers(
    tmp_path: Path,
) -> None:
    with Trace(tmp_path / "t", "run-1") as trace:
        first, second, third = (TracedMachine(POINT, str(n), trace) for n in range(3))
        first.fire("dispatch")
        with dropped(trace):
            second.fire("dispatch")
            second.fire("skip", reason="busy")
            assert second.finished
        third.fire("dispatch")
    assert [(r.id, r.seq) for r in read_trace(tmp_path / "t")] == [("0", 0), ("2", 1)]


@pytest.mark.slow
def test_dispatch(tmp_path: Path, subject: str) -> None:
    found = measured(tmp_path, "dispatch", "--points", "5", "--subject", subject)
    assert set(units(found).items()) == {
        ("handover/hold", "ms"),
        ("vime/hold", "ms"),
        ("nothing/hold", "ms"),
    }
    assert found["figures"]["vime/hold"]["n"] == 5
    assert set(found["ratios"]) == {"hold_over_handover", "nothing_hold_over_handover"}


@pytest.mark.slow
def test_stall(tmp_path: Path, subject: str) -> None:
    found = measured(
        tmp_path, "stall", "--gigabytes", "0.001", "--seconds", "1.5", "--points", "2",
        "--subject", subject,
    )  # fmt: skip
    names = ("copy", "blocking", "blocking_save", "vime", "nothing")
    assert units(found) == {f"{name}/stall": "s" for name in names}
    assert found["figures"]["blocking/stall"]["p50"] > 1.5, "it waits for the evaluation"
    stall, blocking = (found["figures"][f"{name}/stall"]["p50"] for name in ("vime", "blocking"))
    assert stall < blocking, "it does not"
    assert {"stall_over_copy", "stall_over_blocking"} <= set(found["ratios"])


@pytest.mark.slow
def test_interference(tmp_path: Path, subject: str) -> None:
    found = measured(
        tmp_path, "interference", "--seconds", "0.3", "--rounds", "1", "--width", "64",
        "--subject", subject,
    )  # fmt: skip
    windows = {"training/none", "vime/one", "vime/two", "nothing/one", "nothing/two"}
    assert units(found) == dict.fromkeys(windows, "steps/s")
    assert {"speed_with_one", "speed_with_two", "nothing_speed_with_one"} <= set(found["ratios"])


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    found = measured(tmp_path, "scale", "--points", "20", "--engines", "1", "3")
    assert {name.partition("/")[0] for name in found["figures"]} == {"engines_1", "engines_3"}
    assert units(found)["engines_3/trace"] == "bytes/point"
    assert {"memory_growth_mb", "time_growth", "engine_cost_growth"} <= set(found["ratios"])


def test_scale_wants_a_number_of_points_for_each_size_or_one_for_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["scale", "--points", "20", "30", "--engines", "1"]) == cli.USAGE_ERROR
    assert "--points 20 30: expected one number, or one for each of --engines 1" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_runner_on_a_server_that_answers_at_once(tmp_path: Path) -> None:
    found = measured(
        tmp_path, "runner", "--server", "instant", "--samples-instant", "16",
        "--concurrency", "4", "--repeat", "2", "--no-lm-eval",
    )  # fmt: skip
    assert units(found) == {"vime/instant": "samples/s", "bare/instant": "samples/s"}
    assert found["ratios"]["runner_over_client"] > 0


def test_each_client_of_the_runner_begins_as_many_rounds_after_one_to_warm_up() -> None:
    asked: list[str] = []

    async def seconds_of(name: str, number: int) -> float:
        asked.append(f"{name}{number}")
        return float(number)

    taken = anyio.run(_rounds, ["a", "b", "c"], 3, seconds_of)
    assert taken == {name: [1.0, 2.0, 3.0] for name in "abc"}
    assert asked == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2", "a3", "b3", "c3"]


@pytest.mark.real
@pytest.mark.timeout(300)
def test_pin_on_a_real_engine(tmp_path: Path) -> None:
    found = measured(
        tmp_path, "pin", "--engines", "1", "--gigabytes", "0.001", "--repeat", "2"
    )  # fmt: skip
    assert units(found) == {"raw/engines_1": "s", "vime/engines_1": "s"}
    assert found["ratios"]["pin_over_reload"] == found["ratios"]["pin_over_reload_1"]


@pytest.mark.real
@pytest.mark.timeout(300)
def test_runner_on_a_real_engine_beside_lm_eval(tmp_path: Path) -> None:
    found = measured(
        tmp_path, "runner", "--server", "real", "--samples", "16", "--concurrency", "4",
        "--repeat", "1",
    )  # fmt: skip
    assert set(units(found)) == {"vime/real", "bare/real", "lm_eval/real"}
    assert {"runner_over_client", "runner_over_lm_eval"} <= set(found["ratios"])


@pytest.mark.real
@pytest.mark.timeout(300)
def test_latency_on_a_real_engine(tmp_path: Path) -> None:
    found = measured(
        tmp_path, "latency", "--gigabytes", "0.001", "--samples", "4", "--tokens", "4",
        "--points", "1",
    )  # fmt: skip
    stages = {f"vime/{stage}" for stage in ("total", "stall", "export", "pin", "run")}
    parts = {f"bare/{part}" for part in ("copy", "write", "load", "generation", "sum")}
    assert units(found) == dict.fromkeys(stages | parts, "s")
    assert found["ratios"]["latency_over_parts"] > 0
