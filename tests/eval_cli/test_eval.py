"""`vime eval`: existing checkpoints are scored, once for each of their contents and settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.irregular import IRREGULAR, replace
from tests.snapshots import FINAL_NORM, change_tensors, checkpoints
from vime.cli import main
from vime.eval.contracts import Outcome
from vime.eval_cli.checkpoints import Numbers, Watch, step_of
from vime.eval_cli.evaluate import _reason
from vime.eval_cli.ledger import Ledger, LedgerError, Scored, checkpoint_identity, settings_identity

pytestmark = pytest.mark.slow

__all__ = ["checkpoints"]  # a fixture

BACKEND = "tests.eval_cli.backend.NormBackend"


@pytest.fixture
def steps(checkpoints: Path, tmp_path: Path) -> Path:
    """`step_10` and `step_20`, whose final norms are 0.5 and 2."""
    for step, value in ((10, 0.5), (20, 2.0)):
        write_step(checkpoints, tmp_path / "steps" / f"step_{step}", value)
    return tmp_path / "steps"


def write_step(checkpoints: Path, target: Path, norm: float) -> Path:
    target.parent.mkdir(exist_ok=True)
    return change_tensors(
        checkpoints / "whole", target, lambda t: t | {FINAL_NORM: t[FINAL_NORM] * 0 + norm}
    )


class Command:
    """`vime eval` with a backend of the tests', in this process."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.scores = tmp_path / "scores.jsonl"
        self._runs = tmp_path / "runs"
        self._capsys = capsys
        self._count = 0

    def __call__(self, *words: object) -> tuple[int, list[dict[str, Any]], str]:
        self._count += 1
        status = main(
            [
                *("eval", *map(str, words), "--eval-function-path", BACKEND, "--json"),
                *("--scores", str(self.scores)),
                *("--eval-run-dir", str(self._runs / str(self._count))),
            ]
        )
        out, err = self._capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_checkpoints_are_scored_at_the_steps_in_their_names_with_the_same_evidence_as_a_run(
    command: Command, steps: Path
) -> None:
    status, lines, _ = command(steps / "step_20", steps / "step_10")
    assert status == 0
    assert [(x["step"], x["state"], x["metrics"]["eval/norm"]) for x in lines] == [
        (10, "done", 0.5),
        (20, "done", 2.0),
    ]
    run_dir = Path(lines[0]["run_dir"])
    assert main(["trace", "check", str(run_dir), "--ended"]) == 0
    metrics = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {m["rollout_id"]: m["metrics"]["eval/norm"] for m in metrics} == {10: 0.5, 20: 2.0}
    assert [m["weight_version"] for m in metrics] == [x["weight_version"] for x in lines]


def test_what_was_scored_with_the_same_settings_is_not_scored_again(
    command: Command, steps: Path, checkpoints: Path
) -> None:
    _, (first,), _ = command(steps / "step_10")
    moved = steps / "checkpoint-7"  # its content counts, not its place
    shutil.copytree(steps / "step_10", moved)
    status, (known,), _ = command(moved)
    assert status == 0
    assert (known["step"], known["state"]) == (7, "known")
    assert known["metrics"] == first["metrics"]
    assert known["run_dir"] == first["run_dir"]
    assert command(moved, "--again")[1][0]["state"] == "done"
    assert command(moved, "--eval-temperature", 0.5)[1][0]["state"] == "done"
    assert command(moved, "--eval-timeout", 100, "--eval-concurrency", 2)[1][0]["state"] == "known"
    shutil.rmtree(moved)
    write_step(checkpoints, moved, 0.75)
    assert command(moved)[1][0]["metrics"]["eval/norm"] == 0.75


def test_a_skipped_checkpoint_has_its_reason_and_fails_the_command_and_is_tried_again(
    command: Command, steps: Path, checkpoints: Path
) -> None:
    bad = write_step(checkpoints, steps / "step_30", -1.0)
    for _ in range(2):
        status, lines, _ = command(
            bad, checkpoints / "truncated", "--hf-checkpoint", checkpoints / "base"
        )
        assert status == 1
        assert [(x["step"], x["reason"]) for x in lines] == [
            (30, "negative"),
            (31, "snapshot_invalid"),
        ]
    assert not command.scores.exists()


