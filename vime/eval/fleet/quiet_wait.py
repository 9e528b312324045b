"""Has the processes of an engine wait for each other without computing, where cores are scarce.

vLLM's core and its workers talk through shared memory, and whoever waits for the other one looks
there again and again: for a second after each message, on a whole core. Beside GPUs there are cores
to spare. On a CPU they are those that the workers compute on: a core that waits for its worker
takes up to half of the processor time from it, and from the engine next to it.

The message that ends a wait also comes through a socket, on which a process can sleep. vLLM does
so after that second, and not at once for a reason: ZeroMQ drops a message to a socket of this kind
when it follows the last one within about a millisecond. A short look of our own bridges that time,
and no sleep is long: should a message be dropped after all, the next look finds what it was about.
"""

from __future__ import annotations

import logging
import os
from inspect import signature
from typing import Any

#: The environment variable that tells the processes of an engine that they have no core to spare.
VARIABLE = "VIME_SCARCE_CORES"

#: How long a process goes on looking after a message.
LOOK_S = 0.003

#: The longest sleep.
SLEEP_MS = 50

log = logging.getLogger(__name__)


def wait_quietly() -> None:
    """From now on, in this process of vLLM: sleep while waiting for others.

    A no-op unless :data:`VARIABLE` is set. A vLLM that waits in other ways is left alone.
    """
    if not os.environ.get(VARIABLE):
        return
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        original = SpinCondition.wait
        known = "busy_loop_s" in signature(SpinCondition).parameters
        known = known and list(signature(original).parameters) == ["self", "timeout_ms"]
    except (ImportError, AttributeError):
        known = False
    if not known:
        log.warning("this vLLM waits in a way of its own: its processes may compute while they do")
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = min(self.busy_loop_s, LOOK_S)
        original(self, SLEEP_MS if timeout_ms is None else min(timeout_ms, SLEEP_MS))

    SpinCondition.wait = wait
