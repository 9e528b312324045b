from __future__ import annotations

from pathlib import Path

import pytest

from vime.eval.config import EvalConfig
from vime.eval.runner.datasets import (
    MAX_PROBLEMS_SHOWN,
    DatasetError,
    check_datasets,
    load_datasets,
)


def config_for(path: Path, text: str | bytes, **settings: str) -> EvalConfig:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return EvalConfig(prompt_data=(("set", path),), **settings)  # type: ignore[arg-type]


def test_texts_and_chat_messages_are_read_with_their_labels_in_order(tmp_path: Path) -> None:
    chat = '[{"role": "user", "content": "hi"}]'
    config = config_for(
        tmp_path / "a.jsonl",
        f'{{"input": "2+2=", "label": 4}}\n\n{{"input": {chat}, "label": null, "more": 1}}\n',
    )
    (dataset,) = load_datasets(config)
    assert dataset.name == "set"
    assert [(e.index, e.prompt, e.label) for e in dataset.examples] == [
        (0, "2+2=", 4),
        (1, [{"role": "user", "content": "hi"}], None),
    ]
    assert [e.where for e in dataset.examples] == [
        f"{tmp_path / 'a.jsonl'}:1",
        f"{tmp_path / 'a.jsonl'}:3",
    ]


def test_the_keys_are_those_of_the_flags(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a.jsonl", '{"q": "x", "a": "y"}', input_key="q", label_key="a")
    (dataset,) = load_datasets(config)
    assert (dataset.examples[0].prompt, dataset.examples[0].label) == ("x", "y")


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"input": "x", "label": 1}\r\n')
    assert len(load_datasets(config)[0].examples) == 1


def test_every_bad_line_of_every_set_is_named_in_one_error(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"input": "x", "label": 1}\n{"input": "x"\n[1]\n{"prompt": "x"}\n')
    second.write_text('{"input": 3, "label": 1}\n{"input": "", "label": 1}\n')
    config = EvalConfig(prompt_data=(("a", first), ("b", second)))
    with pytest.raises(DatasetError) as caught:
        check_datasets(config)
    problems = caught.value.problems
    assert len(problems) == 6
    assert problems[0].startswith(f"{first}:2: not JSON at column ")
    assert problems[1].startswith(f"{first}:3: a JSON list; expected an object")
    assert problems[2] == f"{first}:4: no key 'input' (--eval-input-key); its keys: 'prompt'"
    assert problems[3].startswith(f"{first}:4: no key 'label' (--eval-label-key)")
    assert problems[4].startswith(f"{second}:1: key 'input' is a JSON number")
    assert problems[5].startswith(f"{second}:2: key 'input' is an empty text")
    assert str(caught.value).splitlines() == problems


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("[]", "is an empty list"),
        ('["hi"]', "has a JSON text as message 0"),
        ('[{"role": "user"}]', "has message 0 without a text 'content'"),
        ('[{"role": "user", "content": [1]}]', "has message 0 without a text 'content'"),
        ("null", "is a JSON null"),
        ("{}", "is a JSON object"),
        ("true", "is a JSON boolean"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_messages_is_named(
    tmp_path: Path, prompt: str, said: str
) -> None:
    config = config_for(tmp_path / "a.jsonl", f'{{"input": {prompt}, "label": 1}}')
    with pytest.raises(DatasetError, match=r"a\.jsonl:1: key 'input' ") as caught:
        load_datasets(config)
    assert said in str(caught.value)


def test_many_problems_are_counted_not_all_printed(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a.jsonl", "no\n" * 100)
    with pytest.raises(DatasetError) as caught:
        load_datasets(config)
    assert len(caught.value.problems) == 100
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_PROBLEMS_SHOWN + 1
    assert lines[-1] == "... and 80 more"


def test_a_file_that_is_empty_or_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no examples in it"):
        load_datasets(config_for(tmp_path / "a.jsonl", "\n\n"))
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        load_datasets(EvalConfig(prompt_data=(("set", tmp_path / "gone.jsonl"),)))
    with pytest.raises(DatasetError, match=r"a\.jsonl:1: not JSON"):
        load_datasets(config_for(tmp_path / "a.jsonl", b"\x80\x81\n"))
