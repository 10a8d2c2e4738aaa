"""What crosses between a front and a replica: the engine's own messages, many in one frame, and what a replica adds.

A frame is a msgpack list of tagged structs.  Nothing in it can carry code.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gtp_serve.engine.messages import Abort, DetailPairs, Events, Rejected, Stats, Submit
from gtp_serve.errors import EngineFault, GtpServeError


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request that was begun and cannot go on, for a reason that is the engine's."""

    rid: str
    code: str
    message: str
    details: DetailPairs = ()


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The replica is there."""


Down = Submit | Abort
Up = Events | Rejected | Failed | Stats | Beat

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[list[Down]] = msgspec.msgpack.Decoder(list[Down])
_up: msgspec.msgpack.Decoder[list[Up]] = msgspec.msgpack.Decoder(list[Up])


def pack(messages: Sequence[Down | Up]) -> bytes:
    """One frame.

    :raises OverflowError: when an integer needs more than 64 bits.
    """
    return _encoder.encode(messages)


def unpack_down(frame: bytes) -> list[Down]:
    """What a front has sent.

    :raises msgspec.DecodeError: when it is no frame.
    """
    return _down.decode(frame)


def unpack_up(frame: bytes) -> list[Up]:
    """What a replica has sent.

    :raises msgspec.DecodeError: when it is no frame.
    """
    return _up.decode(frame)


def failed(rid: str, error: GtpServeError) -> Failed:
    """The message for a request that an engine's fault has ended."""
    return Failed(rid=rid, code=error.code, message=error.message, details=error.details)


def fault_in(message: Failed) -> EngineFault:
    """The error that ``failed`` was given."""
    return EngineFault(message.message, message.details, code=message.code)
