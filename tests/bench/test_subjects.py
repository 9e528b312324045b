"""``--subject PATH.py:FACTORY``: how other dispatchers come in, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cli import UsageError
from bench.subjects import Setup, load_factories, opened

PROGRAM = """
calls = []

class Mine:
    def __init__(self, setup=None):
        self.setup = setup
    def dispatch(self, rollout_id): calls.append(rollout_id)
    def drain(self): calls.append("drain")
    def close(self): calls.append("close")

def without(): return Mine()
def with_setup(setup): return Mine(setup)
def with_default(setup=None): return Mine(setup)
def half(): return object()
def failing(): raise OSError("no license")
not_callable = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup("dispatch", tmp_path, tmp_path, tmp_path, 1.0)


def test_a_factory_is_given_the_setup_if_it_takes_an_argument(path: Path, setup: Setup) -> None:
    for name, given in (("without", None), ("with_setup", setup), ("with_default", setup)):
        (factory,) = load_factories([f"{path}:{name}"]).values()
        assert factory(setup).setup is given  # type: ignore[attr-defined]


def test_a_subject_is_named_after_its_file(path: Path) -> None:
    specs = [f"{path}:without", f"{path}:with_setup"]
    assert list(load_factories(specs)) == ["mine", "mine.with_setup"]


def test_no_subject_can_take_the_name_of_vime(tmp_path: Path) -> None:
    path = tmp_path / "vime.py"
    path.write_text(PROGRAM)
    assert list(load_factories([f"{path}:without"])) == ["vime.without"]


def test_a_subject_is_closed_also_when_a_measurement_fails(path: Path, setup: Setup) -> None:
    (factory,) = load_factories([f"{path}:without"]).values()
    subjects = []

    def measure() -> None:
        with opened(factory, setup) as subject:
            subjects.append(subject)
            subject.dispatch(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    assert type(subjects[0]).__init__.__globals__["calls"] == [1, "close"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("absent", "has no function 'absent'"),
        ("not_callable", "has no function 'not_callable'"),
        ("half", "returned object without dispatch, drain, close"),
        ("failing", "the factory failed: OSError: no license"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said_in_one_line(
    path: Path, setup: Setup, name: str, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        load_factories([f"{path}:{name}"])[path.stem](setup)


def test_a_file_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_like_this\n")
    with pytest.raises(UsageError, match=r"broken\.py failed: ModuleNotFoundError"):
        load_factories([f"{path}:make"])


def test_naming_a_subject_twice_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="named twice"):
        load_factories([f"{path}:without", f"{path}:without", f"{path}:without"])
