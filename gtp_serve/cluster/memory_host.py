"""The side of a node's ranks that knows Ray's object store: bundles into sealed memory for them, and out of it.

Each process that starts ranks has one; ranks themselves know nothing of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from gtp_serve.cluster.bundles import Bundle, Bytes, Unpacking, pack_stored
from gtp_serve.refit.orders import Segment, StoredShard
from gtp_serve.refit.shared import SealedMemory, SharedBytes

_AT_A_TIME = 8
"""Bundles that are brought to a node and copied at the same time."""


class MemoryHost:
    """What this process holds for updates under way, by their ids."""

    def __init__(self) -> None:
        self._held: dict[str, SealedMemory] = {}

    async def fetch(self, update: str, bundles: Sequence[Bundle]) -> tuple[Segment, tuple[StoredShard, ...]]:
        """Take bundles into memory that this node's ranks can open; kept until ``drop``.

        :raises UpdateFailed: when there is no room.
        """
        self.drop(update)
        unpacking = await asyncio.to_thread(Unpacking, bundles)
        free = asyncio.Semaphore(_AT_A_TIME)

        async def take(index: int, bundle: Bundle) -> None:
            async with free:
                await asyncio.to_thread(unpacking.add, index, await _bytes_of(bundle))

        try:
            await asyncio.gather(*(take(index, bundle) for index, bundle in enumerate(bundles)))
            stored = unpacking.seal()
        except BaseException:
            unpacking.memory.close()
            raise
        self._held[update] = unpacking.memory
        return unpacking.memory.segment(), stored

    async def publish(self, segment: Segment, stored: Sequence[StoredShard]) -> list[Bundle]:
        """Make objects of what a rank has written into its memory."""
        return await asyncio.to_thread(_publish, segment, stored)

    async def relay(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """The same bytes as objects of this node."""
        return [bundle.at(await asyncio.to_thread(put_object, await _bytes_of(bundle))) for bundle in bundles]

    def drop(self, update: str) -> None:
        """An update has ended."""
        memory = self._held.pop(update, None)
        if memory is not None:
            memory.close()

    def drop_all(self) -> None:
        """All have."""
        for update in list(self._held):
            self.drop(update)


def put_object(data: Bytes) -> Any:
    """A reference to an object of these bytes on this node."""
    return ray.put(data)


async def _bytes_of(bundle: Bundle) -> Bytes:
    """A bundle's bytes where they lie on this node, brought here if need be; not to be written to."""
    return np.asarray(await bundle.data, np.uint8)


def _publish(segment: Segment, stored: Sequence[StoredShard]) -> list[Bundle]:
    shared = SharedBytes(segment)
    try:
        return pack_stored(shared.view, stored, put_object)
    finally:
        shared.close()
