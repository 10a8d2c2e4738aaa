"""Ranges of a process's address space: reserved, filled ahead of their use, moved, given back.

No torch here: an engine process takes the memory of its weights while torch is still being imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

from gtp_serve.errors import DoesNotFit, EngineFault
from gtp_serve.sizes import format_gib

HUGE_PAGE = 2 << 20
"""Ranges begin and end on these, so that whole tables of pages move and large pages stay whole."""

ALIGNMENT = 256
"""Bytes on which tensors in a range begin: whole cache lines on a CPU, whole memory transactions on a GPU."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED_NOREPLACE = 0x100000
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_DONTNEED, _HUGEPAGE, _POPULATE_WRITE = 4, 14, 23
_MS_ASYNC = 1
_POPULATED_AT_ONCE = 16 << 20


class MappedRange:
    """A mapped, private range of addresses on huge pages' borders; unmapped when nothing holds ``memory`` any more.

    :param size: bytes, rounded up to huge pages.
    :raises DoesNotFit: when the system gives no address space.
    """

    def __init__(self, size: int) -> None:
        self.size = rounded(size)
        self.address = _reserve(self.size)
        _call("madvise", self.address, self.size, _HUGEPAGE)  # refused without transparent huge pages: small ones then
        self._hold()

    def _hold(self) -> None:
        self.memory: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        # Whoever uses the memory holds that object, not this one.
        self._unmap = weakref.finalize(self.memory, unmap, self.address, self.size)
        self._unmap.atexit = False  # threads may still be reading then, and the process's memory goes anyway

    def populate(self, start: int = 0, size: int | None = None) -> None:
        """Take the memory now, which would else be taken page by page as it is first written; it holds zeros.

        Nothing happens where the kernel cannot do it (before Linux 5.14), or has no more memory.

        :param start: byte from which on, on a page's border; to the end unless ``size`` says less.
        """
        stop = self.size if size is None else min(self.size, start + size)
        for first in range(start, stop, _POPULATED_AT_ONCE):
            count = min(_POPULATED_AT_ONCE, stop - first)
            if _call("madvise", self.address + first, count, _POPULATE_WRITE):
                return

    def shorten(self, size: int) -> None:
        """Give back all but the first ``size`` bytes, rounded up; nobody may have used the range yet."""
        kept = rounded(size)
        if kept < self.size:
            self.forget()
            unmap(self.address + kept, self.size - kept)
            self.size = kept
            self._hold()

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


def rounded(size: int) -> int:
    """Up to whole huge pages, at least one."""
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
            unmap(first, last - first)
    return start


def unmap(address: int, size: int) -> None:
    """Take a range out of the address space."""
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
