"""Actors: one way in, one message at a time, and a caller who need not know where they run.

Nothing here knows of evaluations. An :class:`Actor` runs in this event loop behind a
:class:`LocalActor`, or in a process of its own behind a :class:`ProcessActor`; both are an
:class:`ActorRef` to whoever asks. A :class:`Supervisor` decides how often and how soon what has
died is started again.
"""

from vime.eval.actor.away import ActorEvent
from vime.eval.actor.base import Actor, ActorDied, ActorRef, RemoteError
from vime.eval.actor.local import LocalActor
from vime.eval.actor.remote import ProcessActor
from vime.eval.actor.supervision import Supervisor

__all__ = [
    "Actor",
    "ActorDied",
    "ActorEvent",
    "ActorRef",
    "LocalActor",
    "ProcessActor",
    "RemoteError",
    "Supervisor",
]
