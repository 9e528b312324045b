"""Tokenising with the snapshot's own tokenizer: prompts to tokens, tokens to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from vime.eval.runner.datasets import Dataset, Prompt

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)


class TokenizerError(ValueError):
    """There is no usable tokenizer, or it cannot encode these messages."""


class PromptTokenizer:
    """One tokenizer, loaded.

    Args:
        directory: a Hugging Face checkpoint; only files in it are read, no code of it is run.

    Raises:
        TokenizerError: it cannot be loaded.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise TokenizerError(
                f"{directory}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int] | str]:
        """Token ids of each text, or of chat messages under the tokenizer's chat template.

        Returns:
            One list of token ids a prompt; in place of those that cannot be encoded, the
            sentence that says why.
        """
        encoded: list[list[int] | str] = ["the prompt has no tokens"] * len(prompts)
        texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                texts[True].append((index, prompt))
                continue
            try:  # the template writes the special tokens itself
                texts[False].append((index, self._chat_text(prompt)))
            except TokenizerError as error:
                encoded[index] = str(error)
        for special, batch in texts.items():
            if batch:
                ids = self._tokenizer([t for _, t in batch], add_special_tokens=special).input_ids
                for (index, _), tokens in zip(batch, ids, strict=True):
                    encoded[index] = list(tokens) or encoded[index]
        return encoded

    def _chat_text(self, messages: list[dict[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise TokenizerError(
                "the prompt is chat messages, and the tokenizer has no chat template; "
                "use text prompts or export a tokenizer with a template"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise TokenizerError(
                f"the chat template refuses the messages: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class EncodedPrompts:
    """The prompts of all eval sets as tokens, encoded again only when the tokenizer changes.

    Attributes:
        tokenizer: what encoded them.
        ids: set name → token ids of each example, or the sentence that says why there are none.
        cut: set name → indices of the examples of which only the last tokens are left.
        left_out: set name → indices of the examples that are too long to be asked.
    """

    def __init__(self, directory: Path, datasets: Iterable[Dataset]) -> None:
        self.tokenizer = PromptTokenizer(directory)
        self.ids: dict[str, list[list[int] | str]] = {}
        self.cut: dict[str, set[int]] = {}
        self.left_out: dict[str, set[int]] = {}
        for dataset in datasets:
            encoded = self.tokenizer.encode([example.prompt for example in dataset.examples])
            self.ids[dataset.name] = encoded
            self.cut[dataset.name], self.left_out[dataset.name] = set(), set()
            limit = dataset.settings.max_prompt_len
            if limit is not None:
                self._keep_within(dataset, limit)

    def _keep_within(self, dataset: Dataset, limit: int) -> None:
        """Do with each prompt of more than ``limit`` tokens what the settings say."""
        encoded = self.ids[dataset.name]
        for index, tokens in enumerate(encoded):
            if isinstance(tokens, str) or len(tokens) <= limit:
                continue
            if dataset.settings.overlong_prompt == "cut":
                encoded[index] = tokens[-limit:]
                self.cut[dataset.name].add(index)
            else:
                encoded[index] = (
                    f"the prompt has {len(tokens)} tokens; --eval-max-prompt-len is {limit}"
                )
                if dataset.settings.overlong_prompt == "skip":
                    self.left_out[dataset.name].add(index)


class PromptCache:
    """Keeps the :class:`EncodedPrompts` of the latest tokenizer: a run seldom changes it.

    Args:
        datasets: what is encoded.
        base: the checkpoint whose tokenizer stands in for a snapshot that has none.
    """

    def __init__(self, datasets: Iterable[Dataset], base: Path | None) -> None:
        self._datasets = tuple(datasets)
        self._base = base
        self._digest: str | None = None
        self._prompts: EncodedPrompts | None = None

    def get(self, snapshot: Path) -> EncodedPrompts:
        """The prompts under the snapshot's tokenizer.

        Raises:
            TokenizerError: neither the snapshot nor the base has a usable tokenizer.
        """
        directory = self._directory(snapshot)
        digest = tokenizer_digest(directory)
        if self._prompts is None or digest != self._digest:
            self._prompts = EncodedPrompts(directory, self._datasets)
            self._digest = digest
        return self._prompts

    def _directory(self, snapshot: Path) -> Path:
        for directory in (snapshot, self._base):
            if directory is not None and _files(directory):
                return directory
        raise TokenizerError(
            f"{snapshot}: no tokenizer files in it, nor in --hf-checkpoint {self._base}; export "
            "the tokenizer with the model"
        )


def tokenizer_digest(directory: Path) -> str:
    """Hexadecimal BLAKE3 over the names and contents of a checkpoint's tokenizer files."""
    digest = blake3()
    for path in _files(directory):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    found = {path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())
