"""Bytes of a file into many places of memory at a time: by the native reader, or ``preadv`` where there is none.

``os.preadv`` takes a list of buffers; a matrix that is cut by columns has thousands of short rows, and objects for
them would cost more than the copying does.  So its table of places is built here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Iterator, Sequence

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.refit.native_copy import Job, native_reader
from gtp_serve.refit.source import Rows

#: Entries of one call's table; Linux takes no more.
MAX_PLACES = 1024
#: Unwanted bytes between two rows that are read along, into memory that is not used: as dear as one more call.
MAX_SKIPPED = 16 << 10

_ADDRESS, _SIZE = 0, 1

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t


def scatter(descriptor: int, name: str, base: int, rows: Sequence[Rows], label: str = "") -> None:
    """Fill the rows' memory.

    :param name: of the file, for messages.
    :param base: where in the file the bytes that ``Rows.start`` counts from begin.
    :param label: the tensor, for messages.
    :raises CheckpointCorrupt: when the file ends early or cannot be read.
    """
    reader = native_reader()
    if reader is not None:
        reader.read([Job(descriptor, name, base, rows, label)])
        return
    if any(row.convert for row in rows):
        raise ValueError("elements are converted by the native reader only")
    try:
        _scatter(descriptor, name, base, rows)
    except CheckpointCorrupt as error:
        tensor = [("tensor", label)] if label else []
        raise CheckpointCorrupt(error.message, [*tensor, *error.details]) from None


def _scatter(descriptor: int, name: str, base: int, rows: Sequence[Rows]) -> None:
    if len(rows) == 1 and rows[0].count == 1:
        _fill(descriptor, name, base + rows[0].start, array("Q", (rows[0].address, rows[0].size)))
        return
    skipped = max([gap for row in rows if (gap := _gap(row)) <= MAX_SKIPPED], default=0)
    unused = ctypes.create_string_buffer(skipped) if skipped > 0 else None
    for start, places in _runs(rows, ctypes.addressof(unused) if unused is not None else 0):
        _fill(descriptor, name, base + start, places)


def _gap(row: Rows) -> int:
    """Bytes between two rows of the source; negative when it repeats some."""
    return row.source_stride - row.size if row.count > 1 else 0


def _runs(rows: Sequence[Rows], unused: int) -> Iterator[tuple[int, array[int]]]:
    """(first byte, table of places) for each stretch of bytes that are read one after another."""
    start = end = 0
    places = array("Q")
    for row in rows:
        gap = _gap(row)
        apart = not 0 <= gap <= MAX_SKIPPED
        if places and (apart or row.start != end):
            yield start, places
            places = array("Q")
        if apart:
            for i in range(row.count):
                yield row.start + i * row.source_stride, array("Q", (row.address + i * row.stride, row.size))
            continue
        start = start if places else row.start
        places += _table(row, gap, unused)
        end = row.end
    if places:
        yield start, places


def _table(row: Rows, gap: int, unused: int) -> array[int]:
    """Address and size of each row, and between them where the unwanted bytes go."""
    if row.count == 1:
        return array("Q", (row.address, row.size))
    step = 4 if gap else 2
    table = array("Q", (row.address, row.size, unused, gap)[:step]) * row.count
    table[::step] = array("Q", range(row.address, row.address + row.count * row.stride, row.stride))
    return table[:-2] if gap else table


def _fill(descriptor: int, name: str, offset: int, places: array[int]) -> None:
    first, total = 0, len(places) // 2
    while first < total:
        count = min(MAX_PLACES, total - first)
        address = places.buffer_info()[0] + first * 2 * places.itemsize
        done = _preadv(descriptor, address, count, offset)
        if done < 0:
            _raise(name, ctypes.get_errno())
            continue
        wanted = sum(places[2 * first + _SIZE : 2 * (first + count) : 2])
        if not done and wanted:
            raise CheckpointCorrupt(
                f"{name} ends early: nothing is left at byte {offset}",
                [("needed", f"{wanted} bytes more"), ("likely", "it was cut short or replaced while it was read")],
            )
        offset += done
        if done == wanted:
            first += count
        else:
            first = _advance(places, first, done)


def _advance(places: array[int], first: int, done: int) -> int:
    """The first place that is not full, which is then cut down to what it lacks."""
    while done >= places[2 * first + _SIZE]:
        done -= places[2 * first + _SIZE]
        first += 1
    places[2 * first + _ADDRESS] += done
    places[2 * first + _SIZE] -= done
    return first


def _raise(name: str, code: int) -> None:
    if code != errno.EINTR:
        raise CheckpointCorrupt(f"{name} cannot be read: {os.strerror(code)}")
