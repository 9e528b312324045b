"""Trains on a Ray cluster, with an actor, a rollout and an eval region, and evaluates meanwhile.

    python examples/ray_train.py --demo fleet       on this machine, as a cluster of logical GPUs
    python examples/ray_train.py --address auto …   on a cluster that is there

The task and the algorithm are those of ``train.py``. What is different: weights and optimizer are
in a Ray actor of the actor region, answers are sampled in one of the rollout region, and vime's
engines are in the eval region. The driver only says who does what; the weights of an evaluation
go from the training actor to the engines, wherever both are.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import train as on_one_machine
from anyio.from_thread import start_blocking_portal

from vime.eval import ConfigError
from vime.eval.fleet.supervisor import FleetStartError
from vime.eval.outcomes.live import LiveView, make_console
from vime.eval.outcomes.report import link_latest, print_summary, write_report
from vime.eval.processes.process import KeptProcess, spawn
from vime.ray import Placement, PlacementError, RayEvalDispatcher, place, placement_layout

RAY_START_S = 60.0


class TrainActor:
    """One rank of training: weights, optimizer, and the export of both halves of the lesson."""

    def __init__(self, checkpoint: str, learning_rate: float, seed: int) -> None:
        import torch
        from arithmetic import build_tokenizer, load_model, training_and_held_out
        from grpo import Settings, Trainer

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._tokenizer = build_tokenizer()
        self._model = load_model(checkpoint, self._tokenizer)
        sums, _ = training_and_held_out()
        settings = Settings(learning_rate=learning_rate)
        self._trainer = Trainer(self._model, self._tokenizer, sums, settings, seed)

    def next_batch(self) -> tuple[Any, Any, dict[str, Any]]:
        """Prompts, right answers, and the weights that are to answer."""
        prompts, right = self._trainer.draw()
        weights = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        return prompts, right, weights

    def learn(self, batch: tuple[Any, Any, Any], answers: Any) -> float:
        """One update; returns the mean reward."""
        prompts, right, _ = batch
        return self._trainer.learn(prompts, answers, right)

    def export_hf(self, rollout_id: int, directory: str) -> None:  # noqa: ARG002
        """What vime asks for: a Hugging Face checkpoint in ``directory``."""
        self._model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)


class RolloutActor:
    """One rollout engine: samples answers with the weights that it is given."""

    def __init__(self, checkpoint: str, seed: int) -> None:
        import torch
        from arithmetic import build_tokenizer, load_model

        torch.set_num_threads(1)
        torch.manual_seed(seed + 1)
        self._model = load_model(checkpoint, build_tokenizer())

    def generate(self, batch: tuple[Any, Any, dict[str, Any]]) -> Any:
        """Answers to the prompts of a batch."""
        from grpo import generate

        prompts, right, weights = batch
        self._model.load_state_dict(weights)
        return generate(self._model, prompts, right.shape[1], greedy=False)


def train(args: argparse.Namespace) -> None:
    """Train for ``args.steps`` steps, with an evaluation every ``args.eval_interval`` of them."""
    from arithmetic import build_tokenizer, training_and_held_out

    tokenizer = build_tokenizer()
    on_one_machine.make_inputs(args, tokenizer, training_and_held_out()[1])
    placement = place(placement_layout(args), deadline_s=args.placement_timeout)
    trainer, rollouts = start_actors(args, placement)
    with RayEvalDispatcher.from_args(args, placement=placement, exporter=trainer) as dispatcher:
        link_latest(dispatcher.run_dir)
        title = on_one_machine.title(args, dispatcher) + " on Ray"
        with LiveView(dispatcher.run_dir, title, console=make_console()) as view:
            dispatcher.wait_until_ready()
            began = time.perf_counter()
            view.training(0, args.steps)
            dispatcher.dispatch(0, hf_dir=args.hf_checkpoint)  # the baseline
            for step in range(1, args.steps + 1):
                dispatcher.at_step(step)
                reward = train_step(trainer, rollouts)
                view.training(step, args.steps, reward=reward)
                if step % args.eval_interval == 0 and step < args.steps:
                    dispatcher.dispatch(step)
            dispatcher.dispatch(args.steps, force=True)  # the last one is never dropped
            wall_s = time.perf_counter() - began
            outcomes = dispatcher.drain()
    summary = write_report(dispatcher.run_dir, dispatcher.run_id, outcomes, args.steps, wall_s)
    print_summary(summary, dispatcher.run_dir, make_console())


def train_step(trainer: Any, rollouts: Any) -> float:
    """Sample with the present weights, and learn from it; tensors go from actor to actor."""
    import ray

    batch = trainer.next_batch.remote()
    answers = rollouts.generate.remote(batch)
    reward: float = ray.get(trainer.learn.remote(batch, answers))
    return reward


def start_actors(args: argparse.Namespace, placement: Placement) -> tuple[Any, Any]:
    """One training actor and one rollout actor, each in the first bundle of its region."""
    import ray

    from vime.ray.group import strategy

    def start(actor_class: type, region: str, *actor_args: Any) -> Any:
        bundle = placement.region(region)[0]
        options = {
            "num_gpus": 1,
            "num_cpus": 1,
            "scheduling_strategy": strategy(placement.group, bundle.index),
        }
        return ray.remote(actor_class).options(**options).remote(*actor_args)

    checkpoint = str(Path(args.hf_checkpoint).absolute())
    trainer = start(TrainActor, "actor", checkpoint, args.lr, args.seed)
    rollouts = start(RolloutActor, "rollout", checkpoint, args.seed)
    return trainer, rollouts


# -- the command line ----------------------------------------------------------------------------


def train_on_cluster(args: argparse.Namespace) -> None:
    """Connect, train, and turn what Ray refuses into a message."""
    with cluster(args):
        try:
            train(args)
        except PlacementError as error:
            raise ConfigError([str(error)]) from error


@contextmanager
def cluster(args: argparse.Namespace) -> Iterator[None]:
    """Connect to a cluster; without an address, make this machine one, with logical GPUs."""
    with ExitStack() as stack:
        address = args.address or stack.enter_context(cluster_of_this_machine(args))
        import ray  # it reads its environment now

        stack.callback(ray.shutdown)
        ours = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False)
        signal.signal(signal.SIGTERM, ours)  # Ray has put one of its own in its place
        yield


@contextmanager
def cluster_of_this_machine(args: argparse.Namespace) -> Iterator[str]:
    """A cluster of one node, in a session of its own; yields its address.

    What ends the driver, all processes of its group included, leaves the cluster alone until the
    driver has closed what runs there; and the cluster goes with the driver, its directory too.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    os.environ.pop("RAY_TMPDIR", None)  # its directory is one that goes with it
    size, port = placement_layout(args).num_bundles, free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--num-cpus={size}", f"--num-gpus={size}", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}"]
    log_path = Path(args.eval_run_dir, "logs", "ray.log")

    async def start() -> KeptProcess:
        return await spawn(command, name="Ray", log_path=log_path, scratch=True)

    with start_blocking_portal() as portal:
        process = portal.call(start)
        try:
            wait_for(port, process)
            yield f"127.0.0.1:{port}"
        finally:
            portal.call(process.end)


