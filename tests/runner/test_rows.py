"""Eval sets of every form that can be named, and the settings that shape their prompts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vime.eval.config import EvalConfig
from vime.eval.runner.datasets import DatasetError, Example, load_datasets

ROWS = [{"input": f"question {n}", "label": n} for n in range(5)]
CHAT = [{"role": "user", "content": "hi"}]


def examples(path: Path, take: int | None = None, **settings: Any) -> tuple[Example, ...]:
    overrides = {} if take is None else {"set": {"take": take}}
    config = EvalConfig(
        prompt_data=(("set", path),), dataset_overrides=overrides, **settings
    )  # fmt: skip
    return load_datasets(config)[0].examples


def problems(path: Path, **settings: Any) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        examples(path, **settings)
    return caught.value.problems


def as_lines(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def as_array(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def as_saved(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path, num_proc=None)
    return path


def as_dict_of_one(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    datasets.DatasetDict(test=datasets.Dataset.from_list(rows)).save_to_disk(path)
    return path


def as_directory(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    (path / "more").mkdir(parents=True)
    as_parquet(path / "a.parquet", rows[:1])
    as_array(path / "b.json", rows[1:2])
    as_lines(path / "c.jsonl", rows[2:4])
    as_lines(path / "more" / "d.jsonl", rows[4:])
    (path / "README.md").write_text("no data")
    as_lines(path / ".hidden.jsonl", rows)
    return path


FORMS = {
    "a.jsonl": as_lines,
    "lines.json": as_lines,
    "no_suffix": as_lines,
    "a.json": as_array,
    "a.parquet": as_parquet,
    "saved": as_saved,
    "saved_dict": as_dict_of_one,
    "directory": as_directory,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_examples_in_their_order(name: str, tmp_path: Path) -> None:
    path = FORMS[name](tmp_path / name)
    found = examples(path)
    assert [(e.index, e.prompt, e.label) for e in found] == [
        (n, f"question {n}", n) for n in range(5)
    ]
    assert all(e.where.startswith(str(path)) for e in found)
    assert [e.label for e in examples(path, take=2)] == [0, 1]
    assert len(examples(path, take=99)) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "saved"])
def test_chat_messages_are_read_from_every_form(name: str, tmp_path: Path) -> None:
    path = FORMS[name](tmp_path / name, [{"input": CHAT, "label": "x"}])  # type: ignore[operator]
    assert examples(path)[0].prompt == CHAT


def test_what_lies_behind_the_examples_that_are_taken_is_not_looked_at(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + "\nno json")
    assert len(examples(path, take=5)) == 5
    (said,) = problems(path)
    assert said.startswith(f"{path}:6: not JSON at column 1")


def test_a_saved_dict_of_several_splits_wants_one_of_them_named(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(test=whole, train=whole).save_to_disk(tmp_path / "d")
    (said,) = problems(tmp_path / "d")
    assert (
        said == f"{tmp_path}/d: has the splits test, train; name one of them as {tmp_path}/d/SPLIT"
    )
    assert len(examples(tmp_path / "d" / "test")) == 5


@pytest.mark.parametrize("form", [as_lines, as_array])
def test_a_number_of_any_length_keeps_its_digits(form: Any, tmp_path: Path) -> None:
    labels = [2**63, 2**64, -(2**90), 10**300 + 1, 0.1234567890123456789]
    rows = [{"input": "x", "label": label, "more": None} for label in labels]
    assert [e.label for e in examples(form(tmp_path / "a.json", rows))] == labels


def test_more_examples_may_be_asked_for_than_there_are(tmp_path: Path) -> None:
    assert len(examples(as_lines(tmp_path / "a.jsonl"), take=10**20)) == 5


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (said,) = problems(tmp_path / "pipe")
    assert said == f"{tmp_path}/pipe: expected a file or a directory, not a pipe or a device"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"input": "x", "label": %s}' % (b"9" * 400), "a.jsonl:1: not JSON"),
        ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
        ("a.json", b"[1, 2", "not JSON"),
        ("a.json", b'[{"input": "x", "label": 1}, 3]', "a.json[1]: a JSON number; expected an object"),
        ("a.jsonl", b'[{"input": "x", "label": 1}]', "a.jsonl:1: a JSON list; expected an object"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    found = problems(tmp_path / name)
    assert said in found[0]
    assert str(tmp_path / name) in found[0]


def test_a_directory_without_data_and_a_damaged_saved_dataset_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (said,) = problems(tmp_path / "empty")
    assert said.startswith(f"{tmp_path}/empty: none of its files ends with .jsonl")
    path = as_saved(tmp_path / "saved")
    next(path.glob("*.arrow")).unlink()
    (said,) = problems(path)
    assert said.startswith(f"{path}: cannot be read as a dataset: ")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("saved", "datasets", "datasets")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    name: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FORMS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    (said,) = problems(path)
    assert said.endswith(f"needs the package {package}: pip install 'vime[{extra}]'")


def test_texts_become_chat_messages_with_the_system_message_of_the_settings(
    tmp_path: Path,
) -> None:
    own = [{"role": "system", "content": "own"}, *CHAT]
    rows = [{"input": "text", "label": 1}, {"input": CHAT, "label": 1}, {"input": own, "label": 1}]
    path = as_lines(tmp_path / "a.jsonl", rows)
    plain = examples(path)
    assert [e.prompt for e in plain] == ["text", CHAT, own]
    chat = examples(path, apply_chat_template=True, system_prompt="be brief")
    system = {"role": "system", "content": "be brief"}
    assert [e.prompt for e in chat] == [
        [system, {"role": "user", "content": "text"}],
        [system, *CHAT],
        own,
    ]


def test_a_system_message_for_a_text_prompt_is_refused(tmp_path: Path) -> None:
    (said,) = problems(as_lines(tmp_path / "a.jsonl", ROWS[:1]), system_prompt="be brief")
    assert said.endswith("--eval-system-prompt is for chat: add --apply-chat-template")
