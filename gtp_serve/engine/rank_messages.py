"""What crosses between rank 0 and the other ranks: a closed set of msgpack messages over a pair of sockets.

A frame is four bytes of length and one msgspec struct with its type's name as the tag.  ``Command`` goes from
rank 0 to a rank, one for each step; ``Report`` comes back.  Nothing here can carry code.  No torch.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from gtp_serve.engine.messages import Fatal
from gtp_serve.engine.rank_tasks import Answer, Ask, Tell
from gtp_serve.engine.step import StepPlan
from gtp_serve.refit import orders

MAX_FRAME = 1 << 28
"""Bytes; a longer frame is a bug or a stranger."""
_LENGTH = struct.Struct("<I")

M = TypeVar("M")


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run the model over this plan."""

    plan: StepPlan
    bucket: int | None = None
    """The recorded step to do it in; None: in none.  Rank 0's word: all ranks must do the same collectives."""


class CaptureStep(msgspec.Struct, frozen=True, tag=True):
    """Record the step of this many rows."""

    size: int


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class TellRank(msgspec.Struct, frozen=True, tag=True):
    """Something to do about new weights; what comes of it is reported when there is something to say."""

    what: Tell


class AskRank(msgspec.Struct, frozen=True, tag=True):
    """Something to do about the weights, answered by Answered.

    ``steps`` is the number of steps that this rank must have run before: the ranks do it between the same two.
    """

    call: int
    steps: int
    what: Ask


Command = Step | CaptureStep | StopRank | TellRank | AskRank


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The rank's process runs and is about to join the group."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The rank's process is scheduled and its interpreter runs; ``doing`` as in "while loading weights"."""

    doing: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes read so far, of how many."""

    done: int
    total: int


class Built(msgspec.Struct, frozen=True, tag=True):
    """The rank has its weights and its KV cache and waits for steps."""

    weight_bytes: int
    kv_bytes: int


class Captured(msgspec.Struct, frozen=True, tag=True):
    """The step of this many rows is recorded, or why it is not."""

    size: int
    failure: str


class LostGroup(msgspec.Struct, frozen=True, tag=True):
    """The model's forward pass failed; most often because another rank has gone."""

    error: str
    stack: str


class Reported(msgspec.Struct, frozen=True, tag=True):
    """What the rank says of an update."""

    report: orders.Report


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What came of an AskRank."""

    answer: Answer


Report = Arrived | Beat | Loading | Built | Captured | LostGroup | Fatal | Reported | Answered


def frame_of(message: Command | Report) -> bytes:
    """A message as it goes over a socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Link(Generic[M]):
    """One end of a pair of sockets; frames are sent whole whichever thread sends.

    :param incoming: the union of what may come in.
    :param patience: seconds that a call waits for the other end; None means for ever.
    """

    def __init__(self, end: socket.socket, incoming: object, *, patience: float | None = None) -> None:
        end.settimeout(patience)
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)
        self._sending = threading.Lock()

    def send(self, message: Command | Report) -> None:
        """Send one message.

        :raises OSError: when the other end is closed or does not read.
        """
        self.send_frame(frame_of(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what ``frame_of`` made, which may go to several links.

        :raises OSError: as ``send``.
        """
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> M | None:
        """The next message; None when the other end is closed.

        :raises TimeoutError: when nothing came for as long as patience lasts.
        :raises ValueError: for a frame that is no message (msgspec.DecodeError is one).
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes was announced")
        frame = self._read(size)
        try:
            return None if frame is None else self._decoder.decode(frame)
        except RecursionError:
            raise msgspec.DecodeError("a message is nested too deeply") from None

    def _read(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(min(size, 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Let go; a thread that waits in ``receive`` gets None."""
        with suppress(OSError):  # the other end has gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
