"""Where weights come from: anything that lists its shards and hands out their bytes.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
