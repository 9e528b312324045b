"""Decides whether what has died is started again, and how soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import anyio

Restarting = Callable[[Exception, float], None]
"""Called with what it died of and the seconds until the next start."""


class Supervisor:
    """Restarts with exponential backoff, and escalates when that happens too often.

    The first death within a window is answered after ``backoff_s``, each further one after
    twice as long as the one before, ``max_backoff_s`` at most. More than ``max_restarts``
    deaths within ``window_s`` are not answered any more.

    Args:
        max_restarts: how many deaths within the window are answered by a restart.
        window_s: the length of the window, in seconds.
        backoff_s, max_backoff_s: the first and the longest delay before a restart, in seconds.
        restarting: told of each restart by :meth:`run`; must not block.
    """

    def __init__(
        self,
        *,
        max_restarts: int = 3,
        window_s: float = 600.0,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
        restarting: Restarting | None = None,
    ) -> None:
        if max_restarts < 0 or not 0 <= backoff_s <= max_backoff_s or window_s <= 0:
            raise ValueError(
                f"Supervisor(max_restarts={max_restarts}, window_s={window_s}, "
                f"backoff_s={backoff_s}, max_backoff_s={max_backoff_s}): expected "
                "max_restarts >= 0, window_s > 0 and 0 <= backoff_s <= max_backoff_s"
            )
        self.max_restarts = max_restarts
        self.window_s = window_s
        self.backoff_s = backoff_s
        self.max_backoff_s = max_backoff_s
        self._restarting = restarting
        self._deaths: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Note a death; returns the seconds until the restart, or ``None``: escalate.

        Args:
            now_s: any clock's time in seconds, the same clock's at each call.
        """
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - self.window_s:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self.max_restarts:
            return None
        # The exponent is bounded so that many allowed restarts cannot overflow a float.
        return min(self.backoff_s * 2.0 ** min(count - 1, 64), self.max_backoff_s)

    async def run(self, live: Callable[[], Awaitable[None]]) -> None:
        """Await ``live()``, again and again until it returns.

        Raises:
            Exception: what it died of when it had died too often, with a note that says so.
        """
        while True:
            try:
                return await live()
            except Exception as error:
                delay_s = self.next_delay_s(anyio.current_time())
                if delay_s is None:
                    error.add_note(
                        f"not restarted: it died {self.max_restarts + 1} times within "
                        f"{self.window_s:.4g} s"
                    )
                    raise
                if self._restarting is not None:
                    self._restarting(error, delay_s)
            await anyio.sleep(delay_s)
