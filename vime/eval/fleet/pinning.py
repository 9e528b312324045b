"""Brings the fleet to one snapshot: enough engines, each with its proof, all of one mind.

The supervisor keeps the engines alive and decides whose turn it is; what happens in a turn is
here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio

from vime.eval.contracts import EngineProof, PinProof, Snapshot
from vime.eval.fleet.agreement import Agreement, Verdict
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.engine import Engine
from vime.eval.fleet.pin import nan_words
from vime.eval.fleet.router import Router, RouterFailure
from vime.eval.fleet.router_keeper import RouterKeeper
from vime.eval.fleet.servers import Delivery, Localize
from vime.eval.fleet.settings import FleetSettings
from vime.fsm.canary import Canary
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger("vime")

#: The engine stays down.
DOWN = ("lost", "stopped")

#: Of several failures of one pin, the reason of the gravest is reported.
_GRAVITY = ("pin_violation", "transfer_failed", "unhealthy", "timeout_pin")


#: Part of the pin's time that stays for the router, where the point can do without an engine.
_RESERVE = 0.1

#: Part of the pin's time that a load is thought to take, as long as none has taken longer.
_LOAD = 0.05

Proven = tuple[EngineProof, Delivery]
"""What an engine proved, and how the snapshot came to it."""


class Pinner:
    """Pins the engines to one snapshot at a time; the caller sees to the turns.

    Args:
        settings: the fleet.
        engines: all of it.
        router: in front of them.
        keeper: of the router.
        localize: brings a snapshot to an engine's node.
        api_key: for generation.
        changed: waits until the fleet looks different.
    """

    def __init__(
        self,
        settings: FleetSettings,
        engines: Sequence[Engine],
        router: Router,
        keeper: RouterKeeper,
        *,
        localize: Localize,
        api_key: str,
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._router = router
        self._keeper = keeper
        self._localize = localize
        self._api_key = api_key
        self._changed = changed
        self._agreement = Agreement()
        self._longest_load_s = 0.0

    async def pin(
        self, snapshot: Snapshot, cause_seq: int | None
    ) -> tuple[PinProof, Canary | None]:
        """Have every engine, or as many as are needed, prove ``snapshot``; open the router.

        Returns:
            The proof, and what the engines answered to the canary prompts.

        Raises:
            EvalSkip: see :meth:`vime.eval.fleet.supervisor.FleetSupervisor.pin`.
        """
        _refuse_nan(snapshot)
        began = anyio.current_time()
        deadline = began + self._settings.pin_timeout_s
        while True:
            await self._wait_for_engines(deadline)
            proofs, failures = await self._pin_engines(snapshot, deadline, cause_seq)
            verdict = self._compare(snapshot, proofs, failures)
            kinds = {failure.kind for failure in failures.values()}
            if len(proofs) >= self._settings.num_needed and "not_finite" not in kinds:
                break
            if kinds != {"absent"}:
                raise _skip(failures)
            # It had died before, unnoticed: no fault of this snapshot, which waits for it.
        await self._open_router(snapshot, proofs, deadline)
        self._keeper.forgive()
        proven = self._serving(snapshot, proofs)  # one that was lost since then proves nothing
        served_seq = max(engine.last_seq or 0 for engine in proven)
        proof = PinProof(
            base_url=self._router.url,
            model=self._settings.model,
            weight_version=snapshot.weight_version,
            engines=tuple(proofs[engine.name][0] for engine in proven),
            num_gpus_per_engine=self._settings.num_gpus_per_engine,
            pin_seconds=anyio.current_time() - began,
            canary=None if verdict.canary is None else verdict.canary.digest,
            unchanged_since=verdict.unchanged_since,
            cause_seq=served_seq,
            api_key=self._api_key,
            transfer_seconds=max(delivery.seconds for _, delivery in proofs.values()),
            transfer_bytes=sum(delivery.num_bytes for _, delivery in proofs.values()),
        )
        return proof, verdict.canary

    async def _wait_for_engines(self, deadline: float) -> None:
        """Wait, but not so long that the deadline would interrupt the load, and cost the engines.

        An engine that is whole too late for this point is there for the next one.

        Raises:
            EvalSkip: there are not enough of them, or will never be.
        """
        pin_s = self._settings.pin_timeout_s
        load_s = min(max(self._longest_load_s, _LOAD * pin_s), pin_s / 2)
        with anyio.CancelScope(deadline=deadline - load_s):
            while not self._enough():
                await self._changed()
        if self._enough() and anyio.current_time() < deadline - load_s:
            return
        waited = f"{pin_s:.4g} s, less {load_s:.2g} s to load"
        raise self._unhealthy(f"not whole after {waited}: {'; '.join(self._missing())}")

    def _enough(self) -> bool:
        """Raises ``EvalSkip`` when there never will be again."""
        down = [engine for engine in self._engines if engine.state in DOWN]
        if len(self._engines) - len(down) < self._settings.num_needed:
            said = "; ".join(f"{e.name} is {e.state}: {e.failure}" for e in down)
            raise self._unhealthy(said)
        if self._keeper.lost is not None:
            raise EvalSkip("unhealthy", str(self._keeper.lost))
        usable = sum(engine.usable for engine in self._engines)
        return self._router.up and usable >= self._settings.num_needed

    def _missing(self) -> list[str]:
        missing = [
            f"{engine.name} is {engine.state}"
            + (f" ({engine.failure})" if engine.failure is not None else "")
            for engine in self._engines
            if not engine.usable
        ]
        return missing if self._router.up else [*missing, "the router is down"]

    async def _pin_engines(
        self, snapshot: Snapshot, deadline: float, cause_seq: int | None
    ) -> tuple[dict[str, Proven], dict[str, EngineFailure]]:
        """Pin all at once; the others finish also when one has failed, and stay usable."""
        proofs: dict[str, Proven] = {}
        failures: dict[str, EngineFailure] = {}
        if self._settings.num_needed < len(self._engines):  # one that hangs must not cost the point
            deadline -= _RESERVE * self._settings.pin_timeout_s

        async def pin(engine: Engine) -> None:
            try:
                proofs[engine.name] = await self.prove(engine, snapshot, deadline, cause_seq)
            except EngineFailure as failure:
                failures[engine.name] = failure

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                if engine.usable:
                    tasks.start_soon(pin, engine)
        if not failures:
            took_s = anyio.current_time() - began
            self._longest_load_s = max(self._longest_load_s, took_s)
        return proofs, failures

    async def prove(
        self, engine: Engine, snapshot: Snapshot, deadline: float, cause_seq: int | None
    ) -> Proven:
        """Bring a snapshot to an engine's node, and into the engine.

        Raises:
            EngineFailure: either failed; while it was still under way the engine is not doubted.
        """
        async with AsyncExitStack() as stack:
            try:
                with anyio.fail_after(max(deadline - anyio.current_time(), 0)):
                    delivery = await stack.enter_async_context(
                        self._localize(snapshot, engine.index)
                    )
            except TimeoutError:
                late = f"{snapshot.weight_version} did not reach its node in time"
                raise EngineFailure("overdue", late) from None
            left_s = deadline - anyio.current_time()
            return await engine.pin(delivery.snapshot, left_s, cause_seq), delivery

    def _compare(
        self,
        snapshot: Snapshot,
        proofs: dict[str, Proven],
        failures: dict[str, EngineFailure],
    ) -> Verdict:
        """Move the engines that answer otherwise from ``proofs`` to ``failures``."""
        canaries = {
            engine.name: canary
            for engine in self._engines
            if engine.name in proofs and (canary := canary_of(proofs[engine.name][0])) is not None
        }
        verdict = self._agreement.judge(snapshot, canaries)
        for engine in self._engines:
            if engine.name in verdict.wrong:
                del proofs[engine.name]
                failures[engine.name] = failure = EngineFailure("stale", verdict.wrong[engine.name])
                engine.doubt(failure)
        if verdict.unchanged_since is not None:
            log.warning(
                "the weights %s are answered exactly like %s: a load that did nothing, or a step "
                "that changed nothing that the canary prompts touch",
                snapshot.weight_version, verdict.unchanged_since,
            )  # fmt: skip
        return verdict

    async def _open_router(
        self, snapshot: Snapshot, proven: Collection[str], deadline: float
    ) -> None:
        """Let the router ask the engines, now that all have proven the snapshot."""
        timeout_s = max(deadline - anyio.current_time(), 0)
        try:
            with anyio.fail_after(timeout_s):
                await self._router.serve(self.proven(snapshot, proven))
                await self._router.prove(snapshot.weight_version, timeout_s)
        except TimeoutError:
            raise EvalSkip("timeout_pin", "the router did not answer in time") from None
        except RouterFailure as failure:
            await self._keeper.replace()
            raise EvalSkip("unhealthy", str(failure)) from failure
        if not self._router.up or len(self.proven(snapshot, proven)) < self._settings.num_needed:
            raise self._unhealthy("; ".join(self._missing()))

    def last_doubt(self, since: int | None) -> int | None:
        """The record of the engine that was doubted last, if one was after ``since``."""
        seqs = (engine.doubt_seq for engine in self._engines if engine.doubt_seq is not None)
        return max((seq for seq in seqs if since is None or seq > since), default=None)

    def _unhealthy(self, detail: str) -> EvalSkip:
        """The skip for want of engines: its cause is what the first of them has come to."""
        skip = EvalSkip("unhealthy", detail)
        missing = (engine for engine in self._engines if not engine.usable)
        skip.cause_seq = next((engine.last_seq for engine in missing), None)
        return skip

    def proven(self, snapshot: Snapshot, names: Collection[str]) -> set[str]:
        """Where those of the named engines listen that serve ``snapshot`` now."""
        return {engine.url for engine in self._serving(snapshot, names)}

    def _serving(self, snapshot: Snapshot, names: Collection[str]) -> list[Engine]:
        expected = ("serving", snapshot.weight_version)
        mine = (engine for engine in self._engines if engine.name in names)
        return [e for e in mine if (e.state, e.weight_version) == expected]


def _refuse_nan(snapshot: Snapshot) -> None:
    """An engine with such weights would have to be started again; none is given them."""
    if snapshot.with_nan:
        raise EvalSkip("unhealthy", f"{nan_words(snapshot.with_nan)}; no engine was given it")


def _skip(failures: Mapping[str, EngineFailure]) -> EvalSkip:
    """The reason of the gravest failure, whose record is the cause; all are told."""
    gravest = min(failures.values(), key=lambda failure: _GRAVITY.index(failure.skip_reason))
    told = "; ".join(f"{name}: {failure}" for name, failure in sorted(failures.items()))
    skip = EvalSkip(gravest.skip_reason, told)
    skip.cause_seq = gravest.cause_seq
    return skip


def canary_of(proof: EngineProof) -> Canary | None:
    """What the engine answered to the canary prompts."""
    return Canary.of_detail(proof.evidence.get("canary"))
