"""Keeps the fleet's router alive at its one address, until it dies more often than allowed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from vime.eval.fleet.router import Router, RouterFailure
from vime.eval.fleet.settings import FleetSettings

log = logging.getLogger("vime")


class RouterKeeper:
    """Every life of the router, one after the other.

    Consumes: the end of its process. Produces: another process at the same address.
    Waits for: that end, a start, a backoff. Unblocked by: the process, the start's deadline, time.

    Args:
        router: not started yet.
        settings: the fleet.
        changed: called when it comes up or goes down.
        fill: lets a new process ask the engines that it should.

    Attributes:
        lost: how it died for the last time; ``None`` while it may come back.
    """

    def __init__(
        self,
        router: Router,
        settings: FleetSettings,
        *,
        changed: Callable[[], None],
        fill: Callable[[], Awaitable[None]],
    ) -> None:
        self.lost: RouterFailure | None = None
        self._router = router
        self._settings = settings
        self._changed = changed
        self._fill = fill
        self._strikes = 0

    async def keep(self) -> None:
        """Start it, and start it again, until it stays down."""
        while True:
            try:
                await self._router.start()
                self._changed()
                await self._fill()
                failure = await self._router.wait()
            except RouterFailure as error:
                failure = error
            await self._end()
            self._strikes += 1
            if self._strikes > self._settings.max_restarts:
                self.lost = failure
                self._changed()
                return
            self._changed()
            await anyio.sleep(self._settings.backoff_after_s(self._strikes))

    def forgive(self) -> None:
        """It has proven itself: the deaths so far count no more."""
        self._strikes = 0

    async def replace(self) -> None:
        """End its process, for it does not do what it is told; :meth:`keep` starts another one."""
        with suppress(TimeoutError):  # keep() tries again
            await self._router.end_process()

    async def stop(self) -> None:
        """End it for good."""
        try:
            await self._router.stop()
        except TimeoutError as error:
            log.warning("the router's process is left behind: %s", error)

    async def _end(self) -> None:
        while True:
            try:
                await self._router.end_process()
            except TimeoutError:
                await anyio.sleep(self._settings.max_backoff_s)
            else:
                return
