"""``runner``: samples a second of the EvalRunner, beside a bare client and beside lm-eval.

All three ask for the same greedy answers to the same prompts, with as many requests at once, each
from a process of its own, in turn; who begins changes from round to round, and ratios are between
evaluations of one round. The EvalRunner's time is that of a whole evaluation: requests, the proof
of each answer's weights, decoding, rewards, and the samples file. The others' is that of their
requests alone; the bare client uses the HTTP library that vime uses, and asks as vime does.

They ask a real engine, behind its router, and a server that answers at once, where the clients
are all that is measured. An evaluation takes seconds on either, for which the latter is asked more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anyio

from bench.cli import UsageError, positive
from bench.clients import Work, client_process
from bench.engines import fleet_settings, running_fleet, staged
from bench.figures import Report, paired_ratio
from bench.models import make_tokenizer, write_tiny_checkpoint
from bench.scratch import Scratch, scratch
from bench.simulated_fleet import ANSWER_TOKENS, simulated_server
from vime.eval.actor import ProcessActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint, PinProof, Snapshot
from vime.eval.runner.datasets import load_datasets
from vime.eval.runner.runner import RunnerEvaluator
from vime.fsm.trace import Trace

Seconds = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--server", nargs="+", choices=("real", "instant"), default=["real", "instant"],
        help="what is asked (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=positive, default=1024, metavar="N",
        help="samples of an evaluation on the real engine (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--samples-instant", type=positive, default=8192, metavar="N",
        help="samples of one on the server that answers at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=positive, default=64, metavar="N",
        help="requests at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive, default=9, metavar="N",
        help="evaluations by each client (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-lm-eval", action="store_true", help="leave lm-eval out")


def run(args: argparse.Namespace) -> Report:
    """Measure; see the module's docstring."""
    if not args.no_lm_eval and find_spec("lm_eval") is None:
        raise UsageError("lm-eval is not installed: pip install lm_eval, or say --no-lm-eval")
    report = Report("runner")
    with scratch() as places:
        checkpoint = write_tiny_checkpoint(places.memory / "base")
        for server in dict.fromkeys(args.server):
            places.subject(server)
            num_samples = args.samples if server == "real" else args.samples_instant
            taken = anyio.run(_SERVERS[server], args, places, checkpoint, num_samples)
            _enter(report, server, taken, num_samples)
            report.notes.append(f"{server}: {num_samples} samples, {args.concurrency} at once")
    # Ratios of clients that wait for an engine are what an evaluation is about.
    named = "real" if "real" in args.server else "instant"
    for name in ("runner_over_client", "runner_over_lm_eval"):
        if f"{name}_{named}" in report.ratios:
            report.ratios[name] = report.ratios[f"{name}_{named}"]
            report.notes.append(f"{name} is that of the server {named}")
    return report


def _enter(report: Report, server: str, taken: Seconds, num_samples: int) -> None:
    for client, seconds in taken.items():
        report.add(client, server, "samples/s", [num_samples / s for s in seconds])
    report.ratios[f"runner_over_client_{server}"] = paired_ratio(taken["bare"], taken["vime"])
    if "lm_eval" in taken:
        report.ratios[f"runner_over_lm_eval_{server}"] = paired_ratio(
            taken["lm_eval"], taken["vime"]
        )


async def _on_real(
    args: argparse.Namespace, places: Scratch, checkpoint: Path, num_samples: int
) -> Seconds:
    disk, memory = places.subject("real")
    config = _config(args, disk, checkpoint, num_samples)
    settings = fleet_settings(1, checkpoint, disk)
    with Trace(disk / "trace.jsonl", "bench") as trace:
        async with (
            staged(checkpoint, memory / "staging", trace, (1,)) as (snapshot,),
            running_fleet(settings, trace) as (fleet, _),
            fleet.pin(snapshot) as proof,
        ):
            return await _measure(args, config, disk, snapshot, proof)


async def _on_instant(
    args: argparse.Namespace, places: Scratch, checkpoint: Path, num_samples: int
) -> Seconds:
    disk, _ = places.subject("instant")
    with simulated_server(disk, seconds=0.0) as url:
        proof = PinProof(url, "eval", "default", api_key="none")
        snapshot = Snapshot(1, checkpoint, "default", "0" * 64, owned=False)
        config = _config(args, disk, checkpoint, num_samples)
        return await _measure(args, config, disk, snapshot, proof)


_SERVERS = {"real": _on_real, "instant": _on_instant}


async def _measure(
    args: argparse.Namespace, config: EvalConfig, root: Path, snapshot: Snapshot, proof: PinProof
) -> Seconds:
    """Seconds of every evaluation, by client, one after the other in turn."""
    work = _work(config, proof)
    kinds = ["bare"] if args.no_lm_eval else ["bare", "lm_eval"]
    with ExitStack() as stack:
        clients: dict[str, Callable[[], float]] = {}
        for kind in kinds:
            make = partial(stack.enter_context, client_process(kind, work))
            clients[kind] = await anyio.to_thread.run_sync(make)
        async with _evaluator(config, root) as evaluator:

            async def seconds_of(name: str, number: int) -> float:
                if name in clients:
                    return await anyio.to_thread.run_sync(clients[name])
                began = time.perf_counter()
                output = await evaluator.evaluate(EvalPoint(number), snapshot, proof)
                assert output.detail["num_samples"] == len(work.prompts), "the same work"
                return time.perf_counter() - began

            return await _rounds(["vime", *kinds], args.repeat, seconds_of)


async def _rounds(
    names: list[str], repeat: int, seconds_of: Callable[[str, int], Awaitable[float]]
) -> Seconds:
    """What ``seconds_of`` each in turn; each begins as many rounds, as far as that is possible."""
    taken: Seconds = {name: [] for name in names}
    for number in range(1 + repeat):  # the first is the warm-up
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(await seconds_of(name, number))
    return {name: seconds[1:] for name, seconds in taken.items()}


def _config(args: argparse.Namespace, root: Path, checkpoint: Path, num_samples: int) -> EvalConfig:
    prompts = root / "sums.jsonl"
    rows = (f'{{"input": "{n} + {n} =", "label": "{2 * n}"}}\n' for n in range(num_samples))
    prompts.write_text("".join(rows))
    return EvalConfig(
        prompt_data=(("sums", prompts),),
        concurrency=args.concurrency,
        max_response_len=ANSWER_TOKENS,
        hf_checkpoint=checkpoint,
        interval=1,
        uses_snapshots=True,
    )


def _work(config: EvalConfig, proof: PinProof) -> Work:
    (dataset,) = load_datasets(config)
    prompts = [str(example.prompt) for example in dataset.examples]
    return Work(
        base_url=proof.base_url,
        api_key=proof.api_key or "",
        model=proof.model,
        tokenizer=str(config.hf_checkpoint),
        prompts=prompts,
        token_ids=make_tokenizer()(prompts).input_ids,
        max_tokens=config.max_response_len,
        concurrency=config.concurrency,
    )


@asynccontextmanager
async def _evaluator(config: EvalConfig, root: Path) -> AsyncIterator[RunnerEvaluator]:
    actor = ProcessActor(
        "vime.eval.runner.runner:make_runner",
        (config, argparse.Namespace(), root),
        name="eval_runner",
        log_path=root / "eval_runner.log",
    )
    try:
        yield RunnerEvaluator(actor, config.eval_timeout_s)
    finally:
        with anyio.CancelScope(shield=True):
            await actor.stop()
