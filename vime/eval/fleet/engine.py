"""One engine of the fleet: its server's process, its state, its weights.

Consumes: orders of the supervisor (start, watch, pin, bury, stop).
Produces: a trace record a transition, a proof a pin, an :class:`EngineFailure` a fault.
Waits for: its server's answers, each with a deadline.
Unblocked by: the answers, the deadlines, and the exit of the process, which cancels whatever is
waiting for it.

Two tasks share it. The supervisor's keeper starts and watches it; a pin orders it about. Either
may find it wanting, and both say so through :meth:`Engine.doubt`, the only way into ``suspect``:
synchronous, idempotent, and from then on nobody but the keeper touches the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from vime.eval.contracts import EngineProof, Snapshot
from vime.eval.fleet.control import Control, EngineFailure, Token
from vime.eval.fleet.launch import MakeClient, ProcessLost, Tokens
from vime.eval.fleet.pin import load_and_prove, prove_token
from vime.eval.fleet.servers import Launch, Server
from vime.eval.fleet.settings import FleetSettings
from vime.fsm.machine import TracedMachine
from vime.fsm.tables import ENGINE
from vime.fsm.trace import Record, Trace

_POLL_S = 0.25
_TAIL_LINES = 20

#: Failures that say nothing against the engine: the snapshot was bad, or the pin was given up.
_FAULTLESS = ("not_finite", "cancelled")


class Engine:
    """One vLLM server of the fleet.

    Args:
        index: which engine, from 0; it is called ``engine_{index}``.
        settings: the fleet.
        tokens: of the run.
        trace: where its transitions go.
        changed: called after each transition.
        launch: starts its process, wherever that is.
        make_client: makes the HTTP client of its server.

    Attributes:
        url: where its server listens; empty before its first start.
        weight_version: the weights that it carries or awaits; ``None`` while it has none.
        failure: why it is suspect, or was last.
        doubt_seq: the trace record of that.
        last_words: the end of its log when it became so.
        strikes: its deaths since the last pin, but for those that a snapshot caused.
        was_ready: it has answered at least once.
    """

    def __init__(
        self,
        index: int,
        settings: FleetSettings,
        tokens: Tokens,
        trace: Trace,
        *,
        changed: Callable[[], None],
        launch: Launch,
        make_client: MakeClient,
    ) -> None:
        self.index = index
        self.name = f"engine_{index}"
        self.log_path = settings.run_dir / "logs" / f"{self.name}.log"
        self.url = ""
        self.weight_version: str | None = None
        self.failure: EngineFailure | None = None
        self.doubt_seq: int | None = None
        self.last_words = ""
        self.strikes = 0
        self.was_ready = False
        self._settings = settings
        self._tokens = tokens
        self._machine = TracedMachine(ENGINE, self.name, trace)
        self._changed = changed
        self._launch_server = launch
        self._make_client = make_client
        self._process: Server | None = None
        self._control: Control | None = None
        self._told = False
        self._turn = anyio.Lock()  # a pin would abort a probe that is under way
        self._scopes: set[anyio.CancelScope] = set()

    @property
    def state(self) -> str:
        """A state of the table ``engine``."""
        return self._machine.state

    @property
    def usable(self) -> bool:
        """Whether it may be pinned."""
        return self.state in ("ready", "serving")

    @property
    def last_seq(self) -> int | None:
        """Its last record in the trace."""
        return self._machine.last_seq

    async def start(self, tasks: TaskGroup) -> None:
        """Start its process and wait for its first token.

        Args:
            tasks: watches the process for as long as it lives.

        Raises:
            EngineFailure: it died, or took too long.
        """
        assert self._process is None, "the last life was buried"
        self.failure = None
        self._fire("start")
        began = anyio.current_time()
        with self._until_failed():
            process = await self._launch(tasks)
            with self._within(
                self._settings.start_timeout_s, "start and answer (--eval-start-timeout)"
            ):
                await self._wait_until_serving()
                token = await self._prove_token(
                    self._settings.start_timeout_s, process.first_version
                )
            self.weight_version = process.first_version
            self.was_ready = True
            took = round(anyio.current_time() - began, 3)
            found = {"seconds": took, "pid": process.pid, "url": self.url, "token": token.id}
            self._fire("ready", detail=found)

    async def watch(self) -> None:
        """Look after it from time to time; returns only by raising.

        The exit of its process is no matter of time: that is seen when it happens.

        Raises:
            EngineFailure: it died, hangs, or has other weights than it should.
        """
        with self._until_failed():
            while True:
                await anyio.sleep(self._settings.probe_interval_s)
                async with self._turn:
                    if self.usable:
                        await self._prove_alive()

    async def pin(
        self, snapshot: Snapshot, timeout_s: float, cause_seq: int | None = None
    ) -> EngineProof:
        """Load a snapshot's weights, and prove that they are what it serves.

        Cancelled half-way it is suspect: nobody knows what it has loaded.

        Args:
            snapshot: verified.
            timeout_s: for everything, a probe that is under way included.
            cause_seq: the trace record that asks for it.

        Raises:
            EngineFailure: it could not prove it, and is suspect now. ``absent`` when it failed
                before it was told of the snapshot.
        """
        self._told = False
        try:
            return await self._pin_within(snapshot, timeout_s, cause_seq)
        except EngineFailure as failure:
            if self._told:
                raise
            absent = EngineFailure("absent", failure.detail)
            absent.cause_seq = failure.cause_seq
            raise absent from failure

    async def _pin_within(
        self, snapshot: Snapshot, timeout_s: float, cause_seq: int | None
    ) -> EngineProof:
        version = snapshot.weight_version
        with self._within(
            timeout_s, f"pin {version} (what --eval-pin-timeout had left)"
        ) as deadline:
            async with self._turn:
                with self._until_failed():
                    if not self.usable:
                        gone = EngineFailure("gone", f"it is {self.state}: {self.failure}")
                        gone.cause_seq = self.last_seq
                        raise gone
                    self.weight_version = version
                    self._fire("pin", cause_seq=cause_seq)
                    try:
                        return await self._pin(snapshot, timeout_s)
                    except EngineFailure as failure:
                        self.doubt(failure)
                        raise
                    except anyio.get_cancelled_exc_class():
                        if not deadline.cancel_called:
                            self.doubt(EngineFailure("cancelled", f"loading {version}: given up"))
                        raise

    def doubt(self, failure: EngineFailure) -> None:
        """Believe it no more; whatever waits for its answers is cancelled.

        A second doubt, or one of an engine that is down already, changes nothing.
        """
        if not self._machine.can("suspect"):
            return
        self.failure = failure
        self.last_words = self._log_tail()
        record = self._fire("suspect", reason=failure.kind, detail={"error": failure.detail})
        failure.cause_seq = self.doubt_seq = record.seq
        for scope in self._scopes:
            scope.cancel()

    async def bury(self) -> None:
        """End its whole process tree; it is ``dead`` then.

        Raises:
            TimeoutError: some of it cannot be ended, and it stays ``suspect``; try again.
        """
        await self._end()
        self.weight_version = None
        if self.failure is not None and self.failure.kind not in _FAULTLESS:
            self.strikes += 1
        self._fire("kill")

    def restart(self, backoff_s: float) -> None:
        """Note that it will be started again after a wait."""
        self._machine.attempt += 1
        self._fire("restart", detail={"strikes": self.strikes, "backoff_seconds": backoff_s})

    def abandon(self) -> None:
        """Note that it stays down."""
        assert self.failure is not None, "it died of something"
        self._fire("abandon", reason=self.failure.kind, detail={"strikes": self.strikes})

    async def stop(self) -> None:
        """End its whole process tree, whatever it is doing; nothing comes after that.

        What cannot be killed (a process in an uninterruptible wait) is left, and traced.
        """
        if not self._machine.can("stop"):
            return
        try:
            await self._end(for_good=True)
        except TimeoutError as error:
            if self._process is not None:
                self._process.let_go()
            self._fire("stop", reason="unkillable", detail={"error": str(error)})
        else:
            self._fire("stop")

    async def _launch(self, tasks: TaskGroup) -> Server:
        try:
            process = await self._launch_server(self.index, self._tokens, self.log_path)
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            raise EngineFailure("gone", f"its process could not be started: {error}") from error
        self._process = process
        self.url = process.url
        self._control = Control(
            self._make_client(self.url),
            self._tokens,
            self._settings.model,
            self._settings.call_timeout_s,
        )
        tasks.start_soon(self._watch_exit, process)
        return process

    async def _watch_exit(self, process: Server) -> None:
        try:
            status = await process.wait()
            detail = f"its process ended with status {status}"
        except TimeoutError as error:
            detail = f"its process was killed, and something of it lives on: {error}"
        except ProcessLost as lost:
            detail = f"it is lost: {lost}"
        if process is self._process:
            self.doubt(EngineFailure("gone", f"{detail}; see {self.log_path}"))

    async def _wait_until_serving(self) -> None:
        assert self._control is not None
        while not await self._control.answers():  # noqa: ASYNC110 -- another process's state
            await anyio.sleep(_POLL_S)

    async def _prove_token(self, timeout_s: float, weight_version: str) -> Token:
        assert self._control is not None
        return await prove_token(self._control, timeout_s, weight_version)

    async def _prove_alive(self) -> None:
        """One token; an engine that is too busy to give it in time must at least give others."""
        assert self._control is not None
        assert self.weight_version is not None
        timeout_s = self._settings.probe_timeout_s
        before = await self._control.tokens_so_far(timeout_s)
        try:
            await self._prove_token(timeout_s, self.weight_version)
        except EngineFailure as failure:
            if failure.kind != "overdue":
                raise
            if await self._control.tokens_so_far(timeout_s) <= before:
                raise

    async def _pin(self, snapshot: Snapshot, timeout_s: float) -> EngineProof:
        assert self._control is not None

        def told() -> None:
            self._told = True

        evidence = await load_and_prove(
            self._control,
            snapshot,
            self._settings.num_gpus_per_engine,
            timeout_s=timeout_s,
            call_timeout_s=self._settings.call_timeout_s,
            told=told,
        )
        self.strikes = 0
        self._fire("serve", detail=evidence)
        return EngineProof(self.name, snapshot.weight_version, evidence)

    async def _end(self, *, for_good: bool = False) -> None:
        if self._control is not None:
            await self._control.close()
            self._control = None
        process, self._process = self._process, None  # its exit is no news from now on
        if process is not None:
            end = process.stop if for_good else process.end
            try:
                await end(self._settings.end_timeout_s)
            except TimeoutError:
                self._process = process
                raise

    def _log_tail(self) -> str:
        if self._process is None:
            return ""
        try:
            return self._process.log_tail(_TAIL_LINES)
        except OSError as error:
            return f"({self.log_path} cannot be read: {error})"

    def _fire(
        self,
        trigger: str,
        *,
        reason: str | None = None,
        detail: dict[str, Any] | None = None,
        cause_seq: int | None = None,
    ) -> Record:
        record = self._machine.fire(
            trigger,
            reason=reason,
            detail=detail,
            cause_seq=cause_seq,
            weight_version=self.weight_version,
        )
        self._changed()
        return record

    @contextmanager
    def _until_failed(self) -> Iterator[None]:
        """Cancel the body when the engine is doubted, and raise why in its place."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.remove(scope)
        if scope.cancelled_caught:
            assert self.failure is not None, "only a doubt cancels"
            raise self.failure

    @contextmanager
    def _within(self, timeout_s: float, doing: str) -> Iterator[anyio.CancelScope]:
        """Turn a deadline into a failure, which the engine is doubted for."""
        with anyio.move_on_after(timeout_s) as scope:
            yield scope
        if scope.cancelled_caught:
            late = EngineFailure(
                "overdue", f"it took longer than {max(timeout_s, 0):.4g} s to {doing}"
            )
            self.doubt(late)
            raise late
