"""What an actor is, what its callers see of it, and what they see when it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol


class Actor(ABC):
    """Something with state and one way in: it handles one message after the other.

    A subclass's docstring says what it consumes, what it produces, what it waits for, and who
    unblocks it.
    """

    async def started(self) -> None:  # noqa: B027 -- optional
        """Get ready; called once, before the first message. Raising fails the start."""

    @abstractmethod
    async def handle(self, message: Any) -> Any:
        """Handle one message and return the reply.

        It is cancelled when whoever asked has given up. What it raises is raised by ``ask``;
        for a message that was told nobody would see it, and the actor dies of it.
        """

    async def stopped(self) -> None:  # noqa: B027 -- optional
        """Let go of everything; called once, after the last message or a death by exception."""


class ActorRef(Protocol):
    """A handle on an actor, wherever that lives."""

    async def ask(self, message: Any, timeout_s: float | None = None) -> Any:
        """Send ``message`` and wait for the reply.

        Args:
            message: what the actor's ``handle`` gets.
            timeout_s: seconds from now to the reply, the wait for the actor's earlier messages
                included; ``None`` sets no limit.

        Raises:
            Exception: whatever ``handle`` raised.
            ActorDied: the actor has died, or was stopped, before it replied.
            TimeoutError: there was no reply in time; the handling has been given up.
        """

    async def tell(self, message: Any) -> None:
        """Send ``message``, which has no reply; waits only while the actor's mailbox is full.

        Raises:
            ActorDied: the actor has died, or was stopped.
        """

    async def stop(self) -> None:
        """Refuse new messages, let those be handled that are there, and end the actor.

        Bounded: what is not done after the actor's ``stop_timeout_s`` is given up. It may be
        called again.
        """


class ActorDied(Exception):
    """The actor is gone, and with it the reply that was waited for.

    Attributes:
        actor: its name.
        how: ``exit status 3``, ``signal SIGKILL``, ``it was stopped`` …
        log_tail: the last lines of its log, where it has one.
    """

    def __init__(self, actor: str, how: str, log_tail: str = "") -> None:
        super().__init__(actor, how, log_tail)
        self.actor = actor
        self.how = how
        self.log_tail = log_tail

    def __str__(self) -> str:
        text = f"actor {self.actor} died: {self.how}"
        return f"{text}; its log ends with:\n{self.log_tail}" if self.log_tail else text


class RemoteError(Exception):
    """Stands for an exception that cannot be had in this process.

    Attributes:
        type_name: the class of the original.
        text: its message.
        traceback: its traceback, as text.
    """

    def __init__(self, type_name: str, text: str, traceback: str = "") -> None:
        super().__init__(type_name, text, traceback)
        self.type_name = type_name
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}"


def no_reply(actor: str, message: Any, timeout_s: float | None) -> TimeoutError:
    """The error of an overdue ``ask``."""
    return TimeoutError(
        f"actor {actor}: no reply to {type(message).__name__} within {timeout_s:.4g} s"
    )
