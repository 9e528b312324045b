"""Puts a snapshot's weights into one vLLM server, and proves by content that it serves them.

The same steps serve an engine of the fleet and a server that a user's backend looks after.
"""

from __future__ import annotations

from typing import Any

import anyio

from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import Control, EngineFailure, Loaded, Token


async def load_and_prove(
    control: Control,
    snapshot: Snapshot,
    num_ranks: int,
    *,
    timeout_s: float,
    call_timeout_s: float,
) -> dict[str, Any]:
    """Load a snapshot into a paused server; it serves again when this returns.

    Args:
        control: speaks to the server, which has been paused.
        snapshot: verified.
        num_ranks: the server's tensor-parallel size.
        timeout_s: for the load alone.
        call_timeout_s: for the token that is generated last.

    Returns:
        The evidence: ``digest``, ``ranks``, ``tensors``, ``bytes``, ``token``, ``logprob`` and
        ``seconds``.

    Raises:
        EngineFailure: it could not prove it; believe the server no more.
    """
    version = snapshot.weight_version
    began = anyio.current_time()
    ranks = await control.load(str(snapshot.path.absolute()), snapshot.digest, timeout_s)
    check_loaded(ranks, snapshot, num_ranks)
    await control.set_version(version)
    if (found := await control.version()) != version:
        raise EngineFailure("stale", f"its weight version is {found}, expected {version}")
    await control.clear_caches()
    await control.resume()
    token = await _prove_finite(control, ranks, version, call_timeout_s)
    return {
        "digest": ranks[0].digest,
        "ranks": len(ranks),
        "tensors": ranks[0].num_tensors,
        "bytes": ranks[0].num_bytes,
        "token": token.id,
        "logprob": token.logprob,
        "seconds": round(anyio.current_time() - began, 3),
    }


async def prove_token(control: Control, timeout_s: float, weight_version: str) -> Token:
    """Generate one token, and see that it came from the right weights.

    Raises:
        EngineFailure: it did not (``stale``), or there was none.
    """
    token = await control.token(timeout_s)
    if token.weight_version != weight_version:
        raise EngineFailure(
            "stale", f"a token came from {token.weight_version}, expected {weight_version}"
        )
    return token


async def _prove_finite(
    control: Control, ranks: list[Loaded], version: str, timeout_s: float
) -> Token:
    """A token that is a number; a NaN that the one token did not touch counts as well."""
    names = ", ".join(ranks[0].with_nan[:5])
    blame = f"; NaN in {len(ranks[0].with_nan)} tensors of the snapshot: {names}"
    try:
        token = await prove_token(control, timeout_s, version)
    except EngineFailure as failure:
        if failure.kind == "not_finite" and names:
            raise EngineFailure("not_finite", failure.detail + blame) from failure
        raise
    if names:
        raise EngineFailure("not_finite", f"the token is a number{blame}")
    return token


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
