"""An actor in a process of its own: what it does to that process cannot hurt this one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from vime.eval.actor.away import ActorEvent, AwayActor
from vime.eval.actor.base import ActorDied
from vime.eval.actor.channel import Channel, Kind, Raised, dumps, loads
from vime.eval.processes.process import KeptProcess, spawn

_ROOT: Final = str(Path(__file__).parents[3])
_BOOT: Final = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from vime.eval.actor.child import main; sys.exit(main())"
)
#: How long a dead child's last bytes may take to arrive, in seconds.
_LAST_BYTES_S: Final = 1.0
#: How long a stopped actor's process may take to exit, in seconds. Python waits for every thread
#: that user code has left behind, and such a thread may never end.
_EXIT_S: Final = 2.0


@dataclass
class _Life:
    process: KeptProcess
    channel: Channel


class ProcessActor(AwayActor[_Life]):
    """The :class:`ActorRef` to an actor that runs in a child process, with a loop of its own.

    The process starts with the first message, and again with the first one after its death. It
    never outlives this one. One message is handled at a time; the others wait here.

    A reply that is overdue, or whose asker is cancelled, *ends the process*: it may be anywhere
    in user code, and nothing else is sure to stop it. The next message gets a fresh one. When
    the process dies by itself, every waiting ``ask`` raises :class:`ActorDied` at once.

    Consumes messages and produces what ``handle`` returns, both by pickle. Waits for the child,
    which unblocks it by a reply or its death; deadlines are the askers'.

    Args:
        factory_path: ``package.module:callable`` that makes the :class:`Actor`, in the child.
        args: its arguments; picklable.
        name: what people call it.
        log_path: what the child prints; mode 0600. Its last lines are in :class:`ActorDied`.
        env: the child's whole environment; this process's when ``None``. Secrets belong here
            or into ``args``.
        start_timeout_s: seconds until ``started`` has returned.
        stop_timeout_s: seconds that :meth:`stop` leaves to the messages that are there, to
            ``stopped`` and to the exit.
        on_event: told of each :class:`ActorEvent`, in the event loop; must not block.

    Raises:
        ValueError: the ``factory_path`` has no colon.
        TypeError: the arguments cannot be pickled.
    """

    def __init__(
        self,
        factory_path: str,
        args: tuple[Any, ...] = (),
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
        on_event: Callable[[ActorEvent], None] | None = None,
    ) -> None:
        super().__init__(factory_path, name=name, stop_timeout_s=stop_timeout_s, on_event=on_event)
        self._factory_path = factory_path
        self._args = dumps(args, f"the arguments of actor {name}")
        self._log_path = log_path
        self._env = env
        self._start_timeout_s = start_timeout_s

    async def relay(self, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        """Pass on a message that somebody else has pickled; returns the reply as it came.

        Raises:
            ActorDied: see :meth:`AwayActor.ask`.
        """
        return await self._send(kind, payload)

    # -- one message at a time ------------------------------------------------------------------

    async def _send_in_turn(self, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        life = self._life = await self._living()
        return await self._converse(life, kind, payload)

    async def _living(self) -> _Life:
        if self._life is not None and not self._life.process.has_ended():
            return self._life
        if self._life is not None:
            await self._bury(self._life)
        command = [sys.executable, "-P", "-c", _BOOT, _ROOT, f"vime actor {self.name}"]
        process = await spawn(
            command, name=self.name, env=self._env, log_path=self._log_path, piped=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        life = _Life(process, Channel(process.stdout, process.stdin))
        await self._init(life)
        self._tell_event("started", pid=process.pid)
        return life

    async def _init(self, life: _Life) -> None:
        """Have the actor made; the process is ended when that fails."""
        payload = dumps((sys.path, self._factory_path, self._args), "the first message")
        try:
            with anyio.fail_after(self._start_timeout_s):
                kind, payload = await self._converse(life, Kind.INIT, payload)
        except TimeoutError:
            how = f"it did not start within {self._start_timeout_s:.4g} s"
            raise ActorDied(self.name, how, await _log_tail(life.process)) from None
        if kind is Kind.RAISED:
            raised: Raised = loads(payload, "an exception")
            how = f"it could not start: {raised.type_name}: {raised.text}"
            self._deaths += 1
            raise await self._bury(life, how) from raised.rebuild(self.name)

    async def _converse(self, life: _Life, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        """Send a frame and receive the answer to it; when cancelled, end the process."""
        try:
            answer = await self._exchange(life, kind, payload)
        except BaseException:
            await life.process.end()
            self._life = None
            self._tell_event("ended", pid=life.process.pid)
            raise
        if answer is None:
            self._deaths += 1
            raise await self._bury(life)
        return answer

    async def _exchange(self, life: _Life, kind: Kind, payload: bytes) -> tuple[Kind, bytes] | None:
        """The answer, or ``None`` when the process has died before giving it."""
        answer: tuple[Kind, bytes] | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_after_death, life.process, tasks.cancel_scope)
            try:
                await life.channel.send(kind, payload)
                answer = (kind, b"") if kind is Kind.TELL else await life.channel.receive()
            except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
                answer = None
            tasks.cancel_scope.cancel()
        return answer

    # -- ends -----------------------------------------------------------------------------------

    async def _stop_in_turn(self) -> None:
        life = self._life
        if life is not None and await self._exchange(life, Kind.STOP, b"") is not None:
            with anyio.move_on_after(_EXIT_S):
                await life.process.wait()

    async def _end(self, life: _Life) -> None:
        await life.process.end()
        self._tell_event("stopped", pid=life.process.pid)

    async def _bury(self, life: _Life, how: str = "") -> ActorDied:
        """Let go of a process that has died or is of no use; returns the error that says how."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_LAST_BYTES_S):
                await life.process.wait()
            code = life.process.returncode
            await life.process.end()
            self._life = None
            if self._stopped:
                return ActorDied(self.name, "it was stopped")
            self._how = how or ("it closed its channel" if code is None else describe_exit(code))
            self._tail = await _log_tail(life.process)
        detail = {"pid": life.process.pid, "how": self._how, "log_tail": self._tail}
        self._tell_event("died", **detail)
        return ActorDied(self.name, self._how, self._tail)

    def _tell_event(self, kind: str, **detail: Any) -> None:
        if self._on_event is not None:
            self._on_event(ActorEvent(self.name, kind, detail))


async def _cancel_after_death(process: KeptProcess, scope: anyio.CancelScope) -> None:
    """End the wait for an answer that can no longer come."""
    with suppress(TimeoutError):  # some of it cannot be killed: end() says so
        await process.wait()
    await anyio.sleep(_LAST_BYTES_S)  # normally the pipe's end is read first, and ends this
    scope.cancel()


async def _log_tail(process: KeptProcess) -> str:
    limiter = anyio.CapacityLimiter(1)  # the shared threads may all be busy for long
    return await anyio.to_thread.run_sync(process.log_tail, limiter=limiter)


def describe_exit(returncode: int) -> str:
    """``exit status 3`` or ``signal SIGKILL``."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"signal {-returncode}"
