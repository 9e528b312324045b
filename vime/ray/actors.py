"""An actor on a node of the Ray cluster, behind the same ref as one in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from vime.eval.actor import ActorDied, ActorEvent
from vime.eval.actor.away import AwayActor
from vime.eval.actor.channel import Kind, dumps
from vime.ray.host import ActorHost, Answer, Facts, Opening
from vime.ray.hosting import Host, HostLost, in_thread

#: How long a Ray actor that is to be killed may take to tell what it has seen, in seconds.
_LAST_EVENTS_S: Final = 2.0

#: What the Ray actor itself needs: nothing of the GPUs, and no core, as it only waits.
NO_RESOURCES: Mapping[str, Any] = {"num_cpus": 0, "num_gpus": 0}


@dataclass
class _Life:
    """One Ray actor, and where it is; ``stopped`` when its process has been stopped."""

    host: Host
    facts: Facts
    stopped: bool = False


class RayActor(AwayActor[_Life]):
    """The :class:`~vime.eval.actor.ActorRef` to an actor in a process on a node of the cluster.

    It behaves as :class:`~vime.eval.actor.ProcessActor` does, which owns the process there: it
    starts with the first message and again with the first one after its death, one message is
    handled at a time, and a reply that is overdue or no longer wanted ends the process. What is
    added is the death of the node or of the Ray actor that owns the process: every waiting
    ``ask`` raises :class:`ActorDied` then, and the next message starts both anew, on whatever
    node the options allow.

    Consumes messages and produces what ``handle`` returns, both by pickle. Waits for the
    process, which unblocks it by a reply or its death, and for Ray, which reports a lost node;
    deadlines are the askers'. Needs asyncio, and ``ray.init()`` before the first message.

    Args:
        factory_path, args, name, start_timeout_s, stop_timeout_s: see ``ProcessActor``. The
            start includes Ray's finding a place.
        log_path: what the process prints, where that directory is visible from its node;
            elsewhere it goes to Ray's own logs there.
        env: what the process has in its environment beside that of the node. Secrets belong
            here or into ``args``.
        options: Ray's own, for the actor that owns the process: resources, scheduling strategy,
            ``runtime_env`` … What it gets there, the process uses.
        on_event: told of each :class:`ActorEvent`, late where nothing was asked meanwhile; with
            ``node`` (the address) in its detail. Must not block.

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
        options: Mapping[str, Any] = NO_RESOURCES,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
        on_event: Callable[[ActorEvent], None] | None = None,
    ) -> None:
        super().__init__(factory_path, name=name, stop_timeout_s=stop_timeout_s, on_event=on_event)
        self._opening = Opening(
            name=name,
            factory_path=factory_path,
            args=dumps(args, f"the arguments of actor {name}"),
            log_path=log_path.absolute(),
            env=env,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=stop_timeout_s,
        )
        self._options = {**options, "max_restarts": 0, "max_task_retries": 0}

    # -- one message at a time ------------------------------------------------------------------

    async def _send_in_turn(self, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        answer = await self._relay(await self._living(), kind, payload)
        assert answer.kind is not None, "an answer has a reply or a death"
        return answer.kind, answer.payload

    async def _relay(self, life: _Life, kind: Kind, payload: bytes) -> Answer:
        try:
            answer: Answer = await life.host.call("relay", kind.value, payload)
        except HostLost as lost:
            self._deaths += 1
            raise await self._bury(life, str(lost)) from lost
        except anyio.get_cancelled_exc_class():  # and so the process there has been ended
            with anyio.CancelScope(shield=True):
                await self._fetch_events(life)
            raise
        self._tell_events(answer, life)
        if answer.death is not None:
            self._deaths += 1
            self._how, self._tail = answer.death
            raise ActorDied(self.name, self._how, self._tail)
        return answer

    async def _living(self) -> _Life:
        if self._life is not None and self._life.host.is_lost():
            await self._bury(self._life, await self._life.host.how_lost())
        if self._life is None:
            self._life = await self._start()
            if self._stopped:
                await self._life.host.kill()
                raise ActorDied(self.name, "it was stopped")
        return self._life

    async def _start(self) -> _Life:
        """A Ray actor that is ready to start the process, somewhere."""
        opening, facts = self._opening, None
        host = None
        try:
            with anyio.fail_after(opening.start_timeout_s):
                await in_thread(lambda: _make_directory(opening.log_path.parent))
                host = await Host.start(ActorHost, self._options)
                facts = await host.call("open", opening, give_up_s=0)
        except TimeoutError:
            wanted = {k: v for k, v in self._options.items() if k.startswith(("num_", "reso"))}
            how = f"Ray gave it no place with {wanted} within {opening.start_timeout_s:.4g} s"
            raise self._not_started(how) from None
        except HostLost as lost:
            raise self._not_started(f"it could not start: {lost}") from lost
        finally:
            if host is not None and facts is None:
                await host.kill()
        return _Life(host, facts)

    def _not_started(self, how: str) -> ActorDied:
        self._deaths += 1
        self._how, self._tail = how, ""
        return ActorDied(self.name, how)

    # -- ends -----------------------------------------------------------------------------------

    async def _stop_in_turn(self) -> None:
        life = self._life
        if life is not None:
            with suppress(HostLost):  # then there is nothing to stop any more
                self._tell_events(await life.host.call("stop", give_up_s=0), life)
                life.stopped = True

    async def _end(self, life: _Life) -> None:
        if not life.stopped:
            with anyio.move_on_after(_LAST_EVENTS_S), suppress(HostLost):
                self._tell_events(await life.host.call("events", give_up_s=0), life)
        await life.host.kill()
        if not life.stopped:
            self._tell_event("stopped", life)

    async def _bury(self, life: _Life, how: str) -> ActorDied:
        """Let go of a Ray actor that is lost; returns the error that says how."""
        self._life = None
        await life.host.kill()  # it may live on, on a node that cannot be reached
        if self._stopped:
            return ActorDied(self.name, "it was stopped")
        self._how, self._tail = f"{how} (on node {life.facts.address})", ""
        self._tell_event("died", life, how=self._how)
        return ActorDied(self.name, self._how)

    async def _fetch_events(self, life: _Life) -> None:
        try:
            self._tell_events(await life.host.call("events"), life)
        except HostLost:
            self._life = None
            self._tell_event("ended", life)

    def _tell_events(self, answer: Answer, life: _Life) -> None:
        for event in answer.events:
            self._tell_event(event.kind, life, **event.detail)

    def _tell_event(self, kind: str, life: _Life, **detail: Any) -> None:
        if self._on_event is not None:
            detail["node"] = life.facts.address
            self._on_event(ActorEvent(self.name, kind, detail))


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
