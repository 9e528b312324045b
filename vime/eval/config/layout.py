"""Which models the inference engines serve, on how many GPUs: ``--vllm-config``, or the flags.

The YAML is a list under ``vllm``::

    vllm:
      - name: default              # the rollout engines
        server_groups:
          - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 2}
      - name: eval                 # the dedicated fleet: exactly one, of --eval-num-gpus GPUs
        update_weights: false
        num_gpus_per_engine: 1
        server_groups:
          - {num_gpus: 2, overrides: {max_model_len: 32768}}

What an entry does not say, its model says, and what that does not say, the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vime.eval.config.engines import (
    inherited_settings,
    number_problems,
    own_settings,
    owned_problems,
)
from vime.eval.config.errors import ConfigError
from vime.eval.config.gpu_counts import GpuCounts, gpu_counts

EVAL = "eval"

#: ``regular`` engines do everything; ``prefill`` and ``decode`` share a request's work;
#: ``placeholder`` holds GPUs without engines.
WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")

_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass(frozen=True)
class ServerGroup:
    """Engines of one kind.

    Attributes:
        worker_type: one of :data:`WORKER_TYPES`.
        num_gpus: of all its engines together.
        num_gpus_per_engine: their tensor-parallel size.
        settings: every vLLM setting of its engines, whatever source it comes from.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        """How many engines it has."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class Model:
    """One model and the engines that serve it.

    Attributes:
        name: what people call it; ``eval`` is the dedicated fleet.
        model_path: the checkpoint that its engines start from; ``None`` where nothing says.
        update_weights: whether training updates its weights.
        groups: its engines.
    """

    name: str
    model_path: Path | None
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of all its engines together."""
        return sum(group.num_gpus for group in self.groups)

    @property
    def num_engines(self) -> int:
        """How many engines it has."""
        return sum(group.num_engines for group in self.groups)


