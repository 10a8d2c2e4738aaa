"""Memory of a model's weights: a live range, a staged one, and the exchange of what they hold.  Addresses never change.

On a CPU the exchange is one of page tables: three calls move the pages of live, staged and a spare range round in a
circle, and no call leaves a hole into which another thread's allocation could fall.  On a GPU, and where the kernel
refuses, bytes are exchanged through a small buffer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gtp_serve.errors import DoesNotFit, EngineFault
from gtp_serve.sizes import format_gib

HUGE_PAGE = 2 << 20
"""Ranges begin and end on these, so that whole tables of pages move and large pages stay whole."""
CHUNK_BYTES = 8 << 20
"""What an exchange by copying takes at a time."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED_NOREPLACE = 0x100000
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_DONTNEED, _HUGEPAGE = 4, 14
_MS_ASYNC = 1

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


def open_arena(num_bytes: int, device: torch.device) -> Arena:
    """The arena for a device."""
    return MappedArena(num_bytes) if device.type == "cpu" else DeviceArena(num_bytes, device)


# -- host memory -----------------------------------------------------------------------------------


class MappedArena:
    """Ranges of this process's address space; each is unmapped when the arena and its last tensor are gone.

    :param move: moves pages; by default the kernel does.
    :raises DoesNotFit: when the system gives no address space.
    """

    def __init__(self, num_bytes: int, *, move: Move | None = None) -> None:
        self.num_bytes = num_bytes
        self._move = move or move_pages
        self._live = _Range(_rounded(num_bytes))
        self._staged: _Range | None = None
        self._spare: _Range | None = None

    def live(self, start: int, like: Tensor) -> Tensor:
        """A tensor of the shape and type of ``like`` at byte ``start`` of the live range."""
        return self._live.tensor(start, like)

    def staged(self, start: int, like: Tensor) -> Tensor:
        """The same in the staged range."""
        return self._second().tensor(start, like)

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
            swap_by_copying(live.bytes(), staged.bytes())
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

    def _second(self) -> _Range:
        if self._staged is None:
            self._staged = _Range(self._live.size)
        return self._staged


class _Range:
    """A mapped, private, huge-page-aligned range of addresses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _reserve(size)
        _call("madvise", self.address, size, _HUGEPAGE)  # refused without transparent huge pages: small ones then
        self._memory: Any = (ctypes.c_ubyte * size).from_address(self.address)
        # Tensors hold the memory object, not this one.
        self._unmap = weakref.finalize(self._memory, _unmap, self.address, size)
        self._unmap.atexit = False  # threads may still be reading then, and the process's memory goes anyway

    def tensor(self, start: int, like: Tensor) -> Tensor:
        if like.numel() == 0:
            return torch.empty_like(like)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def bytes(self) -> Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def release(self) -> int:
        """Forget the pages; bytes that were held."""
        held = resident_bytes(self.address, self.size)
        give_back(self.address, self.size)
        return held

    def forget(self) -> None:
        """Leave the addresses alone from now on: they may no longer be this range's."""
        self._unmap.detach()

    def map_again(self) -> None:
        """After a refused move into this range: make sure that it is mapped.

        :raises EngineFault: when something else lies there now.
        """
        if _call("msync", self.address, self.size, _MS_ASYNC) == 0:
            return
        flags = _ANONYMOUS | _FIXED_NOREPLACE
        found = _LIBC.mmap(self.address, self.size, _READ_WRITE, flags, -1, 0)
        if found != self.address:
            raise EngineFault("the address range of the weights was lost while they were exchanged")


def move_pages(source: int, target: int, size: int) -> bool:
    """Let the pages of a range appear at another one, whose own go; the source stays mapped, and empty.

    :return: False when the kernel refuses (before Linux 5.7 it always does).
    """
    moved: int | None = _LIBC.mremap(source, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, target)
    return moved == target


def give_back(address: int, size: int) -> None:
    """Give the memory of whole pages inside a private range back to the system; they read as zeros then."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _call("madvise", first, last - first, _DONTNEED)


def resident_bytes(address: int, size: int) -> int:
    """Bytes of a page-aligned range that are in memory."""
    pages = -(-size // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    if _call("mincore", address, size, ctypes.addressof(seen)):
        return 0
    return sum(byte & 1 for byte in bytes(seen)) * mmap.PAGESIZE


def swap_by_copying(a: Tensor, b: Tensor, chunk: int = CHUNK_BYTES) -> None:
    """Exchange the bytes of two flat tensors of one device through a small buffer."""
    buffer = torch.empty(min(chunk, a.numel()), dtype=torch.uint8, device=a.device)
    for first in range(0, a.numel(), chunk):
        one, other = a[first : first + chunk], b[first : first + chunk]
        held = buffer[: one.numel()]
        held.copy_(one)
        one.copy_(other)
        other.copy_(held)


def _copy_pages(source: _Range, target: _Range) -> None:
    """What ``move_pages`` does, byte by byte; at no time is more than one chunk in memory twice."""
    for first in range(0, source.size, CHUNK_BYTES):
        count = min(CHUNK_BYTES, source.size - first)
        ctypes.memmove(target.address + first, source.address + first, count)
        give_back(source.address + first, count)


def _refuse(source: int, target: int, size: int) -> bool:
    return False


def _rounded(size: int) -> int:
    return max(1, -(-size // HUGE_PAGE)) * HUGE_PAGE


def _reserve(size: int) -> int:
    """A new private range on a huge page's border; its address."""
    wide = size + HUGE_PAGE
    found: int | None = _LIBC.mmap(None, wide, _READ_WRITE, _ANONYMOUS, -1, 0)
    if found is None or found == _FAILED:
        raise DoesNotFit(
            f"the system gives no address range of {format_gib(size)} for weights",
            [("system", os.strerror(ctypes.get_errno()))],
        )
    start = -(-found // HUGE_PAGE) * HUGE_PAGE
    for first, last in ((found, start), (start + size, found + wide)):
        if last > first:
            _unmap(first, last - first)
    return start


def _reserve_quietly(size: int) -> _Range | None:
    with suppress(DoesNotFit):
        return _Range(size)
    return None


def _unmap(address: int, size: int) -> None:
    _call("munmap", address, size)


def _call(name: str, *arguments: int) -> int:
    """A system call of the C library by name: 0, or the error's number."""
    result: int = getattr(_LIBC, name)(*arguments)
    return ctypes.get_errno() if result else 0


def _open_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.mremap.argtypes, libc.mremap.restype = (pointer, size, size, number, pointer), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = libc.msync.argtypes = (pointer, size, number)
    libc.mincore.argtypes = (pointer, size, pointer)
    return libc


_LIBC = _open_libc()
_FAILED = ctypes.c_void_p(-1).value


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
