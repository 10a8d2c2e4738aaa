"""Weights in memory that two processes of a host share: written once, sealed, then read by whoever is told where.

It is a memfd: it has no name in any folder and is gone with the last process that holds it, whatever that dies of.
Sealed, its bytes cannot change under a reader that has verified them.  No torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from types import TracebackType
from typing import Self

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.digest import Data, digest_bytes
from gtp_serve.refit.orders import MemoryOrder, Segment, StoredShard
from gtp_serve.refit.plan import ITEM_BYTES

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NOEXEC_SEAL = 0x8
_MAX_AXES = 8
_NAME = "gtp-serve-weights"


# -- the writer ------------------------------------------------------------------------------------


class SealedMemory:
    """Memory to write into, then to seal and tell others of; closed, it goes when its readers are gone.

    :param limit: bytes it may hold.
    :param reserve: bytes to claim now, so that running out of memory shows before the first byte is written.
    :raises UpdateFailed: when the system has no such memory.
    """

    def __init__(self, limit: int, *, reserve: bool = False) -> None:
        self.limit = limit
        self.size = 0
        self._sealed = False
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self._fd = _create(flags)
            if reserve and limit:
                os.posix_fallocate(self._fd, 0, limit)
                self.size = limit
        except OSError as error:
            self.close()
            raise _no_memory(limit, error) from error

    _fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def append(self, data: Data) -> int:
        """Write at the end; where that was.

        :raises UpdateRefused: beyond the limit.
        """
        start = self.size
        self.write(start, data)
        return start

    def write(self, start: int, data: Data) -> None:
        """Write at a place.

        :raises UpdateRefused: beyond the limit.
        :raises UpdateFailed: when the machine has no memory left.
        """
        rest = memoryview(data).cast("B")
        if start < 0 or start + len(rest) > self.limit:
            raise UpdateRefused(
                f"{start + len(rest):,} bytes are more than were announced", [("limit", f"{self.limit:,} bytes")]
            )
        try:
            while rest:
                count = os.pwrite(self._fd, rest, start)
                rest, start = rest[count:], start + count
        except OSError as error:
            raise _no_memory(self.limit, error) from error
        self.size = max(self.size, start)

    def seal(self) -> Segment:
        """End the writing for good; where others find it while this process lives and has not closed it."""
        if not self._sealed:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._sealed = True
        return self.segment()

    def segment(self) -> Segment:
        """Where others find it; only sealed memory is accepted by them."""
        return Segment(pid=os.getpid(), fd=self._fd, size=self.size)

    def close(self) -> None:
        """Let go.  May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # a descriptor that nobody holds would keep a model's bytes while the process lives


def _create(flags: int) -> int:
    with suppress(OSError):  # Linux before 6.3 does not know the flag
        return os.memfd_create(_NAME, flags | _NOEXEC_SEAL)
    return os.memfd_create(_NAME, flags)


def _no_memory(size: int, error: OSError) -> UpdateFailed:
    return UpdateFailed(f"no shared memory for {size:,} bytes of weights", [("system", error.strerror or str(error))])


# -- the reader ------------------------------------------------------------------------------------


