"""Trains a tiny language model to add, by GRPO, while vime evaluates its checkpoints beside it.

    python examples/train.py --demo fleet     evaluations on two engines of their own
    python examples/train.py --demo shared    the same training, held up by each evaluation
    python examples/train.py --resume RUN_DIR after a crash: training and evaluations go on

``train`` is the loop to copy: all that evaluation needs of it are the calls on ``dispatcher``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from demo_staging import staging
from training_state import Progress, load_flags, load_state, save_flags, save_state

from vime.eval import ConfigError, EvalDispatcher, add_eval_arguments
from vime.eval.outcomes.live import LiveView, make_console
from vime.eval.outcomes.report import link_latest, print_summary, write_report

FAILED, WRONG_USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143

#: What suits this task on two CPU cores: about three minutes, with twelve evaluations.
DEFAULTS = {
    "eval_interval": 100,
    "eval_max_response_len": 4,
    "eval_vllm_dtype": "float32",
    "eval_vllm_max_model_len": 64,
}


def train(args: argparse.Namespace) -> None:
    """Train for ``args.steps`` steps, with an evaluation every ``args.eval_interval`` of them."""
    import torch
    from arithmetic import NAME, build_tokenizer, training_and_held_out
    from grpo import Settings, Trainer, accuracy

    run_dir = Path(args.eval_run_dir)
    torch.set_num_threads(1)  # the model is small, and the engines need cores too
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    sums, held_out = training_and_held_out()
    model = make_inputs(args, tokenizer, held_out)
    trainer = Trainer(model, tokenizer, sums, Settings(learning_rate=args.lr), args.seed)
    done = load_state(run_dir, trainer)

    def evaluate_here(rollout_id: int) -> dict[str, float]:  # noqa: ARG001
        """What vime replaces: training waits while its own model is evaluated."""
        return {NAME: accuracy(model, tokenizer, held_out)}

    with EvalDispatcher.from_args(
        args, exporter=(model, tokenizer), shared_eval=evaluate_here
    ) as dispatcher:
        link_latest(dispatcher.run_dir)
        with LiveView(dispatcher.run_dir, title(args, dispatcher), console=make_console()) as view:
            dispatcher.wait_until_ready()
            began = time.perf_counter()
            view.training(done.step, args.steps)
            dispatcher.dispatch(0, hf_dir=args.hf_checkpoint)  # the baseline
            for step in range(done.step + 1, args.steps + 1):
                dispatcher.at_step(step)
                reward = trainer.step()
                view.training(step, args.steps, reward=reward)
                if step % args.eval_interval == 0 and step < args.steps:
                    dispatcher.dispatch(step)
                    wall_s = done.wall_s + time.perf_counter() - began
                    save_state(run_dir, trainer, Progress(step, wall_s))  # for --resume
            dispatcher.dispatch(args.steps, force=True)  # the last one is never dropped
            wall_s = done.wall_s + time.perf_counter() - began
            outcomes = dispatcher.drain()
    summary = write_report(dispatcher.run_dir, dispatcher.run_id, outcomes, args.steps, wall_s)
    print_summary(summary, dispatcher.run_dir, make_console())


def title(args: argparse.Namespace, dispatcher: EvalDispatcher) -> str:
    """The headline of the live view."""
    where = f"a fleet of {args.eval_num_gpus}" if args.eval_num_gpus else "shared engines"
    return f"vime {dispatcher.run_id}: an evaluation every {args.eval_interval} steps on {where}"


def make_inputs(args: argparse.Namespace, tokenizer: Any, held_out: Sequence[Any]) -> Any:
    """Make the model; write it and the eval set into the run's directory, unless flags name some.

    Returns:
        The model, as it is in ``args.hf_checkpoint`` afterwards.

    Raises:
        ConfigError: something cannot be read or written.
    """
    from arithmetic import NAME, build_model, load_model, write_eval_set

    run_dir = Path(args.eval_run_dir)
    if (run_dir / "trace.jsonl").exists() and not args.eval_resume:
        message = f"--eval-run-dir {run_dir}: another run wrote there already; name a new directory"
        raise ConfigError([message])
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if args.hf_checkpoint:
            model = load_model(args.hf_checkpoint, tokenizer)
        else:
            model = build_model(tokenizer, args.seed)
            args.hf_checkpoint = str(run_dir.absolute() / "base")
            model.save_pretrained(args.hf_checkpoint)
            tokenizer.save_pretrained(args.hf_checkpoint)
        if not args.eval_prompt_data:
            path = run_dir.absolute() / f"{NAME}.jsonl"
            write_eval_set(path, held_out)
            args.eval_prompt_data = [NAME, str(path)]
        save_flags(run_dir, args)
    except OSError as error:
        raise ConfigError([f"--eval-run-dir {run_dir}: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return model


# -- the command line ----------------------------------------------------------------------------


def parse_args(
    argv: Sequence[str] | None, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The flags of vime and a few of our own; ``--demo`` only changes defaults."""
    parser = parser or argparse.ArgumentParser(
        description="Train a tiny language model to add, by GRPO, and evaluate it meanwhile."
    )
    own = parser.add_argument_group("training")
    own.add_argument(
        "--demo",
        choices=("fleet", "shared"),
        help="fleet: two eval engines, and staging in memory; shared: evals hold training up",
    )
    own.add_argument(
        "--resume", metavar="RUN_DIR", help="go on with the run in RUN_DIR, by its own flags"
    )
    own.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    own.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    own.add_argument("--lr", type=float, default=1e-3, help="default: %(default)s")
    add_eval_arguments(parser).set_defaults(**DEFAULTS, staging_is_ours=False)
    first = parser.parse_known_args(argv)[0]
    if first.resume:
        parser.set_defaults(**load_flags(Path(first.resume)))
    elif first.demo == "fleet":
        parser.set_defaults(eval_num_gpus=2)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: expected at least 1")
    if not 0 < args.lr < 1:
        parser.error(f"--lr {args.lr}: expected a number between 0 and 1")
    if args.demo == "shared" and args.eval_num_gpus:
        parser.error(f"--demo shared together with --eval-num-gpus {args.eval_num_gpus}: drop one")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    args.run_dir_is_ours = args.eval_run_dir is None
    args.eval_run_dir = args.eval_run_dir or f"runs/{name}"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run(train, lambda: parse_args(argv), "train.py")


def run(
    work: Callable[[argparse.Namespace], None], parse: Callable[[], argparse.Namespace], name: str
) -> int:
    """Parse and train; every failure that a user can mend is a message and a status."""
    from vime.eval.dispatcher import SkippedPointsError
    from vime.eval.fleet.supervisor import FleetStartError

    args: argparse.Namespace | None = None
    signal.signal(signal.SIGTERM, stop)
    try:
        args = parse()
        with staging(args):
            work(args)
    except ConfigError as error:
        for problem in error.problems:
            print(f"{name}: error: {problem}", file=sys.stderr)
        if (
            args is not None and args.run_dir_is_ours
        ):  # there is nothing in it but what we put there
            shutil.rmtree(args.eval_run_dir, ignore_errors=True)
        return WRONG_USAGE
    except (FleetStartError, SkippedPointsError, TimeoutError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted; everything it started has ended", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the output's reader has left (| head); the report is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def stop(_signal: int, _frame: FrameType | None) -> None:
    """End the run in an orderly way; a second signal does not cut that short."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
