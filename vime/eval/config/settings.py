"""The one frozen config made of the flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vime.eval.config.datasets import SETTING_DESTS, DatasetSettings, name_and_count
from vime.eval.config.errors import ConfigError
from vime.eval.config.flags import BY_DEST, value_of
from vime.eval.config.layout import eval_group
from vime.eval.config.sizes import parse_size
from vime.eval.config.validation import validate_eval_args


@dataclass(frozen=True)
class EvalConfig:
    """Every setting of an evaluation, validated; times are in seconds.

    Made by :meth:`from_args`; see ``docs/flags.md`` for each field's meaning.
    """

    num_gpus: int = 0
    num_gpus_per_engine: int = 1
    detached: bool = False
    hf_dir: Path | None = None
    max_in_flight: int = 2
    overflow_policy: str = "backpressure"
    keep_snapshots: int = 2
    max_captures: int = 2
    max_shard_size: str = "5GB"
    interval: int | None = None
    function_path: str | None = None
    prompt_data: tuple[tuple[str, Path], ...] = ()
    dataset_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    input_key: str = "input"
    label_key: str = "label"
    n_samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_len: int = 256
    max_prompt_len: int | None = None
    overlong_prompt: str = "fail"
    apply_chat_template: bool = False
    system_prompt: str | None = None
    reward: str = "exact"
    custom_rm_path: str | None = None
    reward_key: str | None = None
    reward_batch_size: int = 1
    seed: int = 0
    concurrency: int = 64
    export_timeout_s: float = 600.0
    pin_timeout_s: float = 600.0
    eval_timeout_s: float = 3600.0
    start_timeout_s: float = 600.0
    backpressure_timeout_s: float = 3600.0
    drain_timeout_s: float = 7200.0
    dispose_timeout_s: float = 30.0
    min_engines: int | None = None
    engine_max_restarts: int = 3
    verify: str = "full"
    hf_checkpoint: Path | None = None
    ci_test: bool = False
    run_dir: Path | None = None
    resume: bool = False
    vllm: dict[str, Any] = field(default_factory=dict)
    uses_snapshots: bool = False

    def __post_init__(self) -> None:
        """See that each setting by itself is one that its flag could have.

        Raises:
            ConfigError: naming every wrong one by its flag.
        """
        problems = []
        for name in (f.name for f in fields(self)):
            flag = BY_DEST.get(_dest(name) or "")
            if flag is not None and not flag.many:
                problem = flag.problem(getattr(self, name))
                problems += [f"{flag.name} {problem}"] if problem else []
        if problems:
            raise ConfigError(problems)

    @property
    def num_engines(self) -> int:
        """How many engines the fleet has."""
        return self.num_gpus // self.num_gpus_per_engine

    @property
    def max_shard_bytes(self) -> int:
        """Most bytes of one weight file."""
        return parse_size(self.max_shard_size)

    @property
    def datasets(self) -> tuple[DatasetSettings, ...]:
        """The settings of each eval set, in the order of ``prompt_data``."""
        common = {name: getattr(self, name) for name in SETTING_DESTS}
        return tuple(
            DatasetSettings(name, path, **{**common, **self._overrides(name)})
            for name, path in self.prompt_data
        )

    def _overrides(self, name: str) -> dict[str, Any]:
        own = self.dataset_overrides.get(name, {})
        # A set that names its reward does not want the one of all others.
        return {"custom_rm_path": None, **own} if "reward" in own else own

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvalConfig:
        """Validate ``args`` and freeze what they say.

        Raises:
            ConfigError: naming every wrong flag with its value and the remedy.
        """
        validate_eval_args(args)
        get = value_of(args)
        group = eval_group(args)
        values = {f.name: get(dest) for f in fields(cls) if (dest := _dest(f.name)) is not None}
        prompt_data, overrides = _datasets(args)
        return cls(
            **{
                **values,
                "hf_dir": _path(get("eval_hf_dir")),
                "hf_checkpoint": _path(get("hf_checkpoint")),
                "run_dir": _path(get("eval_run_dir")),
                "num_gpus_per_engine": (
                    values["num_gpus_per_engine"] if group is None else group.num_gpus_per_engine
                ),
                "prompt_data": prompt_data,
                "dataset_overrides": overrides,
            },
            vllm={} if group is None else dict(group.settings),
            uses_snapshots=args.eval_uses_snapshots,
        )


def _dest(field_name: str) -> str | None:
    """The flag of a field; ``None`` for one that is made of several."""
    name = SETTING_DESTS.get(field_name, field_name.removesuffix("_s"))
    return next((dest for dest in (f"eval_{name}", name) if dest in BY_DEST), None)


def _datasets(
    args: argparse.Namespace,
) -> tuple[tuple[tuple[str, Path], ...], dict[str, dict[str, Any]]]:
    """``prompt_data``, and what differs for each set: the YAML's settings, and N of NAME@N."""
    pairs = value_of(args)("eval_prompt_data") or []
    given: dict[str, dict[str, Any]] = getattr(args, "eval_dataset_settings", None) or {}
    sets, overrides = [], {}
    for word, path in zip(pairs[::2], pairs[1::2], strict=True):
        name, take = name_and_count(word)
        sets.append((name, Path(path)))
        own = {**given.get(name, {}), **({} if take is None else {"take": take})}
        if own:
            overrides[name] = own
    return tuple(sets), overrides


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