class SharedBytes:
    """Another process's sealed memory, mapped for reading.

    :raises UpdateRefused: in one sentence, for whatever is not sealed memory of the size that was told.
    """

    def __init__(self, segment: Segment) -> None:
        self._fd = _open_sealed(segment)
        try:
            # Held by its views alone, so that it goes with the last of them: it has a descriptor of its own.
            self.view = memoryview(mmap.mmap(self._fd, segment.size, access=mmap.ACCESS_READ))
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise UpdateRefused(f"{_words(segment)} cannot be mapped: {error}", code="bad-segment") from error

    _fd = -1

    @property
    def fd(self) -> int:
        """A descriptor of this process, open until ``close``."""
        return self._fd

    def close(self) -> None:
        """Let go; the map goes with its last view.  May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")

    def __del__(self) -> None:
        self.close()


def _open_sealed(segment: Segment) -> int:
    """A descriptor of the memory.

    It is looked at without being opened first: a number may name anything that a process has open, a device too.
    """
    where = _words(segment)
    if segment.pid <= 0 or segment.fd < 0 or segment.size <= 0:
        raise UpdateRefused(f"{where} has a number that cannot be", code="bad-segment")
    try:
        handle = os.open(f"/proc/{segment.pid}/fd/{segment.fd}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise UpdateRefused(f"{where} is not there: {_reason(segment, error)}", code="bad-segment") from error
    try:
        _check_handle(handle, segment)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UpdateRefused(f"{where} cannot be opened: {error.strerror}", code="bad-segment") from error
    finally:
        os.close(handle)
    try:
        _check_sealed(fd, segment)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_handle(handle: int, segment: Segment) -> None:
    where, info = _words(segment), os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or not os.readlink(f"/proc/self/fd/{handle}").startswith("/memfd:"):
        raise UpdateRefused(f"{where} is not shared memory (a memfd)", code="bad-segment")
    if info.st_uid != os.geteuid():
        raise UpdateRefused(
            f"{where} belongs to user {info.st_uid}, the server runs as user {os.geteuid()}", code="bad-segment"
        )


def _check_sealed(fd: int, segment: Segment) -> None:
    where = _words(segment)
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise UpdateRefused(
            f"{where} is not sealed, so its bytes could still change",
            [("needed", "F_SEAL_WRITE, F_SEAL_SHRINK and F_SEAL_GROW")],
            code="bad-segment",
        )
    size = os.fstat(fd).st_size
    if size != segment.size:
        raise UpdateRefused(f"{where} has {size:,} bytes, {segment.size:,} were told", code="bad-segment")


def _words(segment: Segment) -> str:
    return f"the memory {segment.fd} of process {segment.pid}"


def _reason(segment: Segment, error: OSError) -> str:
    if not os.path.exists(f"/proc/{segment.pid}"):
        return "there is no such process"
    if isinstance(error, PermissionError):
        return "this server may not read that process's descriptors"
    return "the process has no such descriptor"


class MemorySource:
    """The shards of a MemoryOrder; each one's digest is verified when it is read.

    :param rank: of the engine, which may be on another host than rank 0.
    :raises UpdateRefused: in one sentence, for segments and shards that are not what they are said to be.
    """

    def __init__(self, order: MemoryOrder, rank: int = 0) -> None:
        self._stored = order.shards
        self._segments: list[SharedBytes] = []
        segments = order.elsewhere.get(rank, order.segments)
        for shard in order.shards:
            _check_place(shard, segments)
        try:
            for segment in segments:
                self._segments.append(SharedBytes(segment))
        except BaseException:
            self.close()
            raise

    def shards(self) -> Sequence[Shard]:
        """All shards."""
        return tuple(stored.shard for stored in self._stored)

    def read(self, index: int) -> memoryview:
        """A shard's bytes where they lie.

        :raises UpdateFailed: when they are not those that its writer made the digest of.
        """
        stored = self._stored[index]
        whole = self._segments[stored.segment].view
        view = whole[stored.offset : stored.offset + num_bytes(stored.shard)]
        check_digest(view, stored.digest, stored.shard.key)
        return view

    def close(self) -> None:
        """Let go of the memory."""
        for segment in self._segments:
            segment.close()


def num_bytes(shard: Shard) -> int:
    """Of a shard's elements.

    :raises KeyError: for a type that is not known.
    """
    return prod(shard.shape) * ITEM_BYTES[shard.dtype]


def check_digest(data: Data, digest: str, what: str) -> None:
    """Compare bytes with the digest that their sender gave.

    :raises UpdateFailed: naming what it is.
    """
    found = digest_bytes(data)
    if found != digest:
        raise UpdateFailed(
            f"{what}: its bytes have the digest {found}, its sender gave {digest}", code="digest-mismatch"
        )


def _check_place(stored: StoredShard, segments: Sequence[Segment]) -> None:
    shard = stored.shard
    key = shard.key[:200]
    if shard.dtype not in ITEM_BYTES:
        raise UpdateRefused(f"{key}: dtype {shard.dtype[:40]} is not known", code="bad-shard")
    if len(shard.shape) > _MAX_AXES or min(shard.shape, default=0) < 0:
        raise UpdateRefused(f"{key}: {list(shard.shape[:_MAX_AXES])} is no shape", code="bad-shard")
    if not 0 <= stored.segment < len(segments):
        raise UpdateRefused(f"{key}: there is no segment {stored.segment}", code="bad-shard")
    size = segments[stored.segment].size
    if stored.offset < 0 or stored.offset + num_bytes(shard) > size:
        raise UpdateRefused(f"{key}: bytes from {stored.offset} on leave its segment of {size} bytes", code="bad-shard")


def lay_out(shards: Sequence[Shard], *, alignment: int = 64) -> tuple[Mapping[int, int], int]:
    """Where each shard's bytes go in one segment: (start of each index, bytes in all)."""
    starts: dict[int, int] = {}
    end = 0
    for index, shard in enumerate(shards):
        starts[index] = end = -(-end // alignment) * alignment
        end += num_bytes(shard)
    return starts, end
