"""Weights that have reached a front, as bundles for the fleet: a trainer's memory on its host, or a streamed file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gtp_serve.cluster.bundles import Bundle, pack_source
from gtp_serve.cluster.memory_host import put_object
from gtp_serve.loaders.huggingface import open_stream
from gtp_serve.refit.orders import Begin, Control, MemoryOrder, StreamOrder
from gtp_serve.refit.shared import MemorySource, SharedBytes, check_digest


async def bundles_of(command: Control) -> list[Bundle] | None:
    """The bytes of a Begin that only this host can open; None for any other command.

    :raises UpdateRefused: when they are not there, or are not what they are said to be.
    """
    if not isinstance(command, Begin):
        return None
    order = command.request.order
    if isinstance(order, MemoryOrder) and order.segments:
        return await asyncio.to_thread(_from_memory, order)
    if isinstance(order, StreamOrder):
        return await asyncio.to_thread(_from_stream, order)
    return None


def _from_memory(order: MemoryOrder) -> list[Bundle]:
    source = MemorySource(order)
    try:
        return pack_source(source, put_object)
    finally:
        source.close()


def _from_stream(order: StreamOrder) -> list[Bundle]:
    memory = SharedBytes(order.segment)
    try:
        if order.digest:
            check_digest(memory.view, order.digest, "the stream")
        source = open_stream(Path(f"/proc/self/fd/{memory.fd}"), len(memory.view))
        try:
            return pack_source(source, put_object)
        finally:
            source.close()
    finally:
        memory.close()
