"""The clients that the EvalRunner is compared with, each in a process of its own.

``python -m bench.clients bare|lm_eval`` reads one JSON object, a :class:`Work`, from its standard
input, and then does that work once for every further line, and answers with its seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Work:
    """What every client is to ask.

    Attributes:
        base_url: the server's, without a path.
        api_key: its bearer token.
        model: the served model's name.
        tokenizer: a directory with the tokenizer.
        prompts: the texts.
        token_ids: the same, encoded.
        max_tokens: of an answer; greedy.
        concurrency: requests at once.
    """

    base_url: str
    api_key: str
    model: str
    tokenizer: str
    prompts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    max_tokens: int
    concurrency: int


def bare_client(work: Work) -> Callable[[], None]:
    """Nothing but the requests, with the HTTP library that vime uses, and their decoding."""
    import aiohttp
    import orjson

    sampling = {"temperature": 0.0, "max_tokens": work.max_tokens, "n": 1, "detokenize": False}
    bodies = [
        {"model": work.model, "token_ids": ids, "sampling_params": sampling}
        for ids in work.token_ids
    ]
    url = f"{work.base_url}/inference/v1/generate"

    async def ask_all() -> None:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=work.concurrency),
                headers={
                    "Authorization": f"Bearer {work.api_key}",
                    "Content-Type": "application/json",
                    "Accept-Encoding": "identity",
                },
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = iter(bodies)
            for _ in range(min(work.concurrency, len(bodies))):
                tasks.create_task(ask(session, waiting))

    async def ask(session: aiohttp.ClientSession, waiting: Iterator[dict[str, Any]]) -> None:
        for body in waiting:
            async with session.post(url, data=orjson.dumps(body)) as response:
                response.raise_for_status()
                answer = orjson.loads(await response.read())
            assert answer["choices"][0]["token_ids"], "an answer has tokens"

    return lambda: asyncio.run(ask_all())


def lm_eval_client(work: Work) -> Callable[[], None]:
    """``local-completions`` of lm-eval, without its start and without its scoring."""
    os.environ |= {"OPENAI_API_KEY": work.api_key, "TQDM_DISABLE": "1"}
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model: Any = LocalCompletionsAPI(
        model=work.model,
        base_url=f"{work.base_url}/v1/completions",
        tokenizer=work.tokenizer,
        tokenizer_backend="huggingface",
        num_concurrent=work.concurrency,
        max_gen_toks=work.max_tokens,
    )

    def ask_all() -> None:
        sampling = {"until": [], "temperature": 0.0, "max_gen_toks": work.max_tokens}
        requests = [
            Instance("generate_until", {}, (prompt, dict(sampling)), index)
            for index, prompt in enumerate(work.prompts)
        ]
        answers = model.generate_until(requests, disable_tqdm=True)
        assert len(answers) == len(work.prompts), "one answer a prompt"

    return ask_all


_CLIENTS: dict[str, Callable[[Work], Callable[[], None]]] = {
    "bare": bare_client,
    "lm_eval": lm_eval_client,
}


@contextmanager
def client_process(kind: str, work: Work) -> Iterator[Callable[[], float]]:
    """A call that has the client do the work once, and returns its seconds."""
    command = [sys.executable, "-m", "bench.clients", kind]
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(line: str) -> str:
            stdin.write(line + "\n")
            stdin.flush()
            answer = stdout.readline()
            if not answer:
                raise OSError(f"the client {kind} ended with status {process.wait()}")
            return answer

        ask(json.dumps(asdict(work)))
        yield lambda: float(ask(""))
        stdin.close()


def main() -> None:
    """Run the program."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    ask_all = _CLIENTS[sys.argv[1]](Work(**json.loads(sys.stdin.readline())))
    answers.write("ready\n")
    answers.flush()
    for _ in sys.stdin:
        began = time.perf_counter()
        ask_all()
        answers.write(f"{time.perf_counter() - began}\n")
        answers.flush()


if __name__ == "__main__":
    main()
