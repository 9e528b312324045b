"""The docs' page on flags, made from their definitions.

``python -m vime.eval.config.flags_doc docs/flags.md`` writes it; ``--check`` writes
nothing, and fails when the page is not what the definitions say.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.eval.config import file as config_file
from vime.eval.config.datasets import SETTING_DESTS
from vime.eval.config.flags import BY_DEST, FLAGS, Flag
from vime.fsm.generated import write_or_check
from vime.limits import LONGEST, LONGEST_S

_HEAD = """\
# Flags

Made from `vime/eval/config/flags.py` by `make docs`; do not edit.

`add_eval_arguments(parser)` adds every flag that the parser lacks. `EvalDispatcher.from_args`
reads them from any namespace, also one that another framework made: what it lacks has its
default, and so has what it leaves unset (`None`) of what is evaluated. Whatever is wrong is
reported together, each with the flag, its value and the remedy. Whole numbers are at most
2147483647 where nothing else is said; no number is infinite, and no path is empty.

Every `--vllm-X` of the framework has an `--eval-vllm-X` too, for the eval engines alone; a
switch can be said both ways (`--X`, `--no-X`).
"""

_FILE_HEAD = """\
## The file of `--eval-config`

{example}

Under `datasets`, an eval set can have settings of its own; what it does not say, the flags say.
With `--eval-prompt-data` on the command line those sets are evaluated, and a set of the same name
keeps its settings.

| Setting of a set | The flag for all sets |
|---|---|
"""


def page() -> str:
    """The whole page in Markdown."""
    groups: dict[str, list[Flag]] = {}
    for flag in FLAGS:
        groups.setdefault(flag.group, []).append(flag)
    parts = [_HEAD]
    for title, flags in groups.items():
        rows = "\n".join(map(_row, flags))
        parts.append(
            f"## {title.capitalize()}\n\n| Flag | Default | Meaning |\n|---|---|---|\n{rows}\n"
        )
    parts.append(_FILE_HEAD.format(example=_example()) + "\n".join(map(_setting, SETTING_DESTS)))
    return "\n".join(parts) + "\n"


def _row(flag: Flag) -> str:
    text = flag.help.replace("|", "\\|").replace("<", "&lt;")
    if flag.choices:
        text += f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}."
    elif flag.minimum is not None:
        text += f" At least {flag.minimum:g}."
    if flag.maximum is not None:
        text += f" At most {LONGEST if flag.maximum == LONGEST_S else flag.maximum}."
    return f"| `{flag.name}` | {_default(flag)} | {text} |"


def _default(flag: Flag) -> str:
    if flag.default is None:
        return "none"
    if flag.parse is bool:
        return "on" if flag.default else "off"
    return f"`{flag.default:g}`" if isinstance(flag.default, float) else f"`{flag.default}`"


def _setting(name: str) -> str:
    return f"| `{name}` | `{BY_DEST[SETTING_DESTS[name]].name}` |"


def _example() -> str:
    """The example in the reader's own docstring."""
    assert config_file.__doc__ is not None
    lines = config_file.__doc__.split("::\n", 1)[1].splitlines()
    code = [line.removeprefix("    ") for line in lines if line.startswith("    ")]
    rest = " ".join(line for line in lines if line and not line.startswith(" "))
    return "\n".join(["```yaml", *code, "```", "", rest.replace("``", "`")])


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page; 0 when it is as it should be."""
    return write_or_check(
        page(),
        argv,
        prog="python -m vime.eval.config.flags_doc",
        description=__doc__,
        source="vime/eval/config/flags.py",
    )


if __name__ == "__main__":
    sys.exit(main())
