"""The stock evaluation: every prompt of the eval sets, asked of a pinned fleet and scored."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.runner.datasets import Dataset, load_datasets
from vime.eval.runner.generate import (
    Generator,
    PromptRefused,
    open_generator,
    sample_seed,
    sampling_of,
)
from vime.eval.runner.http import Connect, connect
from vime.eval.runner.metrics import dataset_metrics
from vime.eval.runner.rewards import Reward, RewardFailed, load_rewards
from vime.eval.runner.samples import Sample, samples_path, write_samples
from vime.eval.runner.tokenizer import EncodedPrompts, PromptCache
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger(__name__)

#: So many failed samples are named in the trace; all of them are in the samples file.
MAX_FAILURES_NAMED = 10


class _Clock:
    """When the first request of a set began and its last answer came, in seconds."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0

    def begin(self) -> None:
        if self.first is None:
            self.first = time.perf_counter()

    def end(self) -> None:
        self.last = time.perf_counter()

    @property
    def duration_s(self) -> float:
        return 0.0 if self.first is None else max(self.last - self.first, 0.0)


class StockEvaluation:
    """Evaluates snapshots on a fleet, one after the other; keeps datasets and tokens between.

    Args:
        config: the eval sets, the sampling and the reward.
        run_dir: samples are written below it.
        connect: the way to the fleet; over the network unless a test has another.
    """

    def __init__(self, config: EvalConfig, run_dir: Path, connect: Connect = connect) -> None:
        self._config = config
        self._run_dir = run_dir
        self._connect = connect
        self._datasets: tuple[Dataset, ...] | None = None
        self._prompts: PromptCache | None = None

    async def evaluate(self, point: EvalPoint, snapshot: Snapshot, proof: PinProof) -> EvalOutput:
        """Generate, score and write every sample.

        Raises:
            EvalSkip: ``version_mixed`` or ``unhealthy`` (see :class:`Generator`); ``crashed``
                when every sample of a set failed, which leaves nothing to report.
            ValueError: the datasets, the tokenizer or the reward cannot be loaded.
        """
        prompts = await anyio.to_thread.run_sync(self._prepare, snapshot.path)
        rewards = load_rewards(self._config)
        samples = list(self._planned(prompts))
        sets = {
            dataset.name: _Set(sampling_of(dataset.settings), rewards[dataset.name])
            for dataset in self._datasets or ()
        }
        async with open_generator(self._config, proof, self._connect) as generator:
            asker = _Asker(prompts, sets, generator)
            await _in_parallel(asker.fill, samples, self._config.concurrency)
        path = samples_path(self._run_dir, point, snapshot)
        await anyio.to_thread.run_sync(write_samples, path, samples)
        metrics: dict[str, float] = {}
        for dataset in self._datasets or ():
            mine = [sample for sample in samples if sample.dataset == dataset.name]
            duration_s = sets[dataset.name].clock.duration_s
            metrics |= _set_metrics(dataset, mine, proof.weight_version, duration_s)
            metrics |= _length_metrics(dataset, prompts)
        return EvalOutput(metrics, path, _detail(samples, prompts, path))

    async def prepare(self) -> None:
        """Import, read and encode, from the base checkpoint, before the first snapshot comes.

        Raises:
            ValueError: the datasets or the tokenizer cannot be loaded.
        """
        if self._config.hf_checkpoint is not None:
            await anyio.to_thread.run_sync(self._prepare, self._config.hf_checkpoint)

    def _prepare(self, snapshot: Path) -> EncodedPrompts:
        """On a worker thread: what is read from disk and computed before the first request."""
        if self._datasets is None or self._prompts is None:
            with _all_of_it_stays():
                self._datasets = load_datasets(self._config)
                self._prompts = PromptCache(self._datasets, self._config.hf_checkpoint)
                return self._prompts.get(snapshot)
        return self._prompts.get(snapshot)

    def _planned(self, prompts: EncodedPrompts) -> Iterator[Sample]:
        """Every sample to be made; those of one prompt side by side, for the prefix cache."""
        for dataset in self._datasets or ():
            for example in dataset.examples:
                if example.index in prompts.left_out[dataset.name]:
                    continue
                for i in range(dataset.settings.n_samples_per_prompt):
                    seed = sample_seed(self._config.seed, dataset.name, example.index, i)
                    yield Sample(
                        dataset.name, example.index, i, example.prompt, example.label, seed=seed
                    )


@contextmanager
def _all_of_it_stays() -> Iterator[None]:
    """For what imports transformers, and reads whole sets: hardly any of it is ever garbage.

    Python's collector would look through all of it again and again, which takes most of a second
    of these imports, and a tenth of a quick evaluation later. Afterwards it passes over all that
    is there by then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@dataclass
class _Set:
    """How one set is asked and scored, and how long its answers took."""

    sampling: dict[str, Any]
    reward: Reward
    clock: _Clock = field(default_factory=_Clock)


class _Asker:
    """Makes one sample: asks for its answer, then for its reward."""

    def __init__(
        self, prompts: EncodedPrompts, sets: dict[str, _Set], generator: Generator
    ) -> None:
        self._prompts = prompts
        self._sets = sets
        self._generator = generator

    async def fill(self, sample: Sample) -> None:
        """Fill in ``sample``; what only concerns this one becomes its ``failure``."""
        try:
            await self._answer(sample)
            if sample.output is not None:
                reward = self._sets[sample.dataset].reward
                sample.reward = await reward(sample.output, sample.label)
        except (PromptRefused, RewardFailed) as failure:
            sample.failure = str(failure)
        except EvalSkip as skip:
            raise EvalSkip(skip.reason, f"{sample.name}: {skip.detail}") from skip

    async def _answer(self, sample: Sample) -> None:
        token_ids = self._prompts.ids[sample.dataset][sample.prompt_index]
        if isinstance(token_ids, str):
            raise PromptRefused(token_ids)
        assert sample.seed is not None, "given when the sample was planned"
        own = self._sets[sample.dataset]
        own.clock.begin()
        generation = await self._generator.generate(token_ids, sample.seed, own.sampling)
        own.clock.end()
        sample.output_token_ids = generation.token_ids
        sample.output = self._prompts.tokenizer.decode(generation.token_ids)
        sample.finish_reason = generation.finish_reason
        sample.weight_version = generation.weight_version


async def _in_parallel(
    fill: Callable[[Sample], Awaitable[None]], samples: Sequence[Sample], concurrency: int
) -> None:
    """``fill`` each sample, so many at once; the first :class:`EvalSkip` ends them all.

    Raises:
        RuntimeError: a worker ended before the samples did: no score may be made of the rest.
    """
    skips: list[EvalSkip] = []
    filled = 0
    remaining = iter(samples)

    async def work() -> None:
        nonlocal filled
        for sample in remaining:
            try:
                await fill(sample)
            except EvalSkip as skip:
                skips.append(skip)
                workers.cancel_scope.cancel()
                return
            filled += 1

    async with anyio.create_task_group() as workers:
        for _ in range(min(concurrency, len(samples))):
            workers.start_soon(work)
    if skips:
        raise skips[0]
    if filled < len(samples):
        raise RuntimeError(
            f"{len(samples) - filled} of {len(samples)} samples were given up half-way: something "
            "in the evaluation was cancelled from within"
        )


def _set_metrics(
    dataset: Dataset, samples: list[Sample], version: str, duration_s: float
) -> dict[str, float]:
    if not samples:
        raise EvalSkip(
            "crashed",
            f"every prompt of {dataset.name} has more than --eval-max-prompt-len "
            f"{dataset.settings.max_prompt_len} tokens, and --eval-overlong-prompt is skip",
        )
    failed = [sample for sample in samples if sample.failure is not None]
    if len(failed) == len(samples):
        raise EvalSkip(
            "crashed",
            f"every sample of {dataset.name} failed; the first: {failed[0].name}: "
            f"{failed[0].failure}",
        )
    return dataset_metrics(dataset.name, [s.scored(version) for s in samples], duration_s)


def _length_metrics(dataset: Dataset, prompts: EncodedPrompts) -> dict[str, float]:
    """How many prompts were too long, where there is a limit."""
    if dataset.settings.max_prompt_len is None:
        return {}
    return {
        f"eval/{dataset.name}/prompts_cut": float(len(prompts.cut[dataset.name])),
        f"eval/{dataset.name}/prompts_skipped": float(len(prompts.left_out[dataset.name])),
    }


def _detail(samples: list[Sample], prompts: EncodedPrompts, path: Path) -> dict[str, Any]:
    """What the trace says of the evaluation."""
    failures = [f"{s.name}: {s.failure}" for s in samples if s.failure is not None]
    for failure in failures[:MAX_FAILURES_NAMED]:
        log.warning("sample failed: %s", failure)
    left_out = [
        f"{name} prompt {index}: {prompts.ids[name][index]}"
        for name, indices in prompts.left_out.items()
        for index in sorted(indices)
    ]
    skipped = {"prompts_skipped": left_out[:MAX_FAILURES_NAMED]} if left_out else {}
    return {
        "num_samples": len(samples),
        "num_failed": len(failures),
        "failures": failures[:MAX_FAILURES_NAMED],
        "samples_path": str(path),
        **skipped,
    }
