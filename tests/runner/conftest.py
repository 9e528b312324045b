from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint, PinProof, Snapshot

VERSION = "run:1:abc"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def proof() -> PinProof:
    return PinProof("http://engine.test", "m", VERSION, api_key="secret")


@pytest.fixture
def point() -> EvalPoint:
    return EvalPoint(1)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., EvalConfig]:
    """A config over one eval set named ``toy`` with the given rows."""

    def make(rows: list[dict[str, Any]], **settings: Any) -> EvalConfig:
        path = tmp_path / "toy.jsonl"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
        return EvalConfig(prompt_data=(("toy", path),), **settings)

    return make


def write_tokenizer(directory: Path, chat: bool = True) -> None:
    """A byte-level tokenizer: one token a byte, then <bos> 256, <eos> 257, <pad> 258."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<bos>", "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    if chat:
        fast.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
    fast.save_pretrained(directory)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture
def snapshot(tokenizer_dir: Path) -> Snapshot:
    return Snapshot(1, tokenizer_dir, VERSION, "abc" * 20, owned=True)
