"""What is checked before anything is started, and where the settings come from."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from vime.eval.config import ConfigError, EvalConfig
from vime.eval.fleet import devices, settings
from vime.eval.fleet.settings import FleetSettings, preflight


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def fleet(base: Path, **changes: Any) -> FleetSettings:
    return FleetSettings(**{"num_engines": 2, "base": base, "run_dir": Path("/run")} | changes)


def problems(wanted: FleetSettings) -> list[str]:
    with pytest.raises(ConfigError) as error:
        preflight(wanted)
    return error.value.problems


def test_a_machine_that_has_everything_passes(base: Path) -> None:
    preflight(fleet(base))


@pytest.mark.parametrize(
    ("module", "words"), [("vllm", "needs vLLM"), ("vllm_router", "needs vllm-router")]
)
def test_a_missing_package_is_named_with_the_remedy(
    module: str, words: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    (problem,) = problems(fleet(base))
    assert words in problem
    assert "pip install 'vime[vllm]'" in problem


def test_the_packages_are_looked_for_and_not_imported(base: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from vime.eval.fleet.settings import FleetSettings, preflight\n"
        f"preflight(FleetSettings(2, Path({str(base)!r}), Path('/run')))\n"
        "print(sorted({'torch', 'vllm', 'vllm_router', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    (problem,) = problems(fleet(tmp_path / "nowhere"))
    assert problem.startswith(f"--hf-checkpoint {tmp_path}/nowhere: cannot be read: ")
    assert "config.json: missing" in problem


def test_a_base_with_a_torn_config_is_named(base: Path) -> None:
    (base / "config.json").write_text('{"model_type": ')
    (problem,) = problems(fleet(base))
    assert problem.startswith(f"--hf-checkpoint {base}: cannot be read: ")


def test_a_base_whose_config_is_no_object_is_named(base: Path) -> None:
    (base / "config.json").write_text("[]")
    (problem,) = problems(fleet(base))
    assert problem == (
        f"--hf-checkpoint {base}: cannot be read: config.json: a JSON object was expected, not a list"
    )


def test_a_base_without_weights_is_named(base: Path) -> None:
    (base / "model.safetensors").unlink()
    (problem,) = problems(fleet(base))
    assert "no .safetensors file there" in problem


def test_a_base_with_a_dangling_weight_file_is_named(base: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").symlink_to(base / "gone")
    (problem,) = problems(fleet(base))
    assert "model.safetensors" in problem


def test_an_engine_setting_that_cannot_be_said_on_a_command_line_is_named(base: Path) -> None:
    (problem,) = problems(fleet(base, vllm={"max_model_len": object()}))
    assert problem.startswith("engine setting max_model_len=<object object")


def test_too_little_shared_memory_is_given_in_numbers(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    (problem,) = problems(fleet(base))
    assert "/dev/shm: 64 MB free and writable, and 2 engines need 128 MB" in problem
    assert "docker run --shm-size" in problem
    preflight(fleet(base, num_engines=1))


def test_no_shared_memory_at_all_is_said(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SHARED_MEMORY", base / "nowhere")
    (problem,) = problems(fleet(base))
    assert "No such file or directory; vLLM's processes talk through it" in problem


def test_too_few_gpus_are_counted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "visible_gpus", lambda: ["0", "1", "2"])
    (problem,) = problems(fleet(base, num_gpus_per_engine=2))
    assert "--eval-num-gpus 4: only 3 GPUs are visible here (0, 1, 2)" in problem
    preflight(fleet(base))


def test_too_few_cores_for_the_ranks_are_counted(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "visible_gpus", lambda: None)
    monkeypatch.setattr(settings, "allowed_cores", lambda: [0, 1])
    (problem,) = problems(fleet(base, num_gpus_per_engine=3))
    assert "--eval-num-gpus-per-engine 3" in problem
    assert "this process may use 2" in problem


def test_all_problems_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert len(problems(fleet(tmp_path / "nowhere"))) == 3


def test_the_settings_follow_the_flags(base: Path) -> None:
    config = EvalConfig(
        num_gpus=4,
        num_gpus_per_engine=2,
        hf_checkpoint=base,
        vllm={"max_model_len": 256},
        start_timeout_s=11,
        pin_timeout_s=12,
        min_engines=1,
        engine_max_restarts=7,
    )
    made = FleetSettings.from_config(config, Path("/run"))
    assert (made.num_engines, made.num_gpus_per_engine, made.num_gpus) == (2, 2, 4)
    assert (made.base, made.run_dir, made.vllm) == (base, Path("/run"), {"max_model_len": 256})
    assert (made.start_timeout_s, made.pin_timeout_s) == (11, 12)
    assert (made.min_engines, made.num_needed, made.max_restarts) == (1, 1, 7)
    assert made.host == "127.0.0.1"


def test_flags_that_ask_for_no_fleet_make_none(base: Path) -> None:
    with pytest.raises(ConfigError, match="--eval-num-gpus 0"):
        FleetSettings.from_config(EvalConfig(hf_checkpoint=base), Path("/run"))


# --- devices


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_counted_by_their_devices_unless_the_environment_names_them() -> None:
    assert devices.visible_gpus({}) == ["0", "1", "2", "3"]
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}) == ["3", "GPU-abc"]
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_machine_without_gpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_the_fleet_takes_the_last_gpus_and_each_engine_its_own() -> None:
    gpus = [str(n) for n in range(8)]
    taken = [
        devices.device_environment(index, 2, 2, gpus, [])["CUDA_VISIBLE_DEVICES"]
        for index in range(2)
    ]
    assert taken == ["4,5", "6,7"]


@pytest.mark.parametrize(
    ("num_engines", "num_ranks", "num_cores", "bound", "readers"),
    [
        (1, 1, 8, [None], [None]),  # vLLM decides
        (1, 2, 5, ["0,1|2,3"], [None]),
        (2, 1, 1, [None] * 2, [None] * 2),  # too few to share them out
        (2, 1, 2, ["0", "1"], ["", ""]),
        (2, 1, 9, ["0,1,2", "4,5,6"], ["3", "7"]),  # one of each share is left to the server
        (2, 2, 4, ["0|1", "2|3"], ["", ""]),
        (2, 2, 11, ["0,1|2,3", "5,6|7,8"], ["4", "9"]),
        (3, 2, 5, ["0,1|2,3"] * 3, [None] * 3),
    ],
)
def test_without_gpus_engines_and_their_ranks_share_the_cores_out(
    num_engines: int, num_ranks: int, num_cores: int, bound: list[str], readers: list[str]
) -> None:
    cores = list(range(num_cores))
    given = [
        devices.device_environment(index, num_engines, num_ranks, None, cores)
        for index in range(num_engines)
    ]
    assert [g.get("VLLM_CPU_OMP_THREADS_BIND") for g in given] == bound
    assert [g.get("VIME_READER_CORES") for g in given] == readers
    assert [g.get("VIME_SCARCE_CORES") for g in given] == ["1"] * num_engines


def test_a_detached_fleet_is_refused_on_one_machine(base: Path) -> None:
    from vime.eval.site import ThisMachine

    config = EvalConfig(num_gpus=2, hf_checkpoint=base, detached=True)
    with pytest.raises(ConfigError, match="--eval-detached: engines outlive their driver on a Ray"):
        ThisMachine().check(config)
