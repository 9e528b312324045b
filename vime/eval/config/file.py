"""The file of ``--eval-config``: any flag, and settings for each eval set, in YAML.

::

    eval_num_gpus: 2
    eval_interval: 20
    datasets:                      # in the order in which they are evaluated
      - name: math@500             # the first 500 examples
        path: math.jsonl
        reward: math
        n_samples_per_prompt: 8
        temperature: 0.7
      - {name: trivia, path: trivia.parquet, reward: f1}

Flags are named without the dashes in front; dashes and underscores within are the same. Paths
are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vime.eval.config.datasets import SETTING_DESTS, name_and_count
from vime.eval.config.flags import BY_DEST, Flag

_DATASETS = "datasets"
_ENGINE_PREFIX = "eval_vllm_"


@dataclass
class ConfigFile:
    """What the file says.

    Attributes:
        values: dest of a flag → its value; ``eval_dataset_settings``: set → its own settings.
        problems: one sentence for each thing that is wrong; ``values`` is without it.
        was_read: whether it could be read at all.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    was_read: bool = True


def read_config_file(path: str | Path) -> ConfigFile:
    """Read the file; what is wrong with it is listed, never raised."""
    file = ConfigFile(was_read=False)
    where = f"--eval-config {path}"
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506 -- a SafeLoader
    except OSError as error:
        file.problems.append(f"{where}: cannot be read: {error.strerror}")
        return file
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        file.problems.append(f"{where}: cannot be read: {error}")
        return file
    file.was_read = True
    if not isinstance(document, Mapping):
        if document is not None:
            file.problems.append(f"{where}: expected a mapping of flags to values")
        return file
    for key, value in document.items():
        if key == _DATASETS:
            _read_datasets(value, where, file)
        else:
            _read_flag(str(key), value, where, file)
    return file


class _Loader(yaml.SafeLoader):
    """Takes no key twice: YAML forbids it, and PyYAML takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See PyYAML.

        Raises:
            yaml.constructor.ConstructorError: also for a key that was there before.
        """
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_flag(key: str, value: Any, where: str, file: ConfigFile) -> None:
    dest = _dest(key)
    if dest == "eval_config" or (dest not in BY_DEST and not dest.startswith(_ENGINE_PREFIX)):
        names = [d for d in BY_DEST if d != "eval_config"]
        file.problems.append(f"{where}: unknown {key!r}{_did_you_mean(dest, names)}")
    elif dest in file.values:
        file.problems.append(f"{where}: {key!r} is given twice")
    elif value is None:
        return  # as if it were not there
    elif dest == "eval_prompt_data":
        file.values[dest] = _words_of_sets(value)
    elif dest not in BY_DEST:
        file.values[dest] = value
    else:
        flag = BY_DEST[dest]
        good, said = _read_value(flag, value)
        if said is None:
            file.values[dest] = good
        else:
            file.problems.append(f"{where}: {dest} {said}")


def _read_value(flag: Flag, value: Any) -> tuple[Any, str | None]:
    """The value as the flag wants it, and what is wrong with it."""
    if flag.many:
        many = value if isinstance(value, list) else [value]
        return [str(word) for word in many], None
    if isinstance(value, (list, Mapping)):
        return value, f"{value!r:.200}: expected {flag.expected}"
    if flag.parse is str:
        return str(value), flag.problem(str(value))
    if isinstance(value, str) and flag.parse is not bool:  # YAML takes 1e-3 for a word
        value = flag.read(value)
    return value, flag.problem(value)


def _words_of_sets(value: Any) -> list[str]:
    """NAME PATH pairs from a list of them, flat or nested, or from a mapping."""
    if isinstance(value, Mapping):
        return [str(word) for pair in value.items() for word in pair]
    return [str(word) for word in _flat(value)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _read_datasets(value: Any, where: str, file: ConfigFile) -> None:
    if not isinstance(value, list):
        file.problems.append(f"{where}: datasets {value!r:.200}: expected a list of mappings")
        return
    found: dict[str, dict[str, Any]] = {}
    pairs: list[str] = []
    for number, entry in enumerate(value):
        here = f"{where}: datasets[{number}]"
        if not isinstance(entry, Mapping) or not {"name", "path"} <= entry.keys():
            file.problems.append(f"{here}: {entry!r:.200}: expected a mapping with name and path")
            continue
        if entry["name"] is None or entry["path"] is None:
            file.problems.append(f"{here}: {entry!r:.200}: name and path cannot be empty")
            continue
        pairs += [str(entry["name"]), str(entry["path"])]
        found[name_and_count(str(entry["name"]))[0]] = _settings(entry, here, file)
    file.values["eval_dataset_settings"] = found
    file.values.setdefault("eval_prompt_data", pairs)


def _settings(entry: Mapping[Any, Any], here: str, file: ConfigFile) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in entry.items():
        name = _dest(str(key))
        if name in ("name", "path") or value is None:
            continue
        if name not in SETTING_DESTS:
            near = _did_you_mean(name, SETTING_DESTS)
            file.problems.append(f"{here}: unknown {key!r}{near}")
            continue
        good, said = _read_value(BY_DEST[SETTING_DESTS[name]], value)
        if said is None:
            settings[name] = good
        else:
            file.problems.append(f"{here}: {name} {said}")
    return settings


def _dest(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ": expected the name of a flag"
