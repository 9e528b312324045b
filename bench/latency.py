"""``latency``: from the call of ``dispatch`` to the outcome in the tracker, stage by stage.

A whole run on one real engine, one point at a time. Beside each point, the parts that nobody can
avoid are measured by themselves: a copy of the weights, writing that copy with safetensors, raw
``reload_weights`` of the same files, and the bare requests for the same answers.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.cli import UsageError, positive, positive_number
from bench.clients import Work, client_process
from bench.engines import Engines
from bench.figures import Report, paired_ratio
from bench.json_lines import json_lines
from bench.models import make_model_of, make_tokenizer, write_checkpoint
from bench.scratch import Scratch, scratch
from bench.stall import BareCopy
from vime.eval.assembly import Parts, assemble
from vime.eval.config import ConfigError, EvalConfig
from vime.eval.contracts import Outcome
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.fleet.supervisor import FleetStartError
from vime.fsm.trace import Record

_PARTS = ("copy", "write", "load", "generation")
_TIMEOUT_S = 120.0

#: Stage → the records of a point between which it lies.
_STAGES = {
    "export": ("export", "pin"),
    "pin": ("pin", "run"),
    "run": ("run", "finish"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--gigabytes", type=positive_number, default=0.2, metavar="G",
        help="size of the model's weights in GB, bfloat16 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=positive, default=64, metavar="N",
        help="samples of an evaluation (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=positive, default=16, metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--points", type=positive, default=10, metavar="N",
        help="points, after one of warm-up (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    with scratch(int(6e9 * args.gigabytes)) as places:
        model = make_model_of(args.gigabytes)
        checkpoint = write_checkpoint(model, places.memory / "base")
        config = _config(args, places, checkpoint)
        try:
            taken = _measure(config, model, places, args)
        except (ConfigError, FleetStartError) as error:
            raise UsageError(f"real engines cannot run here: {error}") from error
    report = Report("latency")
    for name, seconds in taken.items():
        subject, _, what = name.partition("/")
        report.add(subject, what, "s", seconds)
    sums = [sum(parts) for parts in zip(*(taken[f"bare/{p}"] for p in _PARTS), strict=True)]
    report.add("bare", "sum", "s", sums)
    report.ratios["latency_over_parts"] = paired_ratio(taken["vime/total"], sums)
    return report


def _config(args: argparse.Namespace, places: Scratch, checkpoint: Path) -> EvalConfig:
    prompts = places.disk / "sums.jsonl"
    rows = ({"input": f"{n} + {n} =", "label": str(2 * n)} for n in range(args.samples))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalConfig(
        num_gpus=1,
        hf_dir=places.memory / "staging",
        hf_checkpoint=checkpoint,
        interval=1,
        prompt_data=(("sums", prompts),),
        max_response_len=args.tokens,
        run_dir=places.disk / "run",
        uses_snapshots=True,
    )


class _Arrival:
    """A tracker that says when an outcome has come."""

    def __init__(self) -> None:
        self._outcomes: queue.SimpleQueue[tuple[float, Outcome]] = queue.SimpleQueue()

    def __call__(self, outcome: Outcome) -> None:
        self._outcomes.put((time.perf_counter(), outcome))

    def wait(self) -> float:
        """When the next outcome has come.

        Raises:
            UsageError: it is none with a score, or none came.
        """
        try:
            at, outcome = self._outcomes.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            raise UsageError(f"no outcome within {_TIMEOUT_S:g} s") from None
        if outcome.state != "done":
            raise UsageError(f"a point without a score: {outcome.reason}: {outcome.detail}")
        return at


def _measure(
    config: EvalConfig, model: Any, places: Scratch, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of every stage and of every part, one of each a point."""
    arrival = _Arrival()
    exporter = (model, make_tokenizer())
    parts = assemble(config, argparse.Namespace(), exporter, None, [arrival])
    assert parts.fleet is not None, "one engine"
    engines = Engines(parts.fleet.tokens, parts.trace)
    records: list[Record] = []
    parts.trace.subscribe(records.append)
    taken: dict[str, list[float]] = defaultdict(list)
    with EvalDispatcher(config, parts, None) as dispatcher:
        dispatcher.wait_until_ready()
        with client_process("bare", _work(config, parts, engines)) as ask_all:
            bare = _BareParts(model, places.memory, parts, engines, ask_all)
            for number in range(1, 2 + args.points):
                for name, seconds in bare.measure().items():
                    taken[name].append(seconds)
                records.clear()
                began = time.perf_counter()
                dispatcher.dispatch(number)
                taken["vime/stall"].append(time.perf_counter() - began)
                taken["vime/total"].append(arrival.wait() - began)
                _enter_stages(taken, records)
                bare.snapshot = places.memory / "staging" / f"step_{number}"
    return {name: seconds[1:] for name, seconds in taken.items()}  # the first is the warm-up


def _enter_stages(taken: dict[str, list[float]], records: list[Record]) -> None:
    moments = {r.trigger: r.mono_ns / 1e9 for r in records if r.machine == "point"}
    for stage, (first, last) in _STAGES.items():
        taken[f"vime/{stage}"].append(moments[last] - moments[first])


def _work(config: EvalConfig, parts: Parts, engines: Engines) -> Work:
    assert parts.fleet is not None
    (_, path), *_ = config.prompt_data
    prompts = [row["input"] for row in json_lines(path)]
    (url,) = engines.urls.values()
    return Work(
        base_url=url,
        api_key=parts.fleet.tokens.api_key,
        model="eval",
        tokenizer=str(config.hf_checkpoint),
        prompts=prompts,
        token_ids=make_tokenizer()(prompts).input_ids,
        max_tokens=config.max_response_len,
        concurrency=config.concurrency,
    )


class _BareParts:
    """What every evaluation of a checkpoint must do at least.

    Attributes:
        snapshot: what is loaded: the last checkpoint that vime has written.
    """

    def __init__(
        self,
        model: Any,
        memory: Path,
        parts: Parts,
        engines: Engines,
        ask_all: Callable[[], float],
    ) -> None:
        assert parts.fleet is not None
        self.snapshot = parts.fleet.settings.base
        self._token = parts.fleet.tokens.control
        self._engines = engines
        self._ask_all = ask_all
        self._copy = BareCopy(model)
        self._tensors = {name: p.detach() for name, p in model.named_parameters()}
        self._path = memory / "bare.safetensors"

    def measure(self) -> dict[str, float]:
        """Seconds of each part."""
        return {
            "bare/copy": _seconds(lambda: self._copy.dispatch(0)),
            "bare/write": _seconds(self._write),
            "bare/load": _seconds(self._load),
            "bare/generation": self._ask_all(),
        }

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._tensors, self._path)

    def _load(self) -> None:
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(self.snapshot)}}
        headers = {"Authorization": f"Bearer {self._token}"}
        for url in self._engines.urls.values():
            answer = httpx.post(
                f"{url}/collective_rpc", json=order, headers=headers,
                timeout=_TIMEOUT_S, trust_env=False,
            )  # fmt: skip
            answer.raise_for_status()


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
