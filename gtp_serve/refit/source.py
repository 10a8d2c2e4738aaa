"""Where weights come from: anything that lists its shards and hands out their bytes.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from gtp_serve.layout.spans import Shard


class WeightSource(Protocol):
    """Shards on offer.  A checkpoint on disk, a trainer's memory and a network peer all look like this."""

    def shards(self) -> Sequence[Shard]:
        """Metadata of every shard, in a fixed order; reads no tensor bytes."""
        ...

    def read(self, index: int) -> memoryview:
        """The bytes of ``shards()[index]``: row-major, contiguous, native byte order, format ``B``, writable or not.

        The view is valid until ``close``; a file-backed source returns a view of the mapped file (no copy).

        :raises CheckpointCorrupt: when the bytes are not there.
        """
        ...

    def close(self) -> None:
        """Let go of files and mappings; views handed out before must not be used any more."""
        ...


class Rows(NamedTuple):
    """Bytes of a shard and the memory they go to: ``count`` rows (at least one) of ``size`` bytes each.

    Row i is the shard's bytes from ``start + i * source_stride`` and goes to ``address + i * stride``.
    """

    start: int
    source_stride: int
    size: int
    count: int  # type: ignore[assignment]  # tuple's method of that name is not missed
    address: int
    stride: int
    convert: int = 0
    """How elements are converted on the way (see ``refit.native_copy``); 0: not at all.  ``stride`` is of what they
    become."""

    @property
    def end(self) -> int:
        """One past the last of the shard's bytes."""
        return self.start + (self.count - 1) * self.source_stride + self.size


@runtime_checkable
class DirectSource(WeightSource, Protocol):
    """A source that can put bytes where they belong, with no view of them in between."""

    def read_into(self, index: int, rows: Sequence[Rows]) -> None:
        """Fill the rows' memory with bytes of ``shards()[index]``.  Several threads may call it at a time.

        :param rows: in any order; their memory is writable, stays where it is until this returns, and holds anything
            at all when it raises.
        :raises CheckpointCorrupt: when the bytes are not there.
        """
        ...


@runtime_checkable
class BatchSource(DirectSource, Protocol):
    """A source that puts bytes of many shards where they belong in one go, and converts them on the way."""

    @property
    def batches(self) -> bool:
        """Whether it does so here."""
        ...

    def read_many(self, parts: Sequence[tuple[int, Sequence[Rows]]]) -> None:
        """As ``read_into`` for each (index, rows); rows may ask for a conversion.

        :raises CheckpointCorrupt: when the bytes are not there, naming the shard.
        """
        ...
