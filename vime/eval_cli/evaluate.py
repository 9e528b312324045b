"""``vime eval``: the same evaluation without training, of checkpoints that are there already."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vime.eval.paths import LOOP, is_link_loop
from vime.eval_cli.checkpoints import Checkpoint, Numbers, Watch
from vime.fsm.text import clean
from vime.trace_cli.common import UsageError, a_path, seconds, write_json

if TYPE_CHECKING:
    from vime.eval.config import EvalConfig
    from vime.eval.contracts import Outcome
    from vime.eval.dispatch.handle import EvalHandle
    from vime.eval.dispatcher import EvalDispatcher
    from vime.eval_cli.ledger import Ledger, Scored

OK, SOME_SKIPPED, TERMINATED = 0, 1, 143


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime eval``."""
    from vime.eval.config import add_eval_arguments

    parser.add_argument(
        "checkpoints",
        nargs="*",
        type=a_path,
        metavar="CHECKPOINT_DIR",
        help="a whole Hugging Face checkpoint",
    )
    own = parser.add_argument_group("which checkpoints")
    own.add_argument(
        "--watch",
        type=a_path,
        metavar="DIR",
        help="evaluate its subdirectories too, as they become whole",
    )
    own.add_argument(
        "--poll", type=seconds, default=2.0, metavar="SECONDS", help="between two looks (2)"
    )
    own.add_argument(
        "--idle-timeout",
        type=seconds,
        metavar="SECONDS",
        help="stop watching when nothing new has come for so long (never)",
    )
    own.add_argument(
        "--scores",
        type=a_path,
        default="runs/scores.jsonl",
        metavar="FILE",
        help="what has been scored, so that it is not scored again (default: %(default)s)",
    )
    own.add_argument("--again", action="store_true", help="score also what has been scored already")
    own.add_argument("--json", action="store_true", help="print JSON lines instead of text")
    add_eval_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate; status 1 when a checkpoint was skipped, or never became whole."""
    from vime.eval.config import ConfigError, EvalConfig
    from vime.eval.fleet.supervisor import FleetStartError
    from vime.eval.own_directory import own_directory

    named = list(dict.fromkeys(_checkpoint(path) for path in args.checkpoints))
    watch = None if args.watch is None else Watch(_directory(args.watch), named)
    if not named and watch is None:
        raise UsageError("nothing to evaluate: name a CHECKPOINT_DIR, or --watch DIR")
    with _ended_in_order(), own_directory("vime-eval") as staging:
        _complete(args, named, str(staging))
        _look_here_too()
        try:
            config = EvalConfig.from_args(args)
            if not config.uses_snapshots:
                raise UsageError(
                    "nothing to evaluate with: --eval-num-gpus N makes a fleet, and "
                    "--eval-function-path names a CheckpointEvalFn"
                )
            job = _job(args, config)
            with job:
                job.evaluate(named)
                if watch is not None:
                    job.follow(watch)
                job.settle()
        except ConfigError as error:
            raise UsageError("; ".join(error.problems)) from error
        except (FleetStartError, TimeoutError) as error:
            sys.stderr.write(f"vime: {error}\n")
            return SOME_SKIPPED
    return SOME_SKIPPED if job.num_skipped else OK


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that nothing is left behind."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _job(args: argparse.Namespace, config: EvalConfig) -> Job:
    from vime.eval_cli.ledger import Ledger, LedgerError, settings_identity

    try:
        return Job(args, config, Ledger(Path(args.scores)), settings_identity(config))
    except LedgerError as error:
        raise UsageError(f"--scores {error}") from error
    except OSError as error:
        raise UsageError(f"--scores {args.scores}: {error.strerror or error}") from error


def _checkpoint(name: str) -> Path:
    path = _directory(name)
    holds = sorted(str(child.parent) for child in path.glob("*/config.json"))
    if holds and not (path / "config.json").exists():
        raise UsageError(
            f"{name}: no checkpoint, and checkpoints are in it: name them ({name}/*), or --watch "
            f"{name} --idle-timeout 0"
        )
    return path


def _directory(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        what = LOOP if is_link_loop(path) else "no such directory"
        raise UsageError(f"{name}: {what}")
    return path


def _look_here_too() -> None:
    """Rewards and eval functions may lie in the working directory, as for ``python train.py``."""
    here = str(Path.cwd())
    if not {"", here} & {*sys.path}:
        sys.path.insert(0, here)


def _complete(args: argparse.Namespace, named: list[Path], staging: str) -> None:
    """Fill in what only matters in training; nothing is ever exported here."""
    from vime.eval.config.flags import BY_DEST

    ours = {
        "eval_hf_dir": staging,
        "eval_interval": 1,
        "save_hf": None,
        "eval_overflow_policy": "backpressure",
        "ci_test": False,  # the status says whether anything was skipped, in any case
    }
    for dest, value in ours.items():
        flag, given = BY_DEST[dest], getattr(args, dest)
        if not (flag.problem(given) or flag.place_problem(given)):  # else the validation says it
            setattr(args, dest, value)
    if args.hf_checkpoint is None and named:
        args.hf_checkpoint = str(named[0])


class Job:
    """Evaluates one checkpoint after the other, and remembers what it has scored.

    Engines start with the first checkpoint that needs them. Leaving the context ends everything.

    Args:
        args: all flags.
        config: made of them.
        ledger: what has been scored.
        settings: the identity of the settings.

    Attributes:
        num_skipped: checkpoints that could not be scored, also for never becoming whole.
    """

    def __init__(
        self, args: argparse.Namespace, config: EvalConfig, ledger: Ledger, settings: str
    ) -> None:
        self.num_skipped = 0
        self._args = args
        self._config = config
        self._ledger = ledger
        self._settings = settings
        self._numbers = Numbers()
        self._stack = ExitStack()
        self._dispatcher: EvalDispatcher | None = None
        self._pending: deque[tuple[Checkpoint, str, EvalHandle]] = deque()

    def __enter__(self) -> Job:
        self._stack.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def evaluate(self, paths: Iterable[Path]) -> None:
        """Hand these over, but for those that have been scored; reports what has settled."""
        for checkpoint in self._numbers.number_all(paths):
            identity = self._identity(checkpoint)
            scored = None if identity is None else self._ledger.find(identity, self._settings)
            if scored is not None and not self._args.again:
                self._print_known(checkpoint, scored)
                continue
            dispatcher = self._ready()
            try:
                handle = dispatcher.dispatch(checkpoint.rollout_id, hf_dir=checkpoint.path)
            except ValueError as error:  # it has vanished since it was found
                self.num_skipped += 1
                self._print(checkpoint, "skipped", f"gone: {error}", reason="gone")
                continue
            self._pending.append((checkpoint, identity or "", handle))
            self._report_settled()

    def follow(self, watch: Watch) -> None:
        """Evaluate what appears, until nothing has for as long as ``--idle-timeout`` says.

        Raises:
            UsageError: the directory cannot be read any more.
        """
        last_news = time.monotonic()
        while True:
            try:
                found = watch.look()
            except OSError as error:
                raise UsageError(f"--watch {error.filename}: {error.strerror}") from error
            self.evaluate(found)
            self._report_settled()
            if found or self._pending:
                last_news = time.monotonic()
            limit = self._args.idle_timeout
            if limit is not None and time.monotonic() - last_news >= limit:
                break
            time.sleep(self._args.poll)
        for path, problems in watch.unfinished.items():
            self.num_skipped += 1
            sys.stderr.write(f"vime: {clean(f'{path}: never became whole: {problems[0]}')}\n")

    def settle(self) -> None:
        """Wait for what is pending; each has deadlines of its own."""
        while self._pending:
            self._pending[0][2].result()
            self._report_settled()

    def _ready(self) -> EvalDispatcher:
        if self._dispatcher is None:
            from vime.eval.dispatcher import EvalDispatcher

            dispatcher = EvalDispatcher.from_args(self._args, exporter=_never_exported)
            # Closed, not drained: drain() would fail the run for what has been reported here.
            self._stack.callback(dispatcher.close)
            dispatcher.wait_until_ready()
            self._dispatcher = dispatcher
        return self._dispatcher

    def _identity(self, checkpoint: Checkpoint) -> str | None:
        """``None`` for what is no whole checkpoint, which the evaluation will say."""
        from vime.eval.snapshot.manifest import Manifest
        from vime.eval_cli.ledger import checkpoint_identity

        try:
            manifest = Manifest.of_directory(
                checkpoint.path, "identity", checkpoint.rollout_id, owned=False
            )
            return checkpoint_identity(checkpoint.path, manifest.digest)
        except (OSError, ValueError):
            return None

    def _report_settled(self) -> None:
        while self._pending and self._pending[0][2].state in ("done", "skipped"):
            checkpoint, identity, handle = self._pending.popleft()
            self._report(checkpoint, identity, handle.result())

    def _report(self, checkpoint: Checkpoint, identity: str, outcome: Outcome) -> None:
        assert self._dispatcher is not None
        if outcome.state == "done":
            self._remember(checkpoint, identity, outcome)
        else:
            self.num_skipped += 1
        said = _scores(outcome.metrics) if outcome.state == "done" else _reason(outcome)
        self._print(
            checkpoint,
            outcome.state,
            f"{said}, {outcome.duration_s:.1f} s",
            metrics=outcome.metrics,
            reason=outcome.reason,
            detail=outcome.detail,
            weight_version=outcome.weight_version,
            run_dir=str(self._dispatcher.run_dir),
        )

    def _remember(self, checkpoint: Checkpoint, identity: str, outcome: Outcome) -> None:
        from vime.eval_cli.ledger import Scored

        assert self._dispatcher is not None
        scored = Scored(
            identity,
            self._settings,
            str(checkpoint.path.absolute()),
            checkpoint.rollout_id,
            outcome.metrics,
            str(self._dispatcher.run_dir),
        )
        try:
            self._ledger.add(scored)
        except OSError as error:  # the score itself is in the run's evidence
            told = (
                f"--scores {self._ledger.path}: {error.strerror or error}; it will be scored anew"
            )
            sys.stderr.write(f"vime: {clean(told)}\n")

    def _print_known(self, checkpoint: Checkpoint, scored: Scored) -> None:
        text = f"{_scores(scored.metrics)}, see {scored.run_dir} (--again scores it anew)"
        self._print(checkpoint, "known", text, metrics=scored.metrics, run_dir=scored.run_dir)

    def _print(self, checkpoint: Checkpoint, state: str, text: str, **fields: Any) -> None:
        if self._args.json:
            path = str(checkpoint.path)
            write_json({"path": path, "step": checkpoint.rollout_id, "state": state, **fields})
        else:
            line = f"{checkpoint.path}: step {checkpoint.rollout_id}: {state}: {text}"
            sys.stdout.write(f"{clean(line)}\n")
        sys.stdout.flush()


def _never_exported(rollout_id: int, directory: Path) -> None:
    raise AssertionError(f"{rollout_id}, {directory}: only existing checkpoints are evaluated here")


def _scores(metrics: dict[str, float]) -> str:
    """``addition 0.85 ± 0.02`` for each eval set."""
    parts = []
    for name, value in sorted(metrics.items()):
        error = metrics.get(f"{name}/stderr")
        if error is not None and value is not None:
            parts.append(f"{name.removeprefix('eval/')} {value:.4g} ± {error:.2g}")
    return "; ".join(parts) or f"{len(metrics)} metrics"


def _reason(outcome: Outcome) -> str:
    """The reason with its last line; of a traceback, with all that the error says."""
    lines = (outcome.detail or "").strip().splitlines()
    if not lines:
        return str(outcome.reason)
    last = len(lines) - 1
    if lines[0].startswith("Traceback "):
        indented = [i for i, line in enumerate(lines) if line.startswith("  ")]
        last = min(max(indented, default=-1) + 1, last)
    return f"{outcome.reason}: {' '.join(lines[last:])}"
