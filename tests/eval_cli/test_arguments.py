"""What a user may mistype for `vime eval` and `vime snapshot verify` is told, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vime.cli import main
from vime.eval_cli.ledger import Ledger, LedgerError, Scored

EMPTY = "expected a path, got an empty string; is a shell variable unset?"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a checkpoint lies in it, as far as arguments are looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "config.json").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that is refused."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


BACKEND = ("--eval-function-path", "tests.eval_cli.backend.NormBackend")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", ""], f"vime eval: argument CHECKPOINT_DIR: {EMPTY}"),
        (["eval", "step_1", ""], f"vime eval: argument CHECKPOINT_DIR: {EMPTY}"),
        (["eval", "--watch", ""], f"vime eval: argument --watch: {EMPTY}"),
        (["eval", "step_1", "--scores", ""], f"vime eval: argument --scores: {EMPTY}"),
        (["eval", "step_1", "--eval-run-dir", ""], f"vime: --eval-run-dir '': {EMPTY}"),
        (["eval", "step_1", "--hf-checkpoint", ""], f"vime: --hf-checkpoint '': {EMPTY}"),
        (["eval", "step_1", "--eval-hf-dir", ""], f"vime: --eval-hf-dir '': {EMPTY}"),
        (["eval", "step_1", "--save-hf", ""], f"vime: --save-hf '': {EMPTY}"),
        (["snapshot", "verify", ""], f"vime snapshot verify: argument DIR: {EMPTY}"),
        (["snapshot", "verify", "step_1", "--against", ""], f"argument --against: {EMPTY}"),
        (["trace", "show", ""], f"vime trace show: argument FILE: {EMPTY}"),
        (["trace", "merge", "x", ""], f"vime trace merge: argument FILE: {EMPTY}"),
        (["trace", "export", "x", "--format", "html", "-o", ""], f"argument -o/--output: {EMPTY}"),
    ],
)
def test_an_empty_path_never_means_the_working_directory(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    before = sorted(place.iterdir())
    assert message in told(capsys, *words, *(BACKEND if words[0] == "eval" else ()))
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--poll", "1e20"], "argument --poll: '1e20': expected seconds, 0 or more and at most 25920"),
        (["--poll", "inf"], "argument --poll: 'inf': expected seconds, 0 or more and at most 2592000"),
        (["--idle-timeout", "2592001"], "'2592001': expected seconds, 0 or more and at most 2592000 (30"),
        (["--eval-interval", "abc"], "--eval-interval 'abc': expected a whole number of at least 1"),
        (["--eval-interval", "0"], "--eval-interval 0: expected a whole number of at least 1"),
        (["--eval-overflow-policy", "drop"], "--eval-overflow-policy 'drop': expected one of"),
        (["--eval-hf-dir", "a\0b"], "--eval-hf-dir 'a\\x00b': expected a text without NUL"),
        (["--eval-engine-max-restarts", "9" * 20], "--eval-engine-max-restarts 99999999999999999999: expected"),
        (["--eval-dispose-timeout", "1e20"], "--eval-dispose-timeout 1e+20: expected a number of"),
        (["--hf-checkpoint", "loop"], "--hf-checkpoint loop: a link that leads back to itself"),
        (["--eval-hf-dir", "loop"], "--eval-hf-dir loop: a link that leads back to itself"),
        (["--eval-run-dir", "loop/x"], "--eval-run-dir loop/x: a link that leads back to itself"),
        (["--scores", "loop"], "--scores loop: Too many levels of symbolic links"),
        (["--watch", "loop"], "vime: loop: a link that leads back to itself"),
    ],
)  # fmt: skip
def test_a_flag_is_refused_that_cannot_be_right_also_one_that_only_training_needs(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in told(capsys, "eval", "step_1", *BACKEND, *words)


GOOD: dict[str, Any] = {
    "checkpoint": "c", "settings": "s", "path": "/x", "rollout_id": 1,
    "metrics": {"eval/a": 0.5, "eval/b": 1}, "run_dir": "/runs/1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "[1]: expected a JSON object, the score of a checkpoint"),
        (b"null", "None: expected a JSON object"),
        (b"{}", "no checkpoint, settings, path, rollout_id, metrics, run_dir: expected"),
        (b"\xff\xfe", "not JSON, and no beginning of a score of vime's"),
        (b'{"x": nan', "not JSON, and no beginning of a score of vime's"),
        (b'{"checkpoint":' + b"[" * 5000, None),
        *(
            (json.dumps({**GOOD, name: wrong}).encode(), f"{name} {shown}: expected {expected}")
            for name, wrong, shown, expected in (
                ("checkpoint", ["c"], "['c']", "a text"),
                ("checkpoint", {"a": 1}, "{'a': 1}", "a text"),
                ("settings", None, "None", "a text"),
                ("path", 5, "5", "a text"),
                ("rollout_id", "1", "'1'", "a whole number"),
                ("rollout_id", True, "True", "a whole number"),
                ("rollout_id", 1.5, "1.5", "a whole number"),
                ("metrics", 5, "5", "metric names with numbers"),
                ("metrics", [0.5], "[0.5]", "metric names with numbers"),
                ("run_dir", {}, "{}", "a text"),
            )
        ),
        (json.dumps({**GOOD, "metrics": {"eval/a": "1"}}).encode(), "metrics: eval/a '1': expected"),
        (json.dumps({**GOOD, "metrics": {"eval/a": None}}).encode(), None),  # it was not finite
        (json.dumps({**GOOD, "metrics": {"eval/a": True}}).encode(), "metrics: eval/a True: expected"),
    ],
)  # fmt: skip
def test_a_line_of_the_scores_that_is_none_of_vimes_is_named_by_file_and_number(
    place: Path, capsys: pytest.CaptureFixture[str], line: bytes, message: str | None
) -> None:
    good = json.dumps(GOOD).encode()
    Path("scores").write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    if message is None:
        assert Ledger(Path("scores")).find("c", "s") == Scored(**GOOD)  # the last one
        return
    with pytest.raises(LedgerError) as caught:
        Ledger(Path("scores"))
    assert str(caught.value).startswith(f"scores:3: {message}")
    assert str(caught.value).endswith("; remove that line, or name another file")
    said = told(capsys, "eval", "step_1", *BACKEND, "--scores", "scores")
    assert said.startswith("vime: --scores scores:3: ")


@pytest.mark.parametrize("length", [1, 8, 14, 15, 60])
def test_the_torn_beginning_of_a_score_is_passed_over(tmp_path: Path, length: int) -> None:
    path = tmp_path / "scores"
    Ledger(path).add(Scored(**GOOD))
    whole = path.read_bytes()
    path.write_bytes(whole[:length] + b"\n" + whole + whole[:length])
    assert Ledger(path).find("c", "s") == Scored(**GOOD)


def test_a_score_of_a_later_vime_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    path.write_text(json.dumps({**GOOD, "more": 1}) + "\n")
    assert Ledger(path).find("c", "s") == Scored(**GOOD)
