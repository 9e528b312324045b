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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus

from vime.eval.contracts import PinProof, Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.engine import Engine
from vime.eval.fleet.launch import MakeClient, Spawn, Tokens, loopback_client
from vime.eval.fleet.pinning import DOWN, Pinner, canary_of
from vime.eval.fleet.router import Router, RouterFailure
from vime.eval.fleet.router_keeper import RouterKeeper
from vime.eval.fleet.servers import Launch, Localize, LocalLaunch, at_home
from vime.eval.fleet.settings import FleetSettings
from vime.eval.processes import process
from vime.fsm.canary import Canary, difference
from vime.fsm.trace import Trace
from vime.rollout.checkpoint_eval import EvalSkip

log = logging.getLogger("vime")

#: Skips of an evaluation that the loss of an engine explains.
_FOR_WANT_OF_ANSWERS = ("unhealthy", "version_mixed", "timeout_eval")

#: How long the end of a pin waits for an engine that is just coming back to it.
_REJOIN_GRACE_S = 20.0


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
        canary: what the engines answered that have proven it.
        agreed: the engines that have proven it, and answered like the others.
        rejoining: the engines that load it now; whoever cancels one gives the load up.
    """

    snapshot: Snapshot
    cause_seq: int | None
    canary: Canary | None = None
    agreed: set[str] = field(default_factory=set)
    rejoining: dict[str, anyio.CancelScope] = field(default_factory=dict)


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
        self._router = Router(settings, self.tokens, spawn=spawn, make_client=make_client)
        self._keeper = RouterKeeper(
            self._router, settings, changed=self._notify, fill=self._fill_router
        )
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
        self._pinner = Pinner(
            settings,
            self._engines,
            self._router,
            self._keeper,
            localize=localize,
            api_key=self.tokens.api_key,
            changed=self._wait_for_change,
        )
        self._turn = anyio.Lock()  # gives the turns in the order in which they are asked for
        self._hold: _Hold | None = None
        self._tasks: TaskGroup | None = None
        self._change = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start everything, and keep it alive until cancelled; then end everything.

        An engine that stays down does not end it: the pins say so, and :meth:`wait_ready`.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._keeper.keep)
                for engine in self._engines:
                    tasks.start_soon(self._keep, engine, tasks)
                task_status.started()
                await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop()

    async def wait_ready(self) -> None:
        """Wait until every engine has answered once and the router serves.

        Each start has its deadline, and so has this. An engine that does not start is done
        without where ``min_engines`` allows it.

        Raises:
            FleetStartError: something did not start; with the end of its log.
        """
        while True:
            down = [e for e in self._engines if e.state in DOWN and not e.was_ready]
            if len(down) > len(self._engines) - self.settings.num_needed:
                raise FleetStartError(
                    f"{down[0].name} did not start: {down[0].failure or down[0].state}\n"
                    f"{down[0].last_words}".rstrip()
                )
            if self._keeper.lost is not None:
                raise FleetStartError(str(self._keeper.lost))
            if self._router.up and all(e.was_ready or e in down for e in self._engines):
                return
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
            proof, canary = await self._pinner.pin(snapshot, cause_seq)
            agreed = {engine.engine for engine in proof.engines}
            self._hold = hold = _Hold(snapshot, cause_seq, canary, agreed)
            self._bring_in_the_others(hold)
            try:
                yield proof
            except EvalSkip as skip:
                if skip.cause_seq is None and skip.reason in _FOR_WANT_OF_ANSWERS:
                    skip.cause_seq = self._pinner.last_doubt(since=proof.cause_seq)
                raise
            finally:
                self._hold = None
                await self._end_rejoins(hold)

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
            backoff_s = self.settings.backoff_after_s(engine.strikes)
            engine.restart(backoff_s)
            await anyio.sleep(backoff_s)

    def _bring_in_the_others(self, hold: _Hold) -> None:
        """Engines that came back while the first ones were being pinned."""
        assert self._tasks is not None, "it runs"
        for engine in self._engines:
            if engine.usable and engine.name not in hold.agreed:
                self._tasks.start_soon(self._rejoin, engine, hold)

    async def _end_rejoins(self, hold: _Hold) -> None:
        """Have whoever still reads the snapshot finish: it may be deleted from here on.

        The point's outcome waits for that, but not long: an engine whose load goes on is doubted.
        """
        with anyio.move_on_after(_REJOIN_GRACE_S):
            while hold.rejoining:
                await self._change.wait()
        for scope in hold.rejoining.values():
            scope.cancel()
        while hold.rejoining:
            await self._change.wait()

    async def _rejoin(self, engine: Engine, hold: _Hold) -> None:
        """Bring an engine that came back to the pinned snapshot, then behind the router."""
        if self._hold is not hold:
            return  # the pin has ended meanwhile, and the snapshot may be gone
        with anyio.CancelScope() as scope:
            hold.rejoining[engine.name] = scope
            try:
                await self._join(engine, hold)
            finally:
                del hold.rejoining[engine.name]
                self._notify()

    async def _join(self, engine: Engine, hold: _Hold) -> None:
        hold.agreed.discard(engine.name)
        try:
            deadline = anyio.current_time() + self.settings.pin_timeout_s
            proof, _ = await self._pinner.prove(engine, hold.snapshot, deadline, hold.cause_seq)
            canary = canary_of(proof)
            if hold.canary and canary and (differs := difference(hold.canary, canary)) is not None:
                others = "the engines that were pinned before it"
                said = f"it answers otherwise than {others}: {differs}"
                engine.doubt(EngineFailure("stale", said))
                return
            hold.agreed.add(engine.name)
            if self._hold is hold:
                await self._fill_router()
        except (EngineFailure, RouterFailure):
            return  # it was doubted, and its keeper has seen that; or the next pin sees to it

    async def _fill_router(self) -> None:
        if self._hold is not None:
            urls = self._pinner.proven(self._hold.snapshot, self._hold.agreed)
            await self._router.serve(urls)

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
                await anyio.sleep(self.settings.backoff_after_s(attempt))
            else:
                return

    async def _stop(self) -> None:
        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                tasks.start_soon(engine.stop)
            tasks.start_soon(self._keeper.stop)

    async def _wait_for_change(self) -> None:
        await self._change.wait()

    def _notify(self) -> None:
        """Wake whoever waits for the fleet to look different."""
        self._change.set()
        self._change = anyio.Event()
