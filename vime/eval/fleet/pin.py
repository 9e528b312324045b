"""Puts a snapshot's weights into one vLLM server, and proves by content that it serves them.

The same steps serve an engine of the fleet and a server that a user's backend looks after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio

from vime.eval.contracts import Snapshot
from vime.eval.fleet.agreement import NUM_TOKENS, PROMPTS
from vime.eval.fleet.control import Control, EngineFailure, Loaded, Token, together
from vime.fsm.canary import Canary

_FIRST_WAIT_S = 0.002
"""Before a server is asked whether it has paused; twice as long each time."""


async def load_and_prove(
    control: Control,
    snapshot: Snapshot,
    num_ranks: int,
    *,
    timeout_s: float,
    call_timeout_s: float,
    told: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Load a snapshot into a server; whatever it was generating is aborted.

    Args:
        control: speaks to the server.
        snapshot: verified.
        num_ranks: the server's tensor-parallel size.
        timeout_s: for the load alone.
        call_timeout_s: for each answer that is generated last.
        told: called once it has paused, just before it is told of the snapshot.

    Returns:
        The evidence: ``digest``, ``ranks``, ``tensors``, ``bytes``, ``canary`` (see
        :meth:`vime.fsm.canary.Canary.as_detail`) and ``seconds``.

    Raises:
        EngineFailure: it could not prove it; believe the server no more.
    """
    version = snapshot.weight_version
    began = anyio.current_time()
    ranks = await _load_paused(control, snapshot, timeout_s, told)
    check_loaded(ranks, snapshot, num_ranks)
    await control.set_version(version)
    with_nan = snapshot.with_nan or ranks[0].with_nan
    canary = await _resume_and_ask(control, with_nan, version, call_timeout_s)
    return {
        "digest": ranks[0].digest,
        "ranks": len(ranks),
        "tensors": ranks[0].num_tensors,
        "bytes": ranks[0].num_bytes,
        "canary": canary.as_detail(),
        "seconds": round(anyio.current_time() - began, 3),
    }


async def _load_paused(
    control: Control, snapshot: Snapshot, timeout_s: float, told: Callable[[], None]
) -> list[Loaded]:
    """Pause a server and have it load; it is still paused then, and its caches are empty.

    vLLM says that it has paused some 20 ms after it has. The load begins as soon as the server
    confirms it when it is asked, and that nothing uses its cache: no request is left then.
    """
    ranks: list[Loaded] = []
    answered = anyio.Event()

    async def pause() -> None:
        await control.pause()
        answered.set()

    async def load() -> None:
        wait_s, paused = _FIRST_WAIT_S, False
        while not paused:
            with anyio.move_on_after(wait_s):  # a question that comes too early is asked again
                await answered.wait()
            wait_s *= 2
            was_answered = answered.is_set()
            paused = await control.is_paused()
            if was_answered and not paused:
                raise EngineFailure("refused", "it was told to pause, and goes on")
        if not await control.clear_prefix_cache():
            await answered.wait()
            if not await control.clear_prefix_cache():
                raise EngineFailure("refused", "it is paused, and its prefix cache is still in use")
        told()
        ranks.extend(await control.load(snapshot, timeout_s))

    await together(pause, load)
    return ranks


async def _resume_and_ask(
    control: Control, with_nan: Sequence[str], version: str, timeout_s: float
) -> Canary:
    """Have a server serve again; questions that come before it does are answered then."""
    canaries: list[Canary] = []

    async def ask() -> None:
        canaries.append(await _prove_finite(control, with_nan, version, timeout_s))

    await together(control.resume, partial(_check_name, control, version), ask)
    return canaries[0]


async def _check_name(control: Control, version: str) -> None:
    if (found := await control.version()) != version:
        raise EngineFailure("stale", f"its weight version is {found}, expected {version}")


async def prove_token(control: Control, timeout_s: float, weight_version: str) -> Token:
    """Generate one token, and see that it came from the right weights.

    Raises:
        EngineFailure: it did not (``stale``), or there was none.
    """
    token = await control.token(timeout_s)
    _check_version(token, weight_version)
    return token


async def ask_canary(control: Control, timeout_s: float, weight_version: str) -> Canary:
    """Ask the canary prompts, and see that the answers came from the right weights.

    One after the other: the same batches on every engine compute the same numbers.

    Args:
        control: speaks to the server.
        timeout_s: for each answer.
        weight_version: what must have given it.

    Raises:
        EngineFailure: it did not (``stale``), or there was none.
    """
    answers = [await control.answer(prompt, NUM_TOKENS, timeout_s) for prompt in PROMPTS]
    for token in itertools.chain.from_iterable(answers):
        _check_version(token, weight_version)
    return Canary(
        tokens=tuple(tuple(token.id for token in answer) for answer in answers),
        logprobs=tuple(tuple(token.logprob for token in answer) for answer in answers),
        gaps=tuple(tuple(token.gap for token in answer) for answer in answers),
    )


def _check_version(token: Token, expected: str) -> None:
    if token.weight_version != expected:
        said = f"a token came from {token.weight_version}, expected {expected}"
        raise EngineFailure("stale", said)


async def _prove_finite(
    control: Control, with_nan: Sequence[str], version: str, timeout_s: float
) -> Canary:
    """Answers that are numbers; a NaN that they did not touch counts as well."""
    blame = f"; {nan_words(with_nan)}"
    try:
        canary = await ask_canary(control, timeout_s, version)
    except EngineFailure as failure:
        if failure.kind == "not_finite" and with_nan:
            raise EngineFailure("not_finite", failure.detail + blame) from failure
        raise
    if with_nan:
        raise EngineFailure("not_finite", f"the tokens are numbers{blame}")
    return canary


def nan_words(with_nan: Sequence[str]) -> str:
    """What to tell of a snapshot whose tensors of these names hold a NaN."""
    return f"NaN in {len(with_nan)} tensors of the snapshot: {', '.join(with_nan[:5])}"


def check_loaded(ranks: list[Loaded], snapshot: Snapshot, num_ranks: int) -> None:
    """Compare what every rank of an engine has loaded with the snapshot.

    Raises:
        EngineFailure: ``stale``, with what was found and what was expected.
    """
    if len(ranks) != num_ranks:
        raise EngineFailure("stale", f"{len(ranks)} ranks have loaded, expected {num_ranks}")
    for number, rank in enumerate(ranks):
        if rank.digest != snapshot.digest:
            raise EngineFailure(
                "stale",
                f"rank {number} read {rank.num_tensors} tensors with the digest {rank.digest}, "
                f"expected {snapshot.digest} of {snapshot.weight_version}",
            )
        if rank.unloaded:
            names = ", ".join(rank.unloaded[:5])
            raise EngineFailure(
                "stale",
                f"rank {number} kept old weights in {len(rank.unloaded)} parameters: {names}; "
                f"expected all of {snapshot.weight_version}",
            )
