"""A small HTTP service that scores checkpoints, for ``http_scoring_eval_fn.py`` to ask.

    python examples/eval/scoring_service.py --port 8900 --texts texts.jsonl

It stands for a service that some other team runs. It is asked for a checkpoint directory that
both can read, and answers how likely the model finds each of its texts::

    POST /score {"checkpoint_dir": "/dev/shm/snapshots/step_40"}
    200 {"rewards": [-3.2, …], "tokens": [12, …], "sha256": "…"}

``rewards`` has one number a text, the mean natural logarithm of the probability of its tokens;
``sha256`` is of the weights that were scored. 400 says what is wrong with the request. 503 says
that it takes no work now: it scores one checkpoint at a time, and ``POST /drain`` closes it until
``POST /resume``. ``GET /health`` says how it is. It listens on loopback only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_BODY_BYTES = 1 << 20


class BadRequestError(ValueError):
    """The caller's mistake."""


class Scorer:
    """Scores one checkpoint at a time.

    Args:
        texts: what the model is to find likely.

    Attributes:
        draining: takes no new work.
    """

    def __init__(self, texts: list[str]) -> None:
        self.draining = False
        self._texts = texts
        self._busy = threading.Lock()

    def score(self, request: Any) -> dict[str, Any] | None:
        """Answer ``POST /score``; ``None`` when it takes no work.

        Raises:
            BadRequestError: no directory is named, or no checkpoint is in it.
        """
        if self.draining or not self._busy.acquire(blocking=False):
            return None
        try:
            return self._score(_directory_of(request))
        finally:
            self._busy.release()

    def _score(self, directory: Path) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32
            )
            digest = _sha256(directory)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadRequestError(f"{directory}: cannot be loaded: {error}") from error
        rewards, tokens = [], []
        for text in self._texts:
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
            with torch.inference_mode():
                rewards.append(-float(model(input_ids=ids, labels=ids).loss))
            tokens.append(int(ids.shape[1]))
        return {"rewards": rewards, "tokens": tokens, "sha256": digest}


def _directory_of(request: Any) -> Path:
    named = request.get("checkpoint_dir") if isinstance(request, dict) else None
    if not isinstance(named, str):
        raise BadRequestError('expected {"checkpoint_dir": DIRECTORY}')
    if not Path(named, "config.json").is_file():
        raise BadRequestError(f"{named}: no config.json there; expected a checkpoint directory")
    return Path(named)


def _sha256(directory: Path) -> str:
    """Of the weight files' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: Server
    timeout = 30  # seconds, for a caller that sends nothing

    def do_GET(self) -> None:
        """Answer ``/health``."""
        if self.path == "/health":
            self._answer(200, {"draining": self.server.scorer.draining})
        else:
            self._answer(404, {"error": f"no such path: {self.path}"})

    def do_POST(self) -> None:
        """Answer ``/score``, ``/drain`` and ``/resume``."""
        scorer = self.server.scorer
        try:
            body = self._body()
            if self.path in ("/drain", "/resume"):
                scorer.draining = self.path == "/drain"
                self._answer(200, {"draining": scorer.draining})
            elif self.path == "/score":
                self._score(scorer, body)
            else:
                self._answer(404, {"error": f"no such path: {self.path}"})
        except BadRequestError as error:
            self._answer(400, {"error": str(error)})

    def _score(self, scorer: Scorer, body: bytes) -> None:
        try:
            request = json.loads(body)
        except ValueError as error:
            raise BadRequestError(f"no JSON: {error}") from error
        result = scorer.score(request)
        if result is None:
            why = "draining" if scorer.draining else "another checkpoint is being scored"
            self._answer(503, {"error": why})
        else:
            self._answer(200, result)

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise BadRequestError(f"a body of {length} bytes; at most {MAX_BODY_BYTES}")
        return self.rfile.read(int(length))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """The HTTP server in front of a :class:`Scorer`; port 0 takes any that is free."""

    daemon_threads = True

    def __init__(self, port: int, scorer: Scorer) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.scorer = scorer


def read_texts(path: Path) -> list[str]:
    """The texts of a file of JSON lines ``{"text": …}``.

    Raises:
        ValueError: it has none, or a line is of another form; names the line.
    """
    texts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f'{path}:{number}: expected {{"text": "…"}}') from error
        if not isinstance(text, str) or len(text) < 2:
            raise ValueError(f"{path}:{number}: expected a text of two characters or more")
        texts.append(text)
    if not texts:
        raise ValueError(f"{path}: no texts in it")
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; the first line of the output says where."""
    parser = argparse.ArgumentParser(description="Score checkpoints over HTTP, on loopback.")
    parser.add_argument("--port", type=int, default=8900, help="0: any (default: %(default)s)")
    parser.add_argument("--texts", type=Path, required=True, help='JSON lines {"text": …}')
    args = parser.parse_args(argv)
    try:
        server = Server(args.port, Scorer(read_texts(args.texts)))
    except (OSError, ValueError, OverflowError) as error:
        print(f"scoring_service.py: {error}", file=sys.stderr)
        return 2
    with server:
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
