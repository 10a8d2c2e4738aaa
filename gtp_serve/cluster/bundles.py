"""Weights between machines: shards in pieces of a few MiB, each an object of the cluster's object store.

A bundle is made once by whoever has the weights.  Nobody changes it: whoever takes it copies it into sealed memory,
where the engine's ranks verify each shard's digest before they vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gtp_serve.errors import UpdateFailed
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import StoredShard
from gtp_serve.refit.shared import SealedMemory, lay_out, num_bytes
from gtp_serve.refit.source import WeightSource

BUNDLE_BYTES = 32 << 20
Bytes = npt.NDArray[np.uint8]
Put = Callable[[Bytes], Any]
"""Makes an object of bytes; a reference to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Shards one after the other, and where their bytes are."""

    shards: tuple[StoredShard, ...]
    """Offsets are into the bundle's bytes."""
    size: int
    data: Any
    """A reference to the object."""

    @property
    def payload(self) -> int:
        """Bytes of weights; the rest is alignment."""
        return sum(num_bytes(stored.shard) for stored in self.shards)

    def at(self, data: Any) -> Bundle:
        """The same bytes in another object."""
        return replace(self, data=data)


def pack_source(source: WeightSource, put: Put, *, size: int = BUNDLE_BYTES) -> list[Bundle]:
    """All shards of a source, in bundles of about ``size`` bytes; a shard is never cut.

    :raises UpdateFailed: when the source's bytes are not those that its writer made the digest of.
    """
    shards = source.shards()
    bundles: list[Bundle] = []
    for group in _groups([num_bytes(shard) for shard in shards], size):
        starts, total = lay_out([shards[index] for index in group])
        data = np.zeros(total, np.uint8)
        stored: list[StoredShard] = []
        for place, index in enumerate(group):
            view = source.read(index)
            start = starts[place]
            data[start : start + len(view)] = np.frombuffer(view, np.uint8)
            digest = digest_bytes(data[start : start + len(view)].data)
            stored.append(StoredShard(shard=shards[index], segment=0, offset=start, digest=digest))
        bundles.append(Bundle(shards=tuple(stored), size=total, data=put(data)))
    return bundles


def pack_stored(
    memory: memoryview, stored: Sequence[StoredShard], put: Put, *, size: int = BUNDLE_BYTES
) -> list[Bundle]:
    """Shards that lie in memory with their digests, in bundles; their digests are taken over, not made again."""
    bundles: list[Bundle] = []
    for group in _groups([num_bytes(one.shard) for one in stored], size):
        starts, total = lay_out([stored[index].shard for index in group])
        data = np.zeros(total, np.uint8)
        moved: list[StoredShard] = []
        for place, index in enumerate(group):
            one, start = stored[index], starts[place]
            count = num_bytes(one.shard)
            data[start : start + count] = np.frombuffer(memory[one.offset : one.offset + count], np.uint8)
            moved.append(msgspec.structs.replace(one, segment=0, offset=start))
        bundles.append(Bundle(shards=tuple(moved), size=total, data=put(data)))
    return bundles


class Unpacking:
    """Bundles copied into memory that is sealed at the end, in any order and by several threads at a time; ``memory``
    is the caller's to close.

    :raises UpdateFailed: when there is no such memory.
    """

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.bundles = tuple(bundles)
        self._starts: list[int] = []
        end = 0
        for bundle in bundles:
            self._starts.append(end)
            end += bundle.size
        self.memory = SealedMemory(end, reserve=True)

    def add(self, index: int, data: Bytes) -> None:
        """Copy a bundle's bytes.

        :raises UpdateFailed: when it has not as many as it said.
        """
        if len(data) != self.bundles[index].size:
            raise UpdateFailed(f"a bundle has {len(data):,} bytes, {self.bundles[index].size:,} were told")
        self.memory.write(self._starts[index], data.data)

    def seal(self) -> tuple[StoredShard, ...]:
        """All are there: the shards and where each lies."""
        self.memory.seal()
        return tuple(
            msgspec.structs.replace(one, offset=one.offset + start)
            for bundle, start in zip(self.bundles, self._starts, strict=True)
            for one in bundle.shards
        )


def share_out(bundles: Sequence[Bundle], takers: int) -> list[list[int]]:
    """Indices of bundles for each taker, about as many bytes for each: every bundle goes to exactly one."""
    shares: list[list[int]] = [[] for _ in range(takers)]
    loads = [0] * takers
    for index in sorted(range(len(bundles)), key=lambda index: -bundles[index].size):
        taker = loads.index(min(loads))
        shares[taker].append(index)
        loads[taker] += bundles[index].size
    return [sorted(share) for share in shares]


def _groups(sizes: Iterable[int], limit: int) -> list[list[int]]:
    groups: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not groups or (held + size > limit and held):
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups
