"""GRPO in a hundred lines: sample a group of answers a prompt, reward them, reinforce the better.

The objective is that of Shao et al. 2024 (https://arxiv.org/abs/2402.03300) with one update a
batch, where the ratio of the policies is 1 and needs no clipping, and with the advantages of
Liu et al. 2025 (https://arxiv.org/abs/2503.20783): a reward minus its group's mean, not divided
by the group's deviation, which would make the most of groups that are all but decided.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from arithmetic import ANSWER_TOKENS, Sum
from torch.nn import functional


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        prompts_per_step: different prompts in a batch.
        group_size: answers sampled for each of them.
        learning_rate: of AdamW.
        entropy_bonus: weight of the mean entropy of a token, which keeps the sampling curious.
        partial_credit: part of the reward for single right characters; the rest is for the
            whole right answer. Without any, a random model would hardly ever be rewarded.
    """

    prompts_per_step: int = 32
    group_size: int = 8
    learning_rate: float = 1e-3
    entropy_bonus: float = 0.05
    partial_credit: float = 0.5


@torch.no_grad()
def generate(model: Any, prompts: torch.Tensor, num_tokens: int, *, greedy: bool) -> torch.Tensor:
    """Answer a batch of prompts of one length.

    Args:
        model: a causal language model of ``transformers``.
        prompts: int64, (batch, prompt length).
        num_tokens: of an answer, at most.
        greedy: take the likeliest token instead of sampling one at temperature 1.

    Returns:
        int64, (batch, ``num_tokens``); padding after the end token.
    """
    end, padding = model.config.eos_token_id, model.config.pad_token_id
    output = model(prompts, use_cache=True, logits_to_keep=1)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    while True:
        logits = output.logits[:, -1]
        chosen = logits.argmax(-1) if greedy else logits.softmax(-1).multinomial(1)[:, 0]
        tokens.append(torch.where(ended, padding, chosen))
        ended |= chosen == end
        if len(tokens) == num_tokens:
            return torch.stack(tokens, dim=1)
        output = model(tokens[-1][:, None], past_key_values=output.past_key_values, use_cache=True)


class Trainer:
    """Trains a model on sums, one synchronous step after the other.

    Args:
        model: a causal language model of ``transformers``; trained in place.
        tokenizer: its tokenizer.
        sums: what it is trained on.
        settings: how.
        seed: of the choice of prompts.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sums: Sequence[Sum], settings: Settings, seed: int
    ) -> None:
        self._model = model
        self._settings = settings
        self._choice = random.Random(seed)
        self._padding: int = tokenizer.pad_token_id
        self._prompts = encode_prompts(tokenizer, sums)
        self._answers = encode_answers(tokenizer, sums)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def step(self) -> float:
        """Sample, reward, update; returns the mean reward of the samples, from 0 to 1."""
        prompts, right = self.draw()
        return self.learn(
            prompts, generate(self._model, prompts, right.shape[1], greedy=False), right
        )

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts of the next batch and their right answers, each as often as in its group."""
        settings = self._settings
        chosen = self._choice.sample(range(len(self._prompts)), settings.prompts_per_step)
        prompts = self._prompts[chosen].repeat_interleave(settings.group_size, dim=0)
        return prompts, self._answers[chosen].repeat_interleave(settings.group_size, dim=0)

    def learn(self, prompts: torch.Tensor, answers: torch.Tensor, right: torch.Tensor) -> float:
        """Reward answers that the present weights have sampled, and update; the mean reward."""
        rewards = self._reward(answers, right)
        groups = rewards.view(-1, self._settings.group_size)
        advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
        self._update(prompts, answers, advantages)
        return rewards.mean().item()

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on: weights, optimizer, and what draws at random."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "choice": self._choice.getstate(),
            "sampling": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, as if nothing had been in between."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._choice.setstate(state["choice"])
        torch.set_rng_state(state["sampling"])

    def _reward(self, answers: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """1 for the right answer; less for some right characters in their places."""
        counts = right != self._padding
        hits = (answers == right) & counts
        partial = hits.sum(dim=1) / counts.sum(dim=1)
        whole = (answers == right).all(dim=1).float()
        return whole + self._settings.partial_credit * (partial - whole)

    def _update(
        self, prompts: torch.Tensor, answers: torch.Tensor, advantages: torch.Tensor
    ) -> None:
        """Make the answers likelier that were better than their group, and the others less so."""
        counts = (answers != self._padding).float()
        inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
        logits = self._model(inputs, use_cache=False, logits_to_keep=answers.shape[1]).logits
        log_probs = functional.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(-1, answers[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        gain = advantages[:, None] * chosen + self._settings.entropy_bonus * entropy
        loss = -(gain * counts).sum() / counts.sum()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def encode_prompts(tokenizer: Any, sums: Sequence[Sum]) -> torch.Tensor:
    """The prompts as tokens: int64, (sums, prompt length)."""
    return torch.tensor(tokenizer([s.prompt for s in sums]).input_ids)


def encode_answers(tokenizer: Any, sums: Sequence[Sum]) -> torch.Tensor:
    """The right answers with their end tokens, padded: int64, (sums, ``ANSWER_TOKENS``)."""
    rows = [[*tokenizer(s.answer).input_ids, tokenizer.eos_token_id] for s in sums]
    padding = tokenizer.pad_token_id
    return torch.tensor([row + [padding] * (ANSWER_TOKENS - len(row)) for row in rows])


def accuracy(model: Any, tokenizer: Any, sums: Sequence[Sum]) -> float:
    """The part of ``sums`` that greedy decoding answers right."""
    right = encode_answers(tokenizer, sums)
    answers = generate(model, encode_prompts(tokenizer, sums), ANSWER_TOKENS, greedy=True)
    return (answers == right).all(dim=1).float().mean().item()
