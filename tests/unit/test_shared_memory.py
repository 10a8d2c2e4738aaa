"""Weights in sealed memory of another process: read where they lie, refused in one sentence when anything is off."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import MemoryOrder, Segment, StoredShard
from gtp_serve.refit.shared import MemorySource, SealedMemory, SharedBytes, lay_out

DATA = bytes(range(32))
BOX = Box.whole((8,))
SHARD = Shard("weight", (8,), "float32", (Span("weight", BOX, BOX),))

#: Holds sealed memory and tells where, until its standard input closes.
HOLDER = """
import os, sys, fcntl
fd = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
os.write(fd, bytes(range(32)))
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
print(fd, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    with SealedMemory(32) as memory:
        memory.append(DATA)
        yield memory


def stored(**changes: object) -> StoredShard:
    values = {"shard": SHARD, "segment": 0, "offset": 0, "digest": digest_bytes(DATA), **changes}
    return StoredShard(**values)  # type: ignore[arg-type]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def refusal(segment: Segment) -> str:
    """The message, after making sure that nothing is left open."""
    before = open_fds()
    with pytest.raises(UpdateRefused) as caught:
        SharedBytes(segment)
    assert open_fds() == before
    assert "\n" not in caught.value.message
    return caught.value.message


def test_sealed_bytes_are_read_where_they_lie(memory: SealedMemory) -> None:
    shared = SharedBytes(memory.seal())

    assert bytes(shared.view) == DATA
    assert shared.view.readonly
    shared.close()
    shared.close()


def test_bytes_of_another_process_are_read_and_outlive_it() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        segment = Segment(pid=holder.pid, fd=int(holder.stdout.readline()), size=32)
        shared = SharedBytes(segment)
        holder.kill()
        holder.wait()

        assert bytes(shared.view) == DATA
        assert refusal(segment).endswith("is not there: there is no such process")


def test_writer_cannot_write_after_sealing(memory: SealedMemory) -> None:
    memory.seal()

    with pytest.raises(UpdateFailed, match="no shared memory"):
        memory.write(0, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(memory.segment().fd, 0)


def test_sealing_twice_tells_the_same_place(memory: SealedMemory) -> None:
    assert memory.seal() == memory.seal() == Segment(pid=os.getpid(), fd=memory.segment().fd, size=32)


def test_more_than_was_announced_is_refused() -> None:
    with SealedMemory(4) as memory:
        memory.append(b"abc")
        with pytest.raises(UpdateRefused, match="5 bytes are more than were announced; limit: 4 bytes"):
            memory.append(b"de")
        with pytest.raises(UpdateRefused):
            memory.write(-1, b"a")


def test_arrays_and_views_are_written_as_their_bytes() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with SealedMemory(values.nbytes, reserve=True) as memory:
        memory.write(12, values[1].data)
        memory.write(0, values[0].data)
        shared = SharedBytes(memory.seal())
        assert bytes(shared.view) == values.tobytes()
        shared.close()


def test_nothing_is_left_open_or_on_disk_by_a_writer() -> None:
    before, names = open_fds(), set(os.listdir("/dev/shm"))
    memory = SealedMemory(8)
    memory.append(b"abc")
    memory.seal()

    memory.close()
    memory.close()

    assert open_fds() == before
    assert set(os.listdir("/dev/shm")) == names


def test_memory_that_nobody_closed_goes_with_whoever_held_it() -> None:
    before = open_fds()
    memory = SealedMemory(8)
    memory.append(b"abc")
    shared = SharedBytes(memory.seal())
    assert len(open_fds() - before) == 3  # the writer's, the reader's and the map's own

    del memory, shared

    assert open_fds() == before


def test_a_view_outlives_the_reader_and_nothing_outlives_the_view(memory: SealedMemory) -> None:
    memory.seal()
    before = open_fds()
    shared = SharedBytes(memory.segment())
    view = shared.view[8:16]
    shared.close()

    assert bytes(view) == DATA[8:16]
    del view
    assert open_fds() == before


def test_unsealed_memory_is_refused(memory: SealedMemory) -> None:
    assert "is not sealed, so its bytes could still change" in refusal(memory.segment())


def test_memory_sealed_against_some_changes_only_is_refused(memory: SealedMemory) -> None:
    segment = memory.segment()
    fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    assert "is not sealed" in refusal(segment)


@pytest.mark.parametrize("size", [31, 33, 1 << 62])
def test_wrong_size_is_refused(memory: SealedMemory, size: int) -> None:
    segment = memory.seal()

    message = refusal(Segment(pid=segment.pid, fd=segment.fd, size=size))

    assert f"has 32 bytes, {size:,} were told" in message


def test_file_that_is_no_memfd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memfd:weights"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        message = refusal(Segment(pid=os.getpid(), fd=file.fileno(), size=32))

    assert "is not shared memory (a memfd)" in message


def test_pipe_socket_device_and_folder_are_refused_without_being_opened(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    one, other = socket.socketpair()
    descriptors = [reader, one.fileno(), os.open("/dev/zero", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)]
    try:
        for fd in descriptors:
            assert "is not shared memory" in refusal(Segment(pid=os.getpid(), fd=fd, size=32))
    finally:
        for fd in (*descriptors[2:], reader, writer):
            os.close(fd)
        one.close()
        other.close()


def test_other_users_memory_is_refused(memory: SealedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = memory.seal()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    assert f"belongs to user {os.getuid()}, the server runs as user 4242" in refusal(segment)


@pytest.mark.parametrize(
    ("pid", "fd", "size"),
    [(0, 3, 32), (-1, 3, 32), (os.getpid(), -1, 32), (os.getpid(), 3, 0), (os.getpid(), 3, -5)],
    ids=["pid 0", "pid -1", "fd -1", "size 0", "size -5"],
)
def test_numbers_that_cannot_be_are_refused(pid: int, fd: int, size: int) -> None:
    assert refusal(Segment(pid=pid, fd=fd, size=size)).endswith("has a number that cannot be")


@pytest.mark.parametrize(
    ("pid", "fd"),
    [(1 << 60, 3), (os.getpid(), 1 << 60), (os.getpid(), 987654)],
    ids=["pid too large", "fd too large", "fd not open"],
)
def test_numbers_that_name_nothing_are_refused(pid: int, fd: int) -> None:
    assert "is not there" in refusal(Segment(pid=pid, fd=fd, size=32))


# -- the shards of an order ------------------------------------------------------------------------


def test_shards_of_an_order_are_read_and_their_digests_verified(memory: SealedMemory) -> None:
    source = MemorySource(MemoryOrder(segments=(memory.seal(),), shards=(stored(),)))

    assert source.shards() == (SHARD,)
    assert bytes(source.read(0)) == DATA
    source.close()


def test_flipped_bit_is_told_with_the_shards_name(memory: SealedMemory) -> None:
    memory.write(17, bytes([DATA[17] ^ 4]))
    source = MemorySource(MemoryOrder(segments=(memory.seal(),), shards=(stored(),)))

    with pytest.raises(UpdateFailed, match=r"^weight: its bytes have the digest ") as caught:
        source.read(0)
    assert caught.value.code == "digest-mismatch"
    source.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": 1}, "there is no segment 1"),
        ({"segment": -1}, "there is no segment -1"),
        ({"offset": 4}, "leave its segment of 32 bytes"),
        ({"offset": -4}, "leave its segment of 32 bytes"),
        ({"offset": 1 << 70}, "leave its segment of 32 bytes"),
        ({"shard": Shard("weight", (1 << 40, 1 << 40), "float32", ())}, "leave its segment of 32 bytes"),
        ({"shard": Shard("weight", (-8,), "float32", ())}, r"\[-8\] is no shape"),
        ({"shard": Shard("weight", (1,) * 9, "float32", ())}, "is no shape"),
        ({"shard": Shard("weight", (8,), "complex64", ())}, "dtype complex64 is not known"),
    ],
)
def test_shard_that_cannot_lie_there_is_refused_before_anything_is_opened(
    memory: SealedMemory, changes: dict[str, object], message: str
) -> None:
    order = MemoryOrder(segments=(memory.seal(),), shards=(stored(**changes),))
    before = open_fds()

    with pytest.raises(UpdateRefused, match=message):
        MemorySource(order)
    assert open_fds() == before


def test_order_with_one_bad_segment_leaves_nothing_open(memory: SealedMemory) -> None:
    good = memory.seal()
    order = MemoryOrder(segments=(good, Segment(pid=os.getpid(), fd=987654, size=32)), shards=(stored(),))
    before = open_fds()

    with pytest.raises(UpdateRefused):
        MemorySource(order)
    assert open_fds() == before


def test_shards_are_laid_out_one_behind_the_other_on_whole_cache_lines() -> None:
    shards = [Shard("a", (3,), "bfloat16", ()), Shard("b", (40,), "float32", ()), Shard("c", (1,), "uint8", ())]

    starts, size = lay_out(shards)

    assert (dict(starts), size) == ({0: 0, 1: 64, 2: 256}, 257)