def test_watching_takes_what_becomes_whole_and_fails_for_what_never_did(
    command: Command, steps: Path, checkpoints: Path
) -> None:
    shutil.copytree(checkpoints / "truncated", steps / "step_30")
    status, lines, err = command("--watch", steps, "--poll", 0, "--idle-timeout", 0.2)
    assert status == 1
    assert [(x["step"], x["metrics"]["eval/norm"]) for x in lines] == [(10, 0.5), (20, 2.0)]
    assert "step_30: never became whole: " in err
    shutil.rmtree(steps / "step_30")
    assert command("--watch", steps, "--poll", 0, "--idle-timeout", 0.2)[0] == 0


def test_a_watch_waits_until_a_checkpoint_is_whole_and_at_rest(
    steps: Path, checkpoints: Path
) -> None:
    watch = Watch(steps, known=[steps / "step_10"])
    assert watch.look() == []
    assert watch.unfinished == {steps / "step_20": ["it is still being written"]}
    assert watch.look() == [steps / "step_20"]
    growing = steps / "step_5"
    shutil.copytree(checkpoints / "no_weights", growing)
    assert watch.look() == []
    assert watch.look() == []
    assert "safetensors" in watch.unfinished[growing][0]
    shutil.copy(checkpoints / "whole" / "model.safetensors", growing)
    assert watch.look() == []
    assert watch.look() == [growing]
    assert watch.look() == []
    assert watch.unfinished == {}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_40", 40),
        ("checkpoint-500", 500),
        ("global_step_12", 12),
        ("global_step12", 12),
        ("iter_0000100", 100),
        ("run-step_7", 7),
        ("llama-3-8b", None),
        ("footstep_9", None),
        ("base", None),
    ],
)
def test_a_directorys_name_says_its_step(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_two_checkpoints_of_one_step_get_places_of_their_own() -> None:
    paths = [Path(p) for p in ("b/step_9", "base", "a/step_9", "step_3")]
    numbered = Numbers().number_all(paths)
    assert [(str(c.path), c.rollout_id) for c in numbered] == [
        ("step_3", 3),
        ("b/step_9", 9),
        ("a/step_9", 10),
        ("base", 11),
    ]


def test_scores_that_cannot_be_kept_are_told_and_one_that_cannot_be_read_is_bad_usage(
    command: Command, steps: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    command.scores = tmp_path / "file" / "scores.jsonl"
    status, (line,), err = command(steps / "step_10")
    assert (status, line["state"]) == (0, "done")
    assert f"--scores {command.scores}: " in err
    command.scores = tmp_path
    status, lines, err = command(steps / "step_10")
    assert (status, lines) == (2, [])
    assert f"--scores {tmp_path}: {tmp_path.name}: no regular file" in err


def test_a_backend_in_the_working_directory_is_found_as_beside_a_script(
    steps: Path, tmp_path: Path
) -> None:
    source = Path(__file__).with_name("backend.py")
    shutil.copy(source, tmp_path / "my_backend.py")
    words = ["eval", str(steps / "step_20"), "--eval-function-path", "my_backend.NormBackend"]
    words += ["--eval-run-dir", "run"]
    out = subprocess.run(  # -P: as the installed command, which does not look there by itself
        [sys.executable, "-P", "-m", "vime.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.startswith(f"{steps / 'step_20'}: step 20: done: norm 2 ± 0, ")
    assert len(Ledger(tmp_path / "runs" / "scores.jsonl")._known) == 1


def test_the_ledger_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    scored = Scored("c", "s", "/x", 1, {"eval/a": 0.5}, "/runs/1")
    Ledger(path).add(scored)
    path.write_bytes(path.read_bytes() + b'{"checkpoint": "d", "sett')
    other = Scored("d", "s", "/y", 2, {"eval/a": 0.75}, "/runs/2")
    Ledger(path).add(other)
    read = Ledger(path)
    assert read.find("c", "s") == scored
    assert read.find("d", "s") == other
    assert read.find("d", "other") is None


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": 5},
        {"metrics": {"eval/a": True}},
        {"metrics": {"eval/a": "1"}},
        {"metrics": []},
        {"rollout_id": True},
        {"rollout_id": 1.0},
        {"path": None},
        {"run_dir": 3},
        {"checkpoint": []},
        {"settings": {}},
    ],
)
def test_a_line_of_other_types_is_no_score(change: dict[str, Any], tmp_path: Path) -> None:
    line = {"checkpoint": "c", "settings": "s", "path": "/x", "rollout_id": 1,
            "metrics": {"eval/a": 0.5, "eval/b": None}, "run_dir": "/runs/1"}  # fmt: skip
    path = tmp_path / "scores.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert Ledger(path).find("c", "s") is not None
    path.write_text(json.dumps(line | change) + "\n")
    with pytest.raises(LedgerError, match=r"scores.jsonl:1: "):
        Ledger(path)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_ledger_that_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    replace(tmp_path / "scores", kind)
    with pytest.raises(OSError, match="scores: no regular file"):
        Ledger(tmp_path / "scores")


def test_settings_count_by_what_a_score_depends_on(tmp_path: Path) -> None:
    from vime.eval.config import EvalConfig

    first, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (first, copy):
        path.write_text('{"input": "1+1=", "label": "2"}\n')

    def identity(**fields: Any) -> str:
        return settings_identity(EvalConfig(**{"prompt_data": (("toy", first),), **fields}))

    same = identity()
    assert identity(prompt_data=(("toy", copy),)) == same
    assert identity(num_gpus=4, eval_timeout_s=5.0, run_dir=tmp_path, concurrency=3) == same
    assert identity(prompt_data=(("other", first),)) != same
    assert identity(seed=1) != same
    assert identity(max_response_len=7) != same
    assert identity(vllm={"dtype": "float32"}) != same
    first.write_text('{"input": "1+1=", "label": "3"}\n')
    assert identity() != same


def test_a_checkpoint_is_its_weights_and_its_tokenizer(checkpoints: Path, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(checkpoints / "whole", directory)
    before = checkpoint_identity(directory, "d")
    (directory / ".complete").write_text("vime's own")
    assert checkpoint_identity(directory, "d") == before
    assert checkpoint_identity(directory, "e") != before
    (directory / "tokenizer_config.json").write_text("{}")
    assert checkpoint_identity(directory, "d") != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate: name a CHECKPOINT_DIR, or --watch DIR"),
        (["nowhere"], "nowhere: no such directory"),
        (["{whole}"], "nothing to evaluate with: --eval-num-gpus N makes a fleet"),
        (["{whole}", "--eval-num-gpus", "1", "--eval-top-p", "3"], "--eval-top-p 3.0"),
        (["{whole}/.."], "no checkpoint, and checkpoints are in it: name them ({whole}/../*)"),
        (["{whole}", "--scores", "{whole}", "--eval-function-path", BACKEND], "--scores {whole}: whole: no reg"),
        (["{whole}", "--poll", "-1"], "argument --poll: '-1': expected seconds"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_status_2(
    words: list[str], message: str, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(word.format(whole=checkpoints / "whole") for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(whole=checkpoints / "whole") in line


def test_an_error_of_several_lines_is_told_whole() -> None:
    try:
        raise ValueError("the first\nthe second")
    except ValueError:
        detail = traceback.format_exc()
    outcome = Outcome(1, "skipped", "crashed", detail, None, {}, 0, 0.0, 0.0)
    assert _reason(outcome) == "crashed: ValueError: the first the second"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_watch_that_is_told_to_end_leaves_nothing(
    number: int, status: int, steps: Path, tmp_path: Path
) -> None:
    words = ["eval", "--watch", str(steps), "--poll", "0.05", "--eval-function-path", BACKEND]
    words += ["--scores", str(tmp_path / "s"), "--eval-run-dir", str(tmp_path / "run")]
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "vime.cli", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    with process:
        assert process.stdout is not None
        assert [process.stdout.readline().split(": ")[1] for _ in range(2)] == [
            "step 10",
            "step 20",
        ]
        process.send_signal(number)
        assert process.wait(60) == status
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(Ledger(tmp_path / "s")._known) == 2
