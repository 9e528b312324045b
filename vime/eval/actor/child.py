"""The other side of a :class:`ProcessActor`: runs one actor in a process of its own.

Whatever the actor's code prints goes to the log, and what it reads from standard input is empty:
the pipes to the owner are moved away before any of it runs. When the owner closes the channel
the actor is stopped in an orderly way.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import sys
import traceback

import anyio

from vime.eval.actor.base import Actor
from vime.eval.actor.channel import Channel, Kind, Raised, dumps, loads
from vime.eval.processes.pipes import PipeReader, PipeWriter


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    requests, replies = _take_stdio()
    faulthandler.enable()  # a segmentation fault leaves its traceback in the log
    return anyio.run(_serve, Channel(PipeReader(requests), PipeWriter(replies)))


def _take_stdio() -> tuple[int, int]:
    """Move the channel to private file descriptors, which no process that we start inherits."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


async def _serve(channel: Channel) -> int:
    try:
        _, payload = await channel.receive()
        actor = _make(payload)
        await actor.started()
    except Exception as error:
        traceback.print_exc()
        await channel.send(Kind.RAISED, _raised(error))
        return 1
    try:
        await channel.send(Kind.READY)
        asked = await _handle_all(channel, actor)
    finally:
        await actor.stopped()
    if asked:
        await channel.send(Kind.STOPPED)
    return 0


def _make(payload: bytes) -> Actor:
    path, factory_path, args_payload = loads(payload, "the owner's first message")
    sys.path[:] = path
    return make_actor(factory_path, args_payload)


def make_actor(factory_path: str, args_payload: bytes) -> Actor:
    """Call the factory at ``package.module:callable`` with its pickled arguments.

    Raises:
        Exception: it cannot be found, its arguments cannot be rebuilt, or it fails.
        TypeError: also: it made no :class:`Actor`.
    """
    module_name, _, name = factory_path.partition(":")
    factory = getattr(importlib.import_module(module_name), name)
    actor = factory(*loads(args_payload, f"the arguments of {factory_path}"))
    if not isinstance(actor, Actor):
        raise TypeError(f"{factory_path} made {actor!r:.200}: expected an Actor")
    return actor


async def _handle_all(channel: Channel, actor: Actor) -> bool:
    """Handle messages until it is time to stop; returns whether the owner has asked for that."""
    while True:
        try:
            kind, payload = await channel.receive()
        except anyio.IncompleteRead:
            return False  # the owner has closed the channel
        if kind is Kind.STOP:
            return True
        if kind is Kind.TELL:  # an error has nobody to go to: the process dies of it
            await actor.handle(loads(payload, "the message"))
            continue
        await channel.send(*await _answer(actor, payload))


async def _answer(actor: Actor, payload: bytes) -> tuple[Kind, bytes]:
    try:
        reply = await actor.handle(loads(payload, "the message"))
        return Kind.REPLY, dumps(reply, "the reply")
    except Exception as error:
        return Kind.RAISED, _raised(error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Kind.RAISED, _raised(error)  # the handler awaited something that was cancelled


def _raised(error: BaseException) -> bytes:
    return dumps(Raised.of(error), "an exception's description")
