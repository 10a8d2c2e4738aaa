"""Bytes of a file into many places at a time: the right ones, and one clear error where they are not there."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.errors import CheckpointCorrupt, CheckpointError
from gtp_serve.loaders import files, scatter
from gtp_serve.loaders.files import FileViews
from gtp_serve.refit.source import Rows

SIZE = 300_000
DATA = random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    return path


class Memory:
    """Memory to read into; every byte is 0xff at first."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(b"\xff" * size, size)
        self.address = ctypes.addressof(self.buffer)

    def rows(self, start: int, source_stride: int, size: int, count: int, at: int, stride: int) -> Rows:
        return Rows(start, source_stride, size, count, self.address + at, stride)


def expected(memory: Memory, rows: list[Rows], base: int) -> bytes:
    """What each byte by itself should have become."""
    out = bytearray(b"\xff" * len(memory.buffer.raw))
    for row in rows:
        for i in range(row.count):
            start, at = base + row.start + i * row.source_stride, row.address - memory.address + i * row.stride
            out[at : at + row.size] = DATA[start : start + row.size]
    return bytes(out)


PATTERNS: dict[str, Callable[[Memory], list[Rows]]] = {
    "one row": lambda m: [m.rows(7, 0, 1000, 1, 3, 0)],
    "rows with room between them": lambda m: [m.rows(7, 64, 64, 2500, 5, 80)],
    "more rows than one call takes": lambda m: [m.rows(0, 16, 16, 5000, 0, 33)],
    "columns: a little is skipped": lambda m: [m.rows(11, 100, 30, 2000, 0, 40)],
    "columns: much is skipped": lambda m: [m.rows(11, 60_000, 30, 4, 0, 40)],
    "neighbours that are one stretch": lambda m: [m.rows(0, 50, 50, 10, 4000, 60), m.rows(500, 0, 500, 1, 9, 0)],
    "neighbours after skipped bytes": lambda m: [m.rows(0, 50, 20, 10, 4000, 60), m.rows(470, 0, 500, 1, 9, 0)],
    "stretches that lie apart": lambda m: [m.rows(0, 50, 50, 10, 4000, 60), m.rows(9000, 70, 10, 5, 0, 11)],
    "a far one between near ones": lambda m: [
        m.rows(0, 0, 10, 1, 0, 0),
        m.rows(10, 50_000, 10, 3, 50, 10),
        m.rows(100_020, 0, 10, 1, 100, 0),
    ],
    "the same bytes twice": lambda m: [m.rows(5, 0, 10, 1, 0, 0), m.rows(5, 0, 10, 1, 20, 0)],
    "overlapping rows of the source": lambda m: [m.rows(5, 4, 10, 6, 0, 10)],
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no native reader."""
    monkeypatch.setattr(scatter, "native_reader", lambda: None)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("base", [0, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_are_filled_and_nothing_else(
    name: str, base: int, native: bool, path: Path, request: pytest.FixtureRequest
) -> None:
    if not native:
        request.getfixturevalue("plain")
    memory = Memory(260_000)
    rows = PATTERNS[name](memory)

    FileViews({path: SIZE}).read_into(path, base, SIZE - base, rows)

    assert memory.buffer.raw == expected(memory, rows, base)


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch, plain: None) -> list[int]:
    """The system reads a few bytes a call, and is interrupted now and then."""
    real, rng, calls = scatter._preadv, random.Random(1), list[int]()

    def a_few(descriptor: int, table: int, count: int, offset: int) -> int:
        calls.append(count)
        if rng.random() < 0.2:
            ctypes.set_errno(errno.EINTR)
            return -1
        address, size = (ctypes.c_uint64 * 2).from_address(table)
        one = (ctypes.c_uint64 * 2)(address, min(size, rng.randint(1, 400)))
        return int(real(descriptor, ctypes.addressof(one), 1, offset))

    monkeypatch.setattr(scatter, "_preadv", a_few)
    return calls


@pytest.mark.parametrize("name", PATTERNS)
def test_reads_that_stop_half_way_are_taken_up_again(name: str, path: Path, short_reads: list[int]) -> None:
    memory = Memory(260_000)
    rows = PATTERNS[name](memory)

    FileViews({path: SIZE}).read_into(path, 0, SIZE, rows)

    assert memory.buffer.raw == expected(memory, rows, 0)
    assert max(short_reads) <= scatter.MAX_PLACES


def test_a_file_that_is_cut_short_after_it_was_opened_ends_in_one_error(path: Path) -> None:
    views, memory = FileViews({path: SIZE}), Memory(SIZE)
    views.read_into(path, 0, SIZE, [memory.rows(0, 0, 10, 1, 0, 0)])
    os.truncate(path, 200_000)

    with pytest.raises(CheckpointCorrupt, match=r"weights ends early: nothing is left at byte 200000"):
        views.read_into(path, 0, SIZE, [memory.rows(0, 100, 100, 3000, 0, 100)])
    with pytest.raises(CheckpointCorrupt, match="weights ends 50 bytes early"):
        views.read(path, 199_950, 100)


def test_rows_outside_the_range_are_refused_before_anything_is_read(path: Path) -> None:
    views, memory = FileViews({path: SIZE}), Memory(100)
    for row in (
        memory.rows(90, 0, 11, 1, 0, 0),
        memory.rows(0, 50, 10, 3, 0, 10),
        memory.rows(-1, 0, 10, 1, 0, 0),
        memory.rows(20, -10, 10, 3, 0, 10),
    ):
        with pytest.raises(CheckpointCorrupt, match="100 bytes of a tensor at byte 7"):
            views.read_into(path, 7, 100, [row])
    with pytest.raises(CheckpointCorrupt, match="has 300000 bytes, 300001 are needed"):
        views.read_into(path, 1, SIZE, [memory.rows(0, 0, 1, 1, 0, 0)])
    assert memory.buffer.raw == b"\xff" * 100


def test_what_the_system_says_is_passed_on(path: Path, monkeypatch: pytest.MonkeyPatch, plain: None) -> None:
    def fail(*_: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(scatter, "_preadv", fail)

    with pytest.raises(CheckpointCorrupt, match="weights cannot be read: Input/output error"):
        FileViews({path: SIZE}).read_into(path, 0, SIZE, [Memory(10).rows(0, 0, 10, 1, 0, 0)])


def test_files_beyond_the_limit_are_opened_for_each_read_and_all_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 2)
    paths = [tmp_path / str(i) for i in range(5)]
    for at, path in enumerate(paths):
        path.write_bytes(bytes([at]) * 10)
    before, memory = _open_files(), Memory(10)
    views = FileViews(dict.fromkeys(paths, 10))

    for at, path in enumerate(paths):
        views.read_into(path, 0, 10, [memory.rows(0, 0, 10, 1, 0, 0)])
        assert memory.buffer.raw == bytes([at]) * 10
    assert _open_files() - before == {str(paths[0]), str(paths[1])}
    views.close()

    assert not _open_files() - before
    with pytest.raises(CheckpointError, match="closed"):
        views.read_into(paths[0], 0, 10, [memory.rows(0, 0, 10, 1, 0, 0)])


def _open_files() -> set[str]:
    return {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
