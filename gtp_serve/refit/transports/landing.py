"""Memory that a broadcast lands in, whatever its sender sends.

gloo ends the whole process when more bytes come than the receiver has room for, and says nothing when fewer come: what
was not written is then whatever lay there.  A trainer that sends bfloat16 and says float32, or another shape, does
either.  So a landing has room behind the bytes that were told, and marks where they must end.
"""

from __future__ import annotations

import mmap

import torch

_ROOMS = (16 << 30, 1 << 30)
"""Bytes behind those that were told.  Addresses only: memory is taken where something is written."""
_MARK = 0xFF
"""As the last byte of a floating-point number: not a number, or one that no weight has (below -1e38; float16: none)."""
_GUARD = 16
_LEAST_PASSED_ON = 256 << 10
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python tells it from 3.13 on; this is Linux's


class Landing:
    """Room for so many bytes on the host, and for a sender that sends more.

    :param count: bytes that were told, at least 1.
    :param floats: the last of them belong to a floating-point number.
    :param passes_on: the bytes go on to other ranks, all of the room with them: it is then only as much again, and at
        least 256 KiB.  Whoever sends still more ends this process.
    """

    def __init__(self, count: int, *, floats: bool, passes_on: bool) -> None:
        self._count, self._floats = count, floats
        rooms = (max(count, _LEAST_PASSED_ON) + _GUARD,) if passes_on else _ROOMS
        room = torch.frombuffer(_reserve(count, rooms), dtype=torch.uint8)
        room[count - 1 : count + _GUARD] = _MARK
        self.room = room
        """What the broadcast is given."""
        self.told = room[:count]
        """The bytes that were told."""

    def check(self, what: str) -> str:
        """What is wrong with what has landed; empty: nothing.

        :param what: the tensors that were told.
        """
        behind = self.room[self._count : self._count + _GUARD]
        if bool((behind != _MARK).any()):
            return f"more bytes came for {what} than its type and shape say"
        if self._floats and int(self.told[-1]) == _MARK:
            return f"fewer bytes came for {what} than its type and shape say"
        return ""


class ExactLanding:
    """Room for so many bytes and no more, on a device whose transport sees to the rest."""

    def __init__(self, count: int, device: str) -> None:
        self.room = self.told = torch.empty(count, dtype=torch.uint8, device=device)

    def check(self, what: str) -> str:
        """Nothing is known of it."""
        return ""


def _reserve(count: int, rooms: tuple[int, ...]) -> mmap.mmap:
    """As much as the system lets have; at least the bytes that were told and the guard."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    for room in rooms:
        try:
            return mmap.mmap(-1, count + room, flags=flags)
        except OSError:  # a limit on addresses
            continue
    return mmap.mmap(-1, count + _GUARD, flags=flags)


def passes_on(rank: int, size: int) -> bool:
    """Whether a rank of a group hands on what rank 0 broadcasts, in gloo's binomial tree."""
    return rank + (1 << rank.bit_length()) < size


def is_float(dtype: str) -> bool:
    """Whether a type's last byte 0xFF is not a number that a weight has."""
    return dtype.startswith(("float", "bfloat"))
