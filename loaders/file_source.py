"""A weight source over plain byte ranges of files: what safetensors folders are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtp_serve.layout.spans import Shard
from gtp_serve.loaders.files import FileViews, Part
from gtp_serve.refit.source import Rows


@dataclass(frozen=True, slots=True)
class FileRange:
    """One shard and where its bytes lie."""

    shard: Shard
    path: Path
    start: int
    length: int


class FileSource:
    """Shards that are stored raw and contiguous."""

    def __init__(self, ranges: Sequence[FileRange], views: FileViews) -> None:
        self._ranges = tuple(ranges)
        self._shards = tuple(r.shard for r in ranges)
        self._views = views

    def shards(self) -> Sequence[Shard]:
        """All shards."""
        return self._shards

    def read(self, index: int) -> memoryview:
        """The shard's bytes inside the mapped file."""
        place = self._ranges[index]
        return self._views.view(place.path, place.start, place.length)

    def read_into(self, index: int, rows: Sequence[Rows]) -> None:
        """Read the shard's bytes to where they belong."""
        place = self._ranges[index]
        self._views.read_into(place.path, place.start, place.length, rows, place.shard.key)

    @property
    def batches(self) -> bool:
        """Whether ``read_many`` can be used."""
        return self._views.batches

    def read_many(self, parts: Sequence[tuple[int, Sequence[Rows]]]) -> None:
        """Read bytes of several shards to where they belong."""
        places = [(self._ranges[index], rows) for index, rows in parts]
        self._views.read_many([Part(p.path, p.start, p.length, rows, p.shard.key) for p, rows in places])

    def close(self) -> None:
        """Let go of the files."""
        self._views.close()
