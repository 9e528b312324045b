"""A driver on a Ray cluster, to be killed: says what it has, then waits for its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.ray.clusters import arguments, make_exporter
from vime.ray import RayEvalDispatcher


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(address: str, root: Path, run: str, flags: dict[str, Any]) -> None:
    import ray

    ray.init(address=address, log_to_driver=False)
    args = arguments(root, run, **flags)
    with RayEvalDispatcher.from_args(args, exporter=make_exporter(0)) as evals:
        evals.trace.subscribe(
            lambda record: say(id=record.id, dest=record.dest, detail=record.detail)
        )
        evals.wait_until_ready()
        evals.dispatch(1).result()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
