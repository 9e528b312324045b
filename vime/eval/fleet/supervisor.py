"""Keeps the fleet alive, and pins it to one snapshot at a time.

Consumes: pins (in the order in which they are asked for), the ends of processes, time.
Produces: proofs or ``EvalSkip`` for the pins; engines that come back after whatever befell them.

One task per process, none of which outlives :meth:`FleetSupervisor.run`:

===============  ====================================================  =======================
task             waits for                                             unblocked by
===============  ====================================================  =======================
an engine's      its first token, then the next look at it; after a    its answers, its exit,
keeper           death its backoff                                     a doubt, the deadlines
the router's     the end of the router's process                       that end
keeper
a rejoin         an engine that came back while a snapshot is pinned:  its answers, its exit,
                 loading that snapshot                                 the pin's deadline
a pin (in the    its turn; the whole fleet; every engine's proof       the pins before it, the
caller's task)                                                         engines, its deadline
===============  ====================================================  =======================

What holds at any time:

1. The router may ask an engine only from its proof of the snapshot that is pinned until it is
   doubted. An engine that came back with the base's weights does not join before it has loaded
   the pinned snapshot.
2. An engine that failed any call, or was given up in the middle of one, is never asked again: it
   leaves the router, its whole process tree is ended, and another process takes its place.
3. Healthy shutdown is cancellation of ``run``; a crash of an engine or of the router is an event
   within it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus

from vime.eval.contracts import EngineProof, PinProof, Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.engine import Engine
from vime.eval.fleet.launch import MakeClient, Spawn, Tokens, loopback_client
from vime.eval.fleet.router import Router, RouterFailure
from vime.eval.fleet.servers import Delivery, Launch, Localize, LocalLaunch, at_home
from vime.eval.fleet.settings import FleetSettings
from vime.eval.processes import process
from vime.fsm.trace import Trace
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger("vime")

#: Of several failures of one pin, the reason of the gravest is reported.
_GRAVITY = ("pin_violation", "transfer_failed", "unhealthy", "timeout_pin")

#: Skips of an evaluation that the loss of an engine explains.
_FOR_WANT_OF_ANSWERS = ("unhealthy", "version_mixed", "timeout_eval")

_DOWN = ("lost", "stopped")


class FleetStartError(RuntimeError):
    """The fleet cannot be brought up; the message ends with the log of what failed."""


class MakeEngine(Protocol):
    """Makes an engine: :class:`Engine`, or a fake."""

    def __call__(
        self,
        index: int,
        settings: FleetSettings,
        tokens: Tokens,
        trace: Trace,
        *,
        changed: Callable[[], None],
        launch: Launch,
        make_client: MakeClient,
    ) -> Engine:
        """An engine in the state ``new``."""


@dataclass
class _Hold:
    """The pin that has the fleet: an engine that comes back joins it.

    Attributes:
        snapshot: what is pinned.
        cause_seq: the trace record that asked for it.
        rejoining: the engines that load it now.
    """

    snapshot: Snapshot
    cause_seq: int | None
    rejoining: set[str] = field(default_factory=set)


class FleetSupervisor:
    """The dedicated engines behind their router; implements :class:`vime.eval.contracts.Fleet`.

    Args:
        settings: the fleet; checked with :func:`vime.eval.fleet.settings.preflight` before.
        trace: where the engines' transitions go.
        launch, localize: start an engine's process and bring a snapshot to it, where engines are
            not children of this process.
        tokens: of an earlier run whose engines this one takes over; new ones if absent.
        spawn, make_client, make_engine: the ways to the world outside; fakes may replace them.
    """

    def __init__(
        self,
        settings: FleetSettings,
        trace: Trace,
        *,
        launch: Launch | None = None,
        localize: Localize = at_home,
        tokens: Tokens | None = None,
        spawn: Spawn = partial(process.spawn, scratch=True),  # noqa: B008 -- a constant
        make_client: MakeClient = loopback_client,
        make_engine: MakeEngine = Engine,
    ) -> None:
        self.settings = settings
        self.tokens = tokens or Tokens()
        self._localize = localize
        self._router = Router(settings, self.tokens, spawn=spawn, make_client=make_client)
        self._router_lost: RouterFailure | None = None
        self._router_strikes = 0
        self._engines = [
            make_engine(
                index,
                settings,
                self.tokens,
                trace,
                changed=self._notify,
                launch=launch or LocalLaunch(settings, spawn),
                make_client=make_client,
            )
            for index in range(settings.num_engines)
        ]
        self._turn = anyio.Lock()  # gives the turns in the order in which they are asked for
        self._hold: _Hold | None = None
        self._change = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start everything, and keep it alive until cancelled; then end everything.

        An engine that stays down does not end it: the pins say so, and :meth:`wait_ready`.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_router)
                for engine in self._engines:
                    tasks.start_soon(self._keep, engine, tasks)
                task_status.started()
                await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop()

    async def wait_ready(self) -> None:
        """Wait until every engine has answered once and the router serves.

        Each start has its deadline, and so has this.

        Raises:
            FleetStartError: something did not start; with the end of its log.
        """
        while not (self._router.up and all(engine.was_ready for engine in self._engines)):
            for engine in self._engines:
                if engine.state in _DOWN:
                    raise FleetStartError(
                        f"{engine.name} did not start: {engine.failure or engine.state}\n"
                        f"{engine.last_words}".rstrip()
                    )
            if self._router_lost is not None:
                raise FleetStartError(str(self._router_lost))
            await self._change.wait()

    @asynccontextmanager
    async def pin(
        self, snapshot: Snapshot, cause_seq: int | None = None
    ) -> AsyncIterator[PinProof]:
        """Hold the fleet, with every engine proven to serve ``snapshot``.

        The turns are given in the order of the calls; how long a turn lasts is bounded by what
        the one before does with it. The deadline counts from the turn.

        Args:
            snapshot: verified, and leased by the caller for as long as this holds it.
            cause_seq: the trace record that asks for it.

        Raises:
            EvalSkip: ``pin_violation`` (an engine could not prove its weights), ``unhealthy``
                (an engine or the router is down, or the weights generate no numbers) or
                ``timeout_pin``. An ``EvalSkip`` of the caller's that passes through, for want of
                answers, is told which engine was lost meanwhile.
        """
        async with self._turn:
            proof = await self._pin(snapshot, cause_seq)
            self._hold = hold = _Hold(snapshot, cause_seq)
            try:
                yield proof
            except EvalSkip as skip:
                if skip.cause_seq is None and skip.reason in _FOR_WANT_OF_ANSWERS:
                    skip.cause_seq = self._last_doubt(since=proof.cause_seq)
                raise
            finally:
                self._hold = None
                # The snapshot may be deleted from here on: whoever still reads it finishes.
                while hold.rejoining:
                    await self._change.wait()

    async def _pin(self, snapshot: Snapshot, cause_seq: int | None) -> PinProof:
        began = anyio.current_time()
        deadline = began + self.settings.pin_timeout_s
        while True:
            await self._wait_until_whole(deadline)
            proofs, failures = await self._pin_engines(snapshot, deadline, cause_seq)
            if not failures:
                break
            if {failure.kind for failure in failures.values()} != {"absent"}:
                raise _skip(failures)
            # It had died before, unnoticed: no fault of this snapshot, which waits for it.
        await self._open_router(snapshot, deadline)
        self._router_strikes = 0
        seqs = [engine.last_seq for engine in self._engines if engine.last_seq is not None]
        return PinProof(
            base_url=self._router.url,
            model=self.settings.model,
            weight_version=snapshot.weight_version,
            engines=tuple(proofs[engine.name][0] for engine in self._engines),
            num_gpus_per_engine=self.settings.num_gpus_per_engine,
            pin_seconds=anyio.current_time() - began,
            cause_seq=max(seqs),
            api_key=self.tokens.api_key,
            transfer_seconds=max(delivery.seconds for _, delivery in proofs.values()),
            transfer_bytes=sum(delivery.num_bytes for _, delivery in proofs.values()),
        )

    async def _wait_until_whole(self, deadline: float) -> None:
        """Raises ``EvalSkip``: the fleet is not, or will never be."""
        with anyio.CancelScope(deadline=deadline):
            while not self._whole():
                await self._change.wait()
        if missing := self._missing():
            patience = f"{self.settings.pin_timeout_s:.4g} s"
            raise self._unhealthy(f"not whole after {patience}: {'; '.join(missing)}")

    def _whole(self) -> bool:
        """Raises ``EvalSkip`` when it never will be again."""
        for engine in self._engines:
            if engine.state in _DOWN:
                raise self._unhealthy(f"{engine.name} is {engine.state}: {engine.failure}")
        if self._router_lost is not None:
            raise EvalSkip("unhealthy", str(self._router_lost))
        return not self._missing()

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
    ) -> tuple[dict[str, tuple[EngineProof, Delivery]], dict[str, EngineFailure]]:
        """Pin all at once; the others finish also when one has failed, and stay usable."""
        proofs: dict[str, tuple[EngineProof, Delivery]] = {}
        failures: dict[str, EngineFailure] = {}

        async def pin(engine: Engine) -> None:
            try:
                proofs[engine.name] = await self._deliver(engine, snapshot, deadline, cause_seq)
            except EngineFailure as failure:
                failures[engine.name] = failure

        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                tasks.start_soon(pin, engine)
        return proofs, failures

    async def _deliver(
        self, engine: Engine, snapshot: Snapshot, deadline: float, cause_seq: int | None
    ) -> tuple[EngineProof, Delivery]:
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

    async def _open_router(self, snapshot: Snapshot, deadline: float) -> None:
        """Let the router ask the engines, now that all have proven the snapshot."""
        timeout_s = max(deadline - anyio.current_time(), 0)
        try:
            with anyio.fail_after(timeout_s):
                await self._serve_pinned(snapshot)
                await self._router.prove(snapshot.weight_version, timeout_s)
        except TimeoutError:
            raise EvalSkip("timeout_pin", "the router did not answer in time") from None
        except RouterFailure as failure:
            with suppress(TimeoutError):  # its keeper tries again, then starts another one
                await self._router.end_process()
            raise EvalSkip("unhealthy", str(failure)) from failure
        if missing := self._missing():
            raise self._unhealthy("; ".join(missing))

    def _last_doubt(self, since: int | None) -> int | None:
        """The record of the engine that was doubted last, if one was after ``since``."""
        seqs = (engine.doubt_seq for engine in self._engines if engine.doubt_seq is not None)
        return max((seq for seq in seqs if since is None or seq > since), default=None)

    def _unhealthy(self, detail: str) -> EvalSkip:
        """The skip for want of engines: its cause is what the first of them has come to."""
        skip = EvalSkip("unhealthy", detail)
        missing = (engine for engine in self._engines if not engine.usable)
        skip.cause_seq = next((engine.last_seq for engine in missing), None)
        return skip

    async def _keep(self, engine: Engine, tasks: TaskGroup) -> None:
        """Every life of one engine, one after the other, until it stays down."""
        while True:
            try:
                await engine.start(tasks)
                if self._hold is not None:
                    tasks.start_soon(self._rejoin, engine, self._hold)
                await engine.watch()
            except EngineFailure as failure:
                engine.doubt(failure)
            await self._drop(engine)
            await self._bury(engine)
            if not engine.was_ready or engine.strikes > self.settings.max_restarts:
                engine.abandon()
                return
            backoff_s = self._backoff_s(engine.strikes)
            engine.restart(backoff_s)
            await anyio.sleep(backoff_s)

    async def _rejoin(self, engine: Engine, hold: _Hold) -> None:
        """Bring an engine that came back to the pinned snapshot, then behind the router."""
        if self._hold is not hold:
            return  # the pin has ended meanwhile, and the snapshot may be gone
        hold.rejoining.add(engine.name)
        try:
            deadline = anyio.current_time() + self.settings.pin_timeout_s
            await self._deliver(engine, hold.snapshot, deadline, hold.cause_seq)
            if self._hold is hold:
                await self._serve_pinned(hold.snapshot)
        except (EngineFailure, RouterFailure):
            return  # it was doubted, and its keeper has seen that; or the next pin sees to it
        finally:
            hold.rejoining.discard(engine.name)
            self._notify()

    async def _serve_pinned(self, snapshot: Snapshot) -> None:
        version = snapshot.weight_version
        proven = (e for e in self._engines if (e.state, e.weight_version) == ("serving", version))
        await self._router.serve({engine.url for engine in proven})

    async def _drop(self, engine: Engine) -> None:
        """Out of the router first, so that no request is sent to an engine that is being ended."""
        try:
            if self._router.up and engine.url:
                await self._router.drop(engine.url)
        except RouterFailure:
            return  # a router that does not listen to us asks no dead engine: it checks by itself

    async def _bury(self, engine: Engine) -> None:
        """What cannot be killed now may be later; nothing takes its place before."""
        attempt = 0
        while True:
            try:
                await engine.bury()
            except TimeoutError:
                attempt += 1
                await anyio.sleep(self._backoff_s(attempt))
            else:
                return

    def _backoff_s(self, strikes: int) -> float:
        doubled = self.settings.backoff_s * 2.0 ** min(max(strikes - 1, 0), 30)
        return min(doubled, self.settings.max_backoff_s)

    async def _keep_router(self) -> None:
        """Every life of the router, at one address, until it dies more often than allowed."""
        while True:
            try:
                await self._router.start()
                self._notify()
                if self._hold is not None:
                    await self._serve_pinned(self._hold.snapshot)
                failure = await self._router.wait()
            except RouterFailure as error:
                failure = error
            await self._end_router()
            self._router_strikes += 1
            if self._router_strikes > self.settings.max_restarts:
                self._router_lost = failure
                self._notify()
                return
            self._notify()
            await anyio.sleep(self._backoff_s(self._router_strikes))

    async def _end_router(self) -> None:
        while True:
            try:
                await self._router.end_process()
            except TimeoutError:
                await anyio.sleep(self.settings.max_backoff_s)
            else:
                return

    async def _stop(self) -> None:
        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                tasks.start_soon(engine.stop)
            tasks.start_soon(self._stop_router)

    async def _stop_router(self) -> None:
        try:
            await self._router.stop()
        except TimeoutError as error:
            log.warning("the router's process is left behind: %s", error)

    def _notify(self) -> None:
        """Wake whoever waits for the fleet to look different."""
        self._change.set()
        self._change = anyio.Event()


def _skip(failures: Mapping[str, EngineFailure]) -> EvalSkip:
    """The reason of the gravest failure, whose record is the cause; all are told."""
    gravest = min(failures.values(), key=lambda failure: _GRAVITY.index(failure.skip_reason))
    told = "; ".join(f"{name}: {failure}" for name, failure in sorted(failures.items()))
    skip = EvalSkip(gravest.skip_reason, told)
    skip.cause_seq = gravest.cause_seq
    return skip