def wait_for(port: int, process: KeptProcess) -> None:
    """Wait until the cluster takes drivers.

    Raises:
        FleetStartError: it ended, or took too long.
    """
    give_up = time.monotonic() + RAY_START_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.has_ended() or time.monotonic() > give_up:
            raise FleetStartError(f"Ray did not start: {process.log_path}\n{process.log_tail(5)}")
        time.sleep(0.1)


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of ``train.py``, and what is where on the cluster."""
    parser = argparse.ArgumentParser(
        description="Train a tiny language model to add on a Ray cluster, and evaluate it there."
    )
    own = parser.add_argument_group("cluster")
    own.add_argument("--address", help="of the Ray cluster (auto: of this node); one of its own")
    own.add_argument("--actor-num-gpus-per-node", type=int, default=1, help="default: %(default)s")
    own.add_argument("--rollout-num-gpus", type=int, default=1, help="default: %(default)s")
    own.add_argument(
        "--placement-timeout", type=float, default=600.0, help="seconds; default: %(default)s"
    )
    args = on_one_machine.parse_args(argv, parser)
    if args.resume:
        parser.error("--resume: this example keeps no state of its actors; train.py shows how to")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every failure that a user can mend is a message and a status."""
    return on_one_machine.run(train_on_cluster, lambda: parse_args(argv), "ray_train.py")


if __name__ == "__main__":
    sys.exit(main())
