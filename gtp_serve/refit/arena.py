"""Memory of a model's weights: a live range, a staged one, and the exchange of what they hold.  Addresses never change.

On a CPU the exchange is one of page tables: three calls move the pages of live, staged and a spare range round in a
circle, and no call leaves a hole into which another thread's allocation could fall.  On a GPU, and where the kernel
refuses, bytes are exchanged through a small buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.errors import DoesNotFit
from gtp_serve.refit.mapping import MappedRange, give_back, move_pages
from gtp_serve.sizes import format_gib

CHUNK_BYTES = 8 << 20
"""What an exchange by copying takes at a time."""

Move = Callable[[int, int, int], bool]
"""Moves the pages of a range (source, target, bytes) and leaves the source mapped and empty; False: refused."""


class Arena(Protocol):
    """Memory for one or two sets of weights."""

    @property
    def num_bytes(self) -> int:
        """Of one set."""
        ...

    def live(self, start: int, like: Tensor) -> Tensor:
        """A tensor of the shape and type of ``like`` at byte ``start`` of the live range."""
        ...

    def staged(self, start: int, like: Tensor) -> Tensor:
        """The same in the staged range, which takes no memory before it is written to on a CPU."""
        ...

    def swap(self) -> None:
        """Exchange what the ranges hold; nobody may be reading or writing either."""
        ...

    def release_live(self) -> int:
        """Give the live range's memory back, keeping its addresses; it then holds zeros.  Bytes given back."""
        ...

    def release_staged(self) -> int:
        """The same for the staged range."""
        ...


def open_arena(num_bytes: int, device: torch.device, memory: MappedRange | None = None) -> Arena:
    """The arena for a device.

    :param memory: of the live set on a CPU, taken before; another range is mapped where it is too small.
    """
    if device.type != "cpu":
        return DeviceArena(num_bytes, device)
    return MappedArena(num_bytes, memory=memory)


# -- host memory -----------------------------------------------------------------------------------


class MappedArena:
    """Ranges of this process's address space; each is unmapped when the arena and its last tensor are gone.

    :param memory: of the live set, where it is large enough.
    :param move: moves pages; by default the kernel does.
    :raises DoesNotFit: when the system gives no address space.
    """

    def __init__(self, num_bytes: int, *, memory: MappedRange | None = None, move: Move | None = None) -> None:
        self.num_bytes = num_bytes
        self._move = move or move_pages
        if memory is not None and memory.size >= num_bytes:
            memory.shorten(num_bytes)
            self._live = memory
        else:
            if memory is not None:
                memory.release()
            self._live = MappedRange(num_bytes)
        self._staged: MappedRange | None = None
        self._spare: MappedRange | None = None

    def live(self, start: int, like: Tensor) -> Tensor:
        """A tensor of the shape and type of ``like`` at byte ``start`` of the live range."""
        return _tensor(self._live, start, like)

    def staged(self, start: int, like: Tensor) -> Tensor:
        """The same in the staged range."""
        return _tensor(self._second(), start, like)

    def swap(self) -> None:
        """Exchange what the ranges hold."""
        live, staged = self._live, self._second()
        if self._spare is None:
            self._spare = _reserve_quietly(live.size)
        spare = self._spare
        if spare is None or not self._move(live.address, spare.address, live.size):
            # Refused after the target was unmapped, perhaps: that range may be somebody else's by now.
            if spare is not None:
                spare.forget()
                self._spare = None
                self._move = _refuse
            swap_by_copying(_bytes(live), _bytes(staged))
            return
        for source, target in ((staged, live), (spare, staged)):
            if not self._move(source.address, target.address, live.size):
                target.map_again()
                _copy_pages(source, target)

    def release_live(self) -> int:
        """Give the live range's memory back, keeping its addresses."""
        return self._live.release()

    def release_staged(self) -> int:
        """Give the staged range's memory back."""
        return 0 if self._staged is None else self._staged.release()

    def _second(self) -> MappedRange:
        if self._staged is None:
            self._staged = MappedRange(self._live.size)
        return self._staged


def _tensor(memory: MappedRange, start: int, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return torch.empty_like(like)
    flat = torch.frombuffer(memory.memory, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)


def _bytes(memory: MappedRange) -> Tensor:
    return torch.frombuffer(memory.memory, dtype=torch.uint8)


def _reserve_quietly(size: int) -> MappedRange | None:
    with suppress(DoesNotFit):
        return MappedRange(size)
    return None


def swap_by_copying(a: Tensor, b: Tensor, chunk: int = CHUNK_BYTES) -> None:
    """Exchange the bytes of two flat tensors of one device through a small buffer."""
    buffer = torch.empty(min(chunk, a.numel()), dtype=torch.uint8, device=a.device)
    for first in range(0, a.numel(), chunk):
        one, other = a[first : first + chunk], b[first : first + chunk]
        held = buffer[: one.numel()]
        held.copy_(one)
        one.copy_(other)
        other.copy_(held)


def _copy_pages(source: MappedRange, target: MappedRange) -> None:
    """What ``move_pages`` does, byte by byte; at no time is more than one chunk in memory twice."""
    for first in range(0, source.size, CHUNK_BYTES):
        count = min(CHUNK_BYTES, source.size - first)
        ctypes.memmove(target.address + first, source.address + first, count)
        give_back(source.address + first, count)


def _refuse(source: int, target: int, size: int) -> bool:
    return False


# -- device memory ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Tensor

    def tensor(self, start: int, like: Tensor) -> Tensor:
        return self.memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class DeviceArena:
    """One buffer of the device for each set.

    :raises DoesNotFit: when the device has no room.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._live = self._allocate()
        self._staged: _Buffer | None = None

    def live(self, start: int, like: Tensor) -> Tensor:
        """A tensor of the shape and type of ``like`` at byte ``start`` of the live buffer."""
        return self._live.tensor(start, like)

    def staged(self, start: int, like: Tensor) -> Tensor:
        """The same in the staged buffer, which is allocated now if there is none."""
        if self._staged is None:
            self._staged = self._allocate()
        return self._staged.tensor(start, like)

    def swap(self) -> None:
        """Exchange what the buffers hold, after whatever the device was told before."""
        if self._staged is None:
            self._staged = self._allocate()
        with torch.inference_mode():
            swap_by_copying(self._live.memory, self._staged.memory, chunk=8 * CHUNK_BYTES)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def release_live(self) -> int:
        """Nothing: captured steps hold the buffer's address, and the device's memory goes with it."""
        return 0

    def release_staged(self) -> int:
        """Free the staged buffer; tensors taken from it keep it alive until they are gone."""
        freed = 0 if self._staged is None else self.num_bytes
        self._staged = None
        if freed and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def _allocate(self) -> _Buffer:
        try:
            return _Buffer(torch.empty(max(1, self.num_bytes), dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(f"{self._device} has no {format_gib(self.num_bytes)} for a set of weights") from error