@dataclass(frozen=True)
class VllmLayout:
    """Every model of a run.

    Attributes:
        models: in the order of the YAML; the eval model may stand anywhere.
    """

    models: tuple[Model, ...]

    @property
    def eval_model(self) -> Model | None:
        """The dedicated fleet, where there is one."""
        return next((model for model in self.models if model.name == EVAL), None)

    @property
    def num_gpus(self) -> int:
        """GPUs of all models together."""
        return sum(model.num_gpus for model in self.models)

    def table(self) -> str:
        """The layout for people, one line a server group, and the sum."""
        rows = [("model", "worker type", "GPUs", "GPUs/engine", "engines")]
        for model in self.models:
            rows += [
                (
                    model.name,
                    group.worker_type,
                    str(group.num_gpus),
                    str(group.num_gpus_per_engine),
                    str(group.num_engines),
                )
                for group in model.groups
            ] or [(model.name, "-", "0", "-", "0")]
        rows.append(("sum", "", str(self.num_gpus), "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def vllm_layout(args: argparse.Namespace) -> VllmLayout:
    """The models that the flags, or the YAML that they name, ask for.

    Reads ``vllm_config``, ``rollout_num_gpus``, ``rollout_num_gpus_per_engine``,
    ``prefill_num_servers``, ``hf_checkpoint``, ``eval_num_gpus``,
    ``eval_num_gpus_per_engine``, and every ``vllm_*`` and ``eval_vllm_*``; see
    :func:`vime.eval.config.gpu_counts.gpu_counts` for the defaults.

    Where the number of rollout GPUs is not known, the sum of a YAML is not checked.

    Raises:
        ConfigError: naming everything that is wrong, with the table where numbers do not fit.
    """
    counts = gpu_counts(args)
    path = getattr(args, "vllm_config", None)
    if path is None:
        entries = [*_rollout_entries(args, counts), *_eval_entries(counts)]
        return _layout(args, counts, entries, "the flags")
    source = f"--vllm-config {path}"
    return _layout(args, counts, _read(Path(path), source), source)


def eval_group(args: argparse.Namespace) -> ServerGroup | None:
    """The fleet as one group of equal engines; ``None`` without a fleet.

    Raises:
        ConfigError: see :func:`vllm_layout`.
    """
    counts = gpu_counts(args)
    if not counts.eval:
        return None
    if getattr(args, "vllm_config", None) is None:  # the rollout engines are not our business
        alone = dataclasses.replace(counts, rollout=None)
        layout = _layout(args, alone, _eval_entries(counts), "the flags")
    else:
        layout = vllm_layout(args)
    model = layout.eval_model
    assert model is not None, "a layout that fits has a fleet"
    first = model.groups[0]
    return ServerGroup("regular", model.num_gpus, first.num_gpus_per_engine, first.settings)


def _layout(
    args: argparse.Namespace, counts: GpuCounts, entries: list[Any], source: str
) -> VllmLayout:
    reader = _Reader(args, counts, source)
    layout = VllmLayout(tuple(reader.models(entries)))
    problems = reader.problems or [*_fit_problems(layout, counts, source)]
    if problems:
        raise ConfigError(problems)
    return layout


def _rollout_entries(args: argparse.Namespace, counts: GpuCounts) -> list[Any]:
    """The entries of the rollout engines that a YAML would have, were there one."""
    rollout = counts.rollout or 0
    servers = getattr(args, "prefill_num_servers", None) or 0
    prefill = servers * counts.rollout_per_engine
    if prefill and prefill >= rollout:
        raise ConfigError(
            [
                f"--prefill-num-servers {servers} takes {prefill} of --rollout-num-gpus "
                f"{rollout}: nothing is left for decoding"
            ]
        )
    groups = [
        {"worker_type": "prefill", "num_gpus": prefill},
        {"worker_type": "decode" if prefill else "regular", "num_gpus": rollout - prefill},
    ]
    groups = [group for group in groups if group["num_gpus"]]
    return [{"name": "default", "server_groups": groups}] if groups else []


def _eval_entries(counts: GpuCounts) -> list[Any]:
    groups = [{"num_gpus": counts.eval}]
    return [{"name": EVAL, "update_weights": False, "server_groups": groups}] if counts.eval else []


def _read(path: Path, source: str) -> list[Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{source}: cannot be read: {error}"]) from error
    entries = document.get("vllm") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError([f"{source}: cannot be read as a layout: expected a list under 'vllm'"])
    return entries


def _fit_problems(layout: VllmLayout, counts: GpuCounts, source: str) -> Iterator[str]:
    """Whether the models are those that the numbers of GPUs ask for."""
    evals = [model for model in layout.models if model.name == EVAL]
    wanted = 1 if counts.eval else 0
    if len(evals) != wanted:
        yield (
            f"{source}: {len(evals)} models are named 'eval'; with --eval-num-gpus {counts.eval} "
            f"{'exactly one' if wanted else 'none'} must be:\n{layout.table()}"
        )
    elif evals and evals[0].num_gpus != counts.eval:
        yield (
            f"{source}: the model 'eval' covers {evals[0].num_gpus} GPUs, and --eval-num-gpus is "
            f"{counts.eval}; make them equal:\n{layout.table()}"
        )
    elif counts.rollout is not None and layout.num_gpus != counts.rollout + counts.eval:
        yield (
            f"{source}: its models have {layout.num_gpus} GPUs, expected the sum of "
            f"--rollout-num-gpus {counts.rollout} and --eval-num-gpus {counts.eval}:\n"
            f"{layout.table()}"
        )


class _Reader:
    """Makes models of the YAML's entries; collects what is wrong with them.

    Attributes:
        problems: one sentence each.
    """

    def __init__(self, args: argparse.Namespace, counts: GpuCounts, source: str) -> None:
        self.problems: list[str] = []
        self._args = args
        self._counts = counts
        self._source = source

    def models(self, entries: list[Any]) -> Iterator[Model]:
        """One model an entry, as far as it can be read."""
        for number, entry in enumerate(entries):
            where = f"{self._source}: model {number}"
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                self.problems.append(f"{where}: {entry!r:.200}: expected a mapping with a name")
                continue
            yield self._model(entry, f"{self._source}: model '{entry['name']}'")

    def _model(self, entry: dict[str, Any], where: str) -> Model:
        self._only_known(entry, _MODEL_KEYS, where)
        is_eval = entry["name"] == EVAL
        base = getattr(self._args, "hf_checkpoint", None)
        path = entry.get("model_path") or base
        update = entry.get("update_weights")
        if update is None:
            update = not is_eval and path == base
        elif not isinstance(update, bool):
            self.problems.append(f"{where}: update_weights {update!r}: expected true or false")
        groups = entry.get("server_groups") or []
        if not isinstance(groups, list):
            self.problems.append(f"{where}: server_groups {groups!r:.200}: expected a list")
            groups = []
        model = Model(
            entry["name"],
            None if path is None else Path(path),
            bool(update),
            tuple(self._groups(groups, entry, where)),
        )
        if is_eval:
            self._check_eval(model, groups, where, base)
        return model

    def _groups(
        self, groups: list[Any], model: dict[str, Any], where: str
    ) -> Iterator[ServerGroup]:
        is_eval = model["name"] == EVAL
        counts = self._counts
        by_flag = counts.eval_per_engine if is_eval else counts.rollout_per_engine
        for number, entry in enumerate(groups):
            here = f"{where}, server group {number}"
            if not isinstance(entry, dict):
                self.problems.append(f"{here}: {entry!r:.200}: expected a mapping")
                continue
            self._only_known(entry, _GROUP_KEYS, here)
            per_engine = self._count(
                {"num_gpus_per_engine": by_flag, **_said(model), **_said(entry)},
                "num_gpus_per_engine",
                here,
            )
            num_gpus = self._count(entry, "num_gpus", here)
            kind = entry.get("worker_type", "regular")
            if kind not in WORKER_TYPES:
                expected = ", ".join(WORKER_TYPES)
                self.problems.append(f"{here}: worker_type {kind!r}: expected one of {expected}")
            if num_gpus % per_engine:
                self.problems.append(
                    f"{here}: num_gpus {num_gpus} is no multiple of num_gpus_per_engine "
                    f"{per_engine}: every engine needs its full tensor-parallel size"
                )
            settings = self._settings(entry, per_engine, here, is_eval=is_eval)
            yield ServerGroup(str(kind), num_gpus, per_engine, MappingProxyType(settings))

    def _settings(
        self, entry: dict[str, Any], per_engine: int, where: str, *, is_eval: bool
    ) -> dict[str, Any]:
        """The precedence: ``overrides``, then ``--eval-vllm-*``, then ``--vllm-*``."""
        overrides = entry.get("overrides") or {}
        if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
            self.problems.append(f"{where}: overrides {overrides!r:.200}: expected a mapping")
            return {}
        overrides = {name.replace("-", "_"): value for name, value in overrides.items()}
        same = per_engine == self._counts.rollout_per_engine
        settings = inherited_settings(self._args, same_tp_size=same)
        if is_eval:
            settings |= own_settings(self._args)
            self.problems += owned_problems(overrides, f"{where}, overrides")
            self.problems += number_problems(overrides, f"{where}, overrides")
        return settings | overrides

    def _check_eval(self, model: Model, groups: list[Any], where: str, base: Any) -> None:
        """A fleet is equal engines of the base checkpoint, which training never writes to."""
        own = own_settings(self._args)
        self.problems += owned_problems(own, "--eval-vllm-*")
        self.problems += number_problems(own, "--eval-vllm-*")
        inherited = inherited_settings(self._args, same_tp_size=True)
        self.problems += number_problems(inherited, "--vllm-*")
        if model.update_weights:
            self.problems.append(
                f"{where}: update_weights is true; the fleet loads exported snapshots, and never "
                "joins training's weight updates: set it to false"
            )
        if base is not None and model.model_path != Path(base):
            self.problems.append(
                f"{where}: model_path {model.model_path} is not --hf-checkpoint {base}, which "
                "every snapshot is checked against: remove it"
            )
        kinds = sorted({group.worker_type for group in model.groups} - {"regular"})
        if kinds:
            self.problems.append(
                f"{where}: worker_type {', '.join(kinds)}: the engines of a fleet are 'regular'"
            )
        if (
            len({(g.num_gpus_per_engine, repr(sorted(g.settings.items()))) for g in model.groups})
            > 1
        ):
            self.problems.append(
                f"{where}: its {len(groups)} server groups differ in num_gpus_per_engine or "
                "overrides: every point is pinned on all engines of a fleet, which must be equal"
            )

    def _only_known(self, entry: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        unknown = [str(key) for key in entry if key not in known]
        if unknown:
            self.problems.append(
                f"{where}: unknown {', '.join(unknown)}: expected {', '.join(known)}"
            )

    def _count(self, entry: dict[str, Any], name: str, where: str) -> int:
        """A whole number of at least 1; 1 where it is none, so that reading can go on."""
        value = entry.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.problems.append(f"{where}: {name} {value!r}: expected a whole number of at least 1")
        return 1


def _said(entry: dict[str, Any]) -> dict[str, Any]:
    value = entry.get("num_gpus_per_engine")
    return {} if value is None else {"num_gpus_per_engine": value}
