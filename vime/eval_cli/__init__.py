"""``vime eval`` and ``vime snapshot``: evaluations and checkpoints, without any training."""

from __future__ import annotations

from typing import Any

from vime.eval_cli import evaluate, snapshot

EPILOG = "Exit status: 0 the checkpoint is whole, 1 it is not, 2 bad usage or unreadable input."


def add_commands(commands: Any) -> None:
    """Add both commands to ``commands``, the subparsers of ``vime``."""
    evaluate.setup(
        commands.add_parser(
            "eval",
            help="evaluate existing checkpoints, one after the other",
            description="Pins and scores existing checkpoints, one after the other.",
            epilog="Exit status: 0 all were scored, 1 some were not, 2 bad usage.",
        )
    )
    parser = commands.add_parser("snapshot", help="look at a checkpoint: verify")
    inner = parser.add_subparsers(metavar="COMMAND", required=True)
    snapshot.setup(
        inner.add_parser(
            "verify",
            help="whether a checkpoint is whole, and what is wrong with it",
            description="Says whether a directory is a whole checkpoint, and what is wrong if not.",
            epilog=EPILOG,
        )
    )
