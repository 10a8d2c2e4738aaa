"""Bytes of files into places of memory, by the compiled library: one call for many files and places.  No torch.

Calls leave the interpreter's lock, and convert and compare while the bytes are in a core's cache.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.native_library import open_library
from gtp_serve.refit.source import Rows

MEMORY = -1
AS_IS = 0
#: How elements of one type become another's, by torch's names: numbers that the library knows.
CONVERSIONS = {("bfloat16", "float32"): 1, ("float32", "bfloat16"): 2}

_DONE, _ENDS_EARLY, _DIFFERS, _NO_MEMORY = range(4)
_ROWS, _CHECK, _JOB, _OUTCOME = 7, 4, 8, 4
"""Numbers of 64 bits in each structure of the library."""
_JOB_ROWS = 3
"""Where a job's rows are named in it."""
_VERSION = 2


class Checks:
    """Bytes that must be in a file: at each place those of ``value``, where the bits of ``mask`` are set.

    :param windows: (start, mask, value), in order of their start.
    """

    def __init__(self, windows: Sequence[tuple[int, bytes, bytes]]) -> None:
        self._kept = [(ctypes.c_char_p(mask), ctypes.c_char_p(value)) for _, mask, value in windows]
        table = array("q")
        for (start, mask, _), kept in zip(windows, self._kept, strict=True):
            table.extend((start, len(mask), *(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in kept)))
        self.count = len(windows)
        self._table = table
        self.address = table.buffer_info()[0]


class Job(NamedTuple):
    """Rows of one file, or of memory.

    :param descriptor: of the file; ``MEMORY``: ``base`` is an address.
    :param name: of the file, for messages.
    :param base: where in it the bytes lie that rows count from.
    :param label: the tensor, for messages.
    :param checks: of bytes that count from ``base + check_base``.
    :param whole: everything up to this byte from ``base`` is read, what is not asked for among it; 0: nothing else.
    """

    descriptor: int
    name: object
    base: int
    rows: Sequence[Rows]
    label: str = ""
    checks: Checks | None = None
    check_base: int = 0
    whole: int = 0


class NativeReader:
    """The library's reader.  Safe to use from threads.

    :param pread: called in place of the system's, by tests.
    """

    def __init__(self, library: ctypes.CDLL, pread: Any = None) -> None:
        self._read = library.gtp_read
        pointer = ctypes.c_void_p
        self._read.argtypes, self._read.restype = (pointer, ctypes.c_int64, pointer, pointer), None
        self._pread = pread

    def read(self, jobs: Sequence[Job]) -> int:
        """Carry out jobs in order.

        :return: how many were done: all, or up to one whose checks failed.
        :raises CheckpointCorrupt: when a file ends early or cannot be read.
        """
        numbers: list[int] = []
        table: list[int] = []
        first = 0
        for descriptor, _, base, rows, _, checks, check_base, whole in jobs:
            for row in rows:
                numbers += row  # the library's fields are those of Rows, in order
            count = len(rows)
            found = (0, 0) if checks is None else (checks.address, checks.count)
            table += (descriptor, base, whole, first, count, *found, check_base)
            first += count
        places = array("q", numbers)
        at, size = places.buffer_info()[0], places.itemsize * _ROWS
        table[_JOB_ROWS::_JOB] = [at + number * size for number in table[_JOB_ROWS::_JOB]]
        outcome = array("q", bytes(8 * _OUTCOME))
        packed = array("q", table)
        self._read(packed.buffer_info()[0], len(jobs), outcome.buffer_info()[0], self._pread)
        status, done, detail, offset = outcome
        if status == _DONE:
            return len(jobs)
        if status == _DIFFERS:
            return done
        raise _error(jobs[done], status, detail, offset)


def _error(job: Job, status: int, detail: int, offset: int) -> Exception:
    tensor = [("tensor", job.label)] if job.label else []
    if status == _NO_MEMORY:
        return MemoryError("none for a piece of a file")
    if status == _ENDS_EARLY:
        return CheckpointCorrupt(
            f"{job.name} ends early: nothing is left at byte {offset}",
            [
                *tensor,
                ("needed", f"{detail} bytes more"),
                ("likely", "it was cut short or replaced while it was read"),
            ],
        )
    return CheckpointCorrupt(f"{job.name} cannot be read: {os.strerror(detail)}", tensor)


@cache
def native_reader() -> NativeReader | None:
    """The reader; None where the library is missing, or older or newer than this module."""
    library = open_library()
    if library is None or not _fits(library):
        return None
    return NativeReader(library)


def _fits(library: Any) -> bool:
    sizes = (ctypes.c_int64 * 5)()
    try:
        library.gtp_read_sizes(sizes)
    except AttributeError:
        return False
    *found, version = sizes
    return version == _VERSION and [size // 8 for size in found] == [_ROWS, _CHECK, _JOB, _OUTCOME]
