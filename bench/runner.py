"""``runner``: samples a second of the EvalRunner, beside a bare client and beside lm-eval.

All three ask for the same greedy answers to the same prompts, with as many requests at once, each
from a process of its own, in turn. The EvalRunner's time is that of a whole evaluation: requests,
the proof of each answer's weights, decoding, rewards, and the samples file. The others' is that
of their requests alone; the bare client uses the HTTP library that vime uses.

They ask a real engine, behind its router, and a server that answers at once, where the clients
are all that is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Callable
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
        "--samples", type=positive, default=512, metavar="N",
        help="samples of an evaluation (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=positive, default=64, metavar="N",
        help="requests at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive, default=7, metavar="N",
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
            taken = anyio.run(_SERVERS[server], args, places, checkpoint)
            _enter(report, server, taken, args.samples)
    # The name without a server is for the worst of them.
    for name in ("runner_over_client", "runner_over_lm_eval"):
        of_servers = [ratio for key, ratio in report.ratios.items() if key.startswith(name)]
        if of_servers:
            report.ratios[name] = min(of_servers)
    report.notes.append(f"{args.samples} samples, {args.concurrency} requests at once")
    return report


def _enter(report: Report, server: str, taken: Seconds, num_samples: int) -> None:
    for client, seconds in taken.items():
        report.add(client, server, "samples/s", [num_samples / s for s in seconds])
    report.ratios[f"runner_over_client_{server}"] = paired_ratio(taken["bare"], taken["vime"])
    if "lm_eval" in taken:
        report.ratios[f"runner_over_lm_eval_{server}"] = paired_ratio(
            taken["lm_eval"], taken["vime"]
        )


async def _on_real(args: argparse.Namespace, places: Scratch, checkpoint: Path) -> Seconds:
    disk, memory = places.subject("real")
    settings = fleet_settings(1, checkpoint, disk)
    with Trace(disk / "trace.jsonl", "bench") as trace:
        async with (
            staged(checkpoint, memory / "staging", trace, (1,)) as (snapshot,),
            running_fleet(settings, trace) as (fleet, _),
            fleet.pin(snapshot) as proof,
        ):
            return await _measure(args, disk, checkpoint, snapshot, proof)


async def _on_instant(args: argparse.Namespace, places: Scratch, checkpoint: Path) -> Seconds:
    disk, _ = places.subject("instant")
    with simulated_server(disk, seconds=0.0) as url:
        proof = PinProof(url, "eval", "default", api_key="none")
        snapshot = Snapshot(1, checkpoint, "default", "0" * 64, owned=False)
        return await _measure(args, disk, checkpoint, snapshot, proof)


_SERVERS = {"real": _on_real, "instant": _on_instant}


async def _measure(
    args: argparse.Namespace, root: Path, checkpoint: Path, snapshot: Snapshot, proof: PinProof
) -> Seconds:
    """Seconds of every evaluation, by client, one after the other in turn."""
    config = _config(args, root, checkpoint)
    work = _work(config, proof)
    kinds = ["bare"] if args.no_lm_eval else ["bare", "lm_eval"]
    taken: Seconds = {"vime": [], **{kind: [] for kind in kinds}}
    with ExitStack() as stack:
        clients: dict[str, Callable[[], float]] = {}
        for kind in kinds:
            make = partial(stack.enter_context, client_process(kind, work))
            clients[kind] = await anyio.to_thread.run_sync(make)
        async with _evaluator(config, root) as evaluator:
            for number in range(1 + args.repeat):  # the first is the warm-up
                began = time.perf_counter()
                output = await evaluator.evaluate(EvalPoint(number), snapshot, proof)
                taken["vime"].append(time.perf_counter() - began)
                assert output.detail["num_samples"] == args.samples, "the same work"
                for kind, client in clients.items():
                    taken[kind].append(await anyio.to_thread.run_sync(client))
    return {client: seconds[1:] for client, seconds in taken.items()}


def _config(args: argparse.Namespace, root: Path, checkpoint: Path) -> EvalConfig:
    prompts = root / "sums.jsonl"
    rows = (f'{{"input": "{n} + {n} =", "label": "{2 * n}"}}\n' for n in range(args.samples))
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
