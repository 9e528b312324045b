"""What passes between a :class:`ProcessActor` and its child: frames of pickled messages.

A frame is eight bytes of length (big-endian), one byte that says what it is, and a pickle. The
frame is always read whole, and its pickle afterwards: a message that one side cannot make sense
of costs that message alone. Both ends run as the same user and trust each other.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from anyio.abc import ByteReceiveStream, ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream

from vime.eval.actor.base import RemoteError

_LENGTH_BYTES = 8


class Kind(enum.Enum):
    """The first byte of a frame; to the child and, below, from it."""

    INIT = b"I"
    ASK = b"A"
    TELL = b"T"
    STOP = b"S"

    READY = b"Y"
    REPLY = b"R"
    RAISED = b"E"
    STOPPED = b"Z"


class Channel:
    """Frames over a pair of byte streams, which it does not own."""

    def __init__(self, reader: ByteReceiveStream, writer: ByteSendStream) -> None:
        self._reader = BufferedByteReceiveStream(reader)
        self._writer = writer

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Write one frame; cancelled half-way, the channel is of no more use.

        Raises:
            anyio.BrokenResourceError: the other side has gone.
        """
        body = kind.value + payload
        await self._writer.send(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    async def receive(self) -> tuple[Kind, bytes]:
        """Read one frame; cancelled half-way, the channel is of no more use.

        Raises:
            anyio.IncompleteRead: the other side has gone.
        """
        length = int.from_bytes(await self._reader.receive_exactly(_LENGTH_BYTES), "big")
        body = await self._reader.receive_exactly(length)
        return Kind(body[:1]), body[1:]


@dataclass(frozen=True)
class Raised:
    """An exception on its way: the object if it can travel, and in any case its description."""

    pickled: bytes | None
    type_name: str
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe ``error``; only ordinary exceptions travel as objects."""
        return cls(
            _pickled(error) if isinstance(error, Exception) else None,
            _name(type(error)),
            _text(error),
            "".join(traceback.format_exception(error)),
        )

    def rebuild(self, actor: str) -> Exception:
        """The exception, or a :class:`RemoteError` in its place; its traceback is a note."""
        error = self._unpickled() or RemoteError(self.type_name, self.text, self.traceback)
        error.add_note(f"Raised in the process of actor {actor}:\n{self.traceback}")
        return error

    def _unpickled(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            error = _KnownClasses(io.BytesIO(self.pickled)).load()
        except Exception:  # whatever a foreign class does when it is rebuilt
            return None
        return error if isinstance(error, Exception) else None


class _KnownClasses(pickle.Unpickler):
    """Loads nothing that this process has not imported already.

    An exception of the child's libraries must not make the owner, who may be training, import
    them only to raise it.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name not in sys.modules:
            raise pickle.UnpicklingError(f"{module_name} is not imported here")
        return super().find_class(module_name, global_name)


def dumps(value: Any, what: str) -> bytes:
    """Pickle ``value``.

    Raises:
        TypeError: it cannot be pickled; ``what`` is its name in the message.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling calls code of the value's own classes
        raise TypeError(
            f"{what} of type {_name(type(value))} cannot be pickled ({_text(error)}); send plain "
            "data, or objects of classes at the top level of a module"
        ) from error


def loads(payload: bytes, what: str) -> Any:
    """The value of a pickle.

    Raises:
        TypeError: it cannot be rebuilt in this process; ``what`` is its name in the message.
    """
    try:
        return pickle.loads(payload)  # noqa: S301 -- from our own child or owner
    except Exception as error:  # unpickling calls code of the value's own classes
        raise TypeError(
            f"{what} cannot be rebuilt from its pickle ({type(error).__name__}: {_text(error)}); "
            "its classes must be importable on both sides, and not be those of __main__"
        ) from error


def _pickled(error: Exception) -> bytes | None:
    """The pickle of an exception that survives the journey, else ``None``."""
    try:
        pickled = pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL)
        copy = pickle.loads(pickled)  # noqa: S301 -- made in the line above
    except Exception:  # whatever a foreign class does when it is pickled or rebuilt
        return None
    return pickled if type(copy) is type(error) else None


def _name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a foreign class's __str__
        return f"(its message cannot be had: {type(broken).__name__})"
