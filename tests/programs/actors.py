"""Actors that tests run in processes of their own, and what can go wrong with them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.eval.actor import Actor
from vime.rollout.checkpoint_eval import EvalSkip


class TwoArguments(Exception):
    """Can be raised, but not rebuilt: its pickle calls the class with one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Poison:
    """Can be pickled, and raises where it is rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("poison",)


class Probe(Actor):
    """Does what it is told: a message is the name of a method, and its arguments."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal

    async def started(self) -> None:
        self.note("started")

    async def stopped(self) -> None:
        self.note("stopped")

    async def handle(self, message: tuple[Any, ...]) -> Any:
        method: Callable[..., Any] = getattr(self, message[0])
        result = method(*message[1:])
        return await result if asyncio.iscoroutine(result) else result

    def note(self, line: str) -> None:
        with self.journal.open("a") as file:
            file.write(f"{line} {os.getpid()}\n")

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def say(self, fifo: Path) -> None:
        fifo.write_text("x")

    def say_and_block(self, fifo: Path) -> None:
        """Block the whole event loop, after telling whoever reads the FIFO."""
        self.say(fifo)
        while True:
            signal.pause()

    async def say_and_wait(self, fifo: Path, release: Path) -> str:
        """Wait until the second FIFO has no writer any more."""
        with release.open() as file:
            self.say(fifo)
            await asyncio.to_thread(file.read)
        return "released"

    def die_by_exit(self) -> None:
        print("last words")
        os._exit(3)

    def die_by_sys_exit(self) -> None:
        sys.exit(4)

    def die_by_segfault(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)

    def die_by_kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_while_a_fork_holds_the_pipes(self) -> None:
        if os.fork() == 0:
            while True:
                signal.pause()
        os._exit(5)

    def close_everything(self) -> None:
        os.closerange(0, 256)
        while True:
            signal.pause()

    def leave_a_thread(self) -> None:
        """Python waits for it before it exits."""
        threading.Thread(target=threading.Event().wait).start()

    def use_standard_streams(self) -> str:
        print("printed")
        sys.stdout.write("written\n")
        os.write(1, b"raw\n")
        subprocess.run(["echo", "by a child"], check=True)
        return sys.stdin.read()

    def raise_skip(self) -> None:
        raise EvalSkip("my_backend_is_away", "until tomorrow")

    def raise_chained(self) -> None:
        try:
            raise OSError("the cause")
        except OSError as error:
            raise ValueError("the effect") from error

    def raise_two_arguments(self) -> None:
        raise TwoArguments("this", "that")

    def raise_local(self) -> None:
        class LocalError(Exception):
            pass

        raise LocalError("nobody can import me")

    def raise_from_a_module_that_only_the_child_knows(self) -> None:
        import mailbox

        raise mailbox.NoSuchMailboxError("letters")

    async def raise_cancelled(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    def reply_with_a_lambda(self) -> Any:
        return lambda: None

    def reply_with_poison(self) -> Any:
        return Poison()


def failing_once(journal: Path) -> Probe:
    """Fails the first time, when there is no journal yet."""
    if not journal.exists():
        journal.touch()
        raise OSError("not yet")
    return Probe(journal)


def blocking_once(journal: Path, fifo: Path) -> Probe:
    """Blocks the first time, after telling whoever reads the FIFO."""
    if not journal.exists():
        journal.touch()
        Probe(journal).say_and_block(fifo)
    return Probe(journal)


def dying(_: Path) -> Probe:
    print("born to die")
    os._exit(9)


def not_an_actor(_: Path) -> dict[str, int]:
    return {}
