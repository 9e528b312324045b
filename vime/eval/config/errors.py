"""What is raised when flags are wrong."""

from __future__ import annotations


class ConfigError(ValueError):
    """One or more flags are wrong; ``problems`` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
